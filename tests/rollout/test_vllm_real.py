"""vLLM itself, under the interpreter that SIXFOLD_VLLM_PYTHON names (`make vllm`): its log-probs
compared with those of transformers, and a whole run.
"""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.conftest import make_tiny
from tests.rollouts import GeneratorRollout
from tests.run.processes import metrics
from tests.run.test_ahead_outside import AHEAD, gaps, run
from tests.run.test_vllm_of_ranks import on_ranks
from transformers import PreTrainedModel
from vllm_processes import load, log_probs, score, start, weights

from sixfold.backends.vllm_process import VllmProcess
from sixfold.errors import UserError
from sixfold.model.attention import NAME
from sixfold.model.loading import Policy, load_policy
from sixfold.recipe.schema import ModelConfig, ScratchConfig
from sixfold.renderer.renderer import Renderer
from sixfold.sync.sync import SyncError
from sixfold.sync.versioned import VersionedSync
from sixfold.types import SamplingParams, Task

PYTHON = os.environ.get("SIXFOLD_VLLM_PYTHON", "")
pytestmark = pytest.mark.skipif(
    not PYTHON, reason="SIXFOLD_VLLM_PYTHON names no interpreter with vllm: make vllm"
)

TASKS = [Task(f"t{i}", f"{i}+{'7' * i}=") for i in (3, 0, 1, 12)]
SIZES = ScratchConfig(
    hidden_size=64, layers=2, heads=2, kv_heads=1, head_dim=32, intermediate_size=64, context=64
)
LIMIT = 1e-4


@torch.no_grad()
def sharpened(policy: Policy, by: float = 6.0) -> Policy:
    """A copy with distributions that are far from uniform. Random weights give every token about
    the same probability.
    """
    model = copy.deepcopy(policy.model)
    for p in model.parameters():
        if p.dim() > 1:
            p.mul_(by)
    return replace(policy, model=model)


@pytest.fixture(scope="module")
def scratch() -> Policy:
    """A model with tied embeddings, as every model from scratch, and heads of 32, the smallest size
    that vLLM supports on a CPU.
    """
    return sharpened(load_policy(ModelConfig(scratch=SIZES), seed=3, device="cpu"))


@pytest.fixture(scope="module")
def engine(scratch: Policy) -> Iterator[VllmProcess]:
    process = start(scratch, PYTHON)
    VersionedSync(scratch.model, process, 1, LIMIT, 64).refresh()
    yield process
    process.close()


def make_rollout(policy: Policy, engine: VllmProcess, length: int = 12) -> GeneratorRollout:
    params = SamplingParams(
        max_tokens=length, temperature=0.7, stop_token_ids=policy.stop_token_ids
    )
    return GeneratorRollout(engine, Renderer(policy.tokenizer), params, 4)


def largest_gap(policy: Policy, engine: VllmProcess) -> float:
    """Largest difference between the log-probs of vLLM and of transformers, in nats."""
    gaps = []
    for group in make_rollout(policy, engine).generate(TASKS, 1):
        for t in group.trajectories:
            ours = log_probs(policy, t.tokens, 0.7)[t.prompt_length - 1 :]
            gaps.append(float((torch.tensor(t.logp[t.prompt_length :]) - ours).abs().max()))
            assert t.finish_reason == (
                "stop" if t.tokens[-1] in policy.stop_token_ids else "length"
            )
            assert set(t.version[t.prompt_length :]) == {engine.version}
    return max(gaps)


def test_log_probs_are_the_trainers_before_and_after_every_load(
    scratch: Policy, engine: VllmProcess
) -> None:
    assert engine.version == 0 and largest_gap(scratch, engine) < LIMIT
    before = score(engine, [7, 9, 11, 6, 30, 8])
    other = sharpened(scratch, 1.2)
    sync = VersionedSync(other.model, engine, 1, LIMIT, 64)
    sync.sync(3)
    assert engine.version == 3 and largest_gap(other, engine) < LIMIT
    assert (
        max(abs(a - b) for a, b in zip(before, score(engine, [7, 9, 11, 6, 30, 8]), strict=True))
        > 0.1
    )
    VersionedSync(scratch.model, engine, 1, LIMIT, 64).sync(4)
    assert engine.version == 4 and largest_gap(scratch, engine) < LIMIT


def test_a_tied_head_must_be_loaded_by_name(scratch: Policy, engine: VllmProcess) -> None:
    """If this fails, vLLM has fixed the fault, and `tied` of the worker can be removed."""
    other = sharpened(scratch, 1.5)
    tokens = [7, 9, 11, 6, 30, 8]
    load(engine, dict(other.model.named_parameters()), 5)
    assert (torch.tensor(score(engine, tokens)) - log_probs(other, tokens)).abs().max() > 0.1
    load(engine, weights(scratch), 6)
    assert (torch.tensor(score(engine, tokens)) - log_probs(scratch, tokens)).abs().max() < LIMIT


def test_same_seed_gives_same_tokens_in_any_batch(scratch: Policy, engine: VllmProcess) -> None:
    def drawn(tasks: list[Task], seed: int) -> dict[tuple[str, int], list[int]]:
        return {
            (t.task_id, t.sample): t.tokens
            for g in make_rollout(scratch, engine).generate(tasks, seed)
            for t in g.trajectories
        }

    first = drawn(TASKS, 1)
    assert drawn(TASKS[::-1], 1) == first
    assert drawn(TASKS[:1], 1) == {k: v for k, v in first.items() if k[0] == TASKS[0].id}
    assert all(drawn(TASKS, 2)[k] != v for k, v in first.items())


def test_experts_are_refused_where_vllm_loses_them(policy: Policy) -> None:
    """On a CPU, vLLM computes experts correctly after it has loaded them from a folder, and wrongly
    after it has reloaded the same weights. The probe detects this.
    """
    model: PreTrainedModel = make_tiny(
        "qwen3_moe", head_dim=32, num_attention_heads=2, moe_intermediate_size=64
    )
    model.set_attn_implementation(NAME)
    process = start(replace(policy, model=model), PYTHON)
    with pytest.raises(SyncError, match="engine and trainer score the probe differently"):
        VersionedSync(model, process, 1, LIMIT, 64).refresh()
    process.close()


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_other_architectures_untied(architecture: str, policy: Policy) -> None:
    model: PreTrainedModel = make_tiny(architecture, head_dim=32, num_attention_heads=2)
    model.set_attn_implementation(NAME)
    made = replace(policy, model=model)
    process = start(made, PYTHON)
    VersionedSync(model, process, 1, LIMIT, 64).refresh()
    assert largest_gap(made, process) < LIMIT
    process.close()


def test_two_processes_that_share_each_matrix(scratch: Policy) -> None:
    """They read every load from a folder. vLLM needs an even number of key heads for them."""
    sizes = SIZES.model_copy(update={"kv_heads": 2})
    made = sharpened(load_policy(ModelConfig(scratch=sizes), seed=3, device="cpu"))
    process = start(made, PYTHON, tensor_parallel_size=2)
    for version in (0, 1):
        VersionedSync(made.model, process, 1, LIMIT, 64).sync(version)
        assert process.version == version and largest_gap(made, process) < LIMIT
        made = sharpened(made, 1.2)
    process.close()


def test_bfloat16_is_close(scratch: Policy) -> None:
    process = start(scratch, PYTHON, torch.bfloat16)
    VersionedSync(scratch.model, process, 1, 0.2, 64).refresh()
    assert 1e-4 < largest_gap(scratch, process) < 1.0
    process.close()


def _alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def test_a_kill_in_the_middle_of_a_generation_is_named(scratch: Policy) -> None:
    process = start(scratch, PYTHON)
    load(process, weights(scratch), 0)
    threading.Timer(0.3, process._child.process.kill).start()
    with pytest.raises(UserError, match="killed by SIGKILL"):
        for seed in range(1000):
            make_rollout(scratch, process, 40).generate(TASKS, seed)
    assert not _alive(process._child.process.pid)


def _recipe(folder: Path, steps: int) -> list[str]:
    sizes = [
        part
        for key, value in SIZES.model_dump().items()
        if isinstance(value, int)
        for part in (f"--model.scratch.{key}", str(value))
    ]
    file = folder / "tiny.toml"
    file.write_text(
        f'[run]\nname = "tiny"\ndir = "{folder}"\nsteps = {steps}\nthreads = 1\n[data]\nheldout ='
        " 8\n[data.arithmetic]\ndigits = 1\n[environment]\npreflight = 16\n[sft]\nsteps ="
        f' 60\n[rollout]\nmax_new_tokens = 16\nbackend = {{kind = "vllm", python = "{PYTHON}"}}\n'
        "[trainer]\nlearning_rate = 1e-3\n"
    )
    code = "import sys; from sixfold.cli import main; sys.exit(main())"
    return [sys.executable, "-c", code, "train", str(file), *sizes]


def test_a_grpo_run_whose_mismatch_is_rounding(tmp_path: Path) -> None:
    done = subprocess.run(
        _recipe(tmp_path, 4), capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    steps = [
        json.loads(line) for line in (tmp_path / "tiny/metrics.jsonl").read_text().splitlines()
    ]
    gaps = [m["mismatch/max_abs_logp"] for m in steps if "mismatch/max_abs_logp" in m]
    print("mismatch/max_abs_logp:", gaps, "time/sync_s:", [m["time/sync_s"] for m in steps])
    assert gaps and max(gaps) < LIMIT
    assert steps[-1]["sync/version"] > steps[0]["sync/version"] and {
        m["sync/staleness"] for m in steps
    } == {0.0}


@pytest.mark.parametrize(
    ("where", "stop"), [("local", "[]"), ("local", "['1']"), ("ray", "[]"), ("two ranks", "[]")]
)
def test_tokens_sampled_ahead_have_the_log_probs_of_their_versions(
    tmp_path: Path, where: str, stop: str
) -> None:
    """New weights reach running requests, and each token names the weights that sampled it. Also
    where an actor of Ray has vLLM, or two ranks share it.
    """
    sizes = {f"model__scratch__{key}": value for key, value in SIZES.model_dump().items()
             if isinstance(value, int)}  # fmt: skip
    backend = dict(rollout__backend__kind="vllm", rollout__backend__python=PYTHON)
    settings = {"rollout__stop": stop, "engine__max_running": 3, **backend, **sizes}
    if where == "two ranks":
        codes, ahead, errors = on_ranks(tmp_path, 2, None, **{**AHEAD, **settings})
        assert codes == [0, 0], errors
    else:
        ahead = run(tmp_path, **settings, **({"placement__kind": "ray"} if where == "ray" else {}))
    mixed = [line["async/mixed_frac"] for line in metrics(ahead)]
    right, wrong = gaps(ahead)
    print("async/mixed_frac:", mixed, "right:", right, "wrong:", wrong)
    assert max(mixed) > 0 and right < LIMIT and wrong > 100 * LIMIT


def test_a_killed_run_takes_vllm_with_it(tmp_path: Path) -> None:
    run = subprocess.Popen(
        _recipe(tmp_path, 10_000), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    until = time.monotonic() + 200
    while not (tmp_path / "tiny/metrics.jsonl").exists() and time.monotonic() < until:
        time.sleep(0.2)
    children = [
        int(p) for p in Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
    ]
    workers = [p for p in children if b"vllm_worker.py" in Path(f"/proc/{p}/cmdline").read_bytes()]
    assert len(workers) == 1
    run.send_signal(signal.SIGKILL)
    run.wait()
    until = time.monotonic() + 10
    while _alive(workers[0]) and time.monotonic() < until:
        time.sleep(0.05)
    assert not _alive(workers[0])
