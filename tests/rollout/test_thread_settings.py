"""A thread keeps no OpenMP workers while another thread computes."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

PROGRAM = """
import asyncio, json, os, time
import torch
from sixfold.engine.engine import Engine
from sixfold.model.causal_lm import CausalLM
from sixfold.model.loading import load_policy
from sixfold.recipe.schema import ModelConfig, ScratchConfig
from sixfold.rollout.engine_generator import EngineGenerator
from sixfold.rollout.generator import SampleKey
from sixfold.types import SamplingParams

def threads(readings=10):
    # Ended workers disappear a little later: wait until the number is stable.
    found = [len(os.listdir("/proc/self/task"))]
    while len(found) < readings or len(set(found[-readings:])) > 1:
        time.sleep(0.02)
        found.append(len(os.listdir("/proc/self/task")))
    return found[-1]

async def rollout():
    await generator.generate([3, 4, 5], SamplingParams(4), SampleKey("t", 0))
    counts["sampling"] = threads()
    await generator.sleep()
    counts["after rest"] = threads()

torch.set_num_threads(3)
model = load_policy(ModelConfig(scratch=ScratchConfig(context=64)), seed=0, device="cpu").model
generator = EngineGenerator(Engine(CausalLM(model), kv_tokens=200))
a = torch.ones(512, 512)
(a @ a).exp()
counts = {"training": threads()}
asyncio.run(rollout())
generator.close()
counts["closed"] = threads()
print(json.dumps(counts))
"""


@pytest.mark.nightly
@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="counts threads in /proc")
def test_only_the_thread_that_computes_has_workers() -> None:
    """Two threads would have more workers than cores. GNU OpenMP then lets workers sleep."""
    environment = {**os.environ, "SIXFOLD_KERNELS": "torch", "OMP_NUM_THREADS": "3"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True
    )
    counts = json.loads(done.stdout)
    assert counts["training"] == counts["closed"] + 2  # the workers of the main thread
    assert counts["sampling"] == counts["closed"] + 3  # the engine's thread and its workers
    assert counts["after rest"] == counts["closed"] + 1  # the engine's thread
