"""Resources that a vLLM process requests: its share of a GPU, its GPUs, and sleep. Tested by
arithmetic and on the stand-in.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm_processes import ARGUMENTS, load, use_fake, weights

import sixfold.run.remote_engine
from sixfold.backends.visible_gpus import visible_devices
from sixfold.backends.vllm_memory import CONTEXT, memory_share
from sixfold.backends.vllm_process import VllmProcess, vllm_config
from sixfold.errors import UserError
from sixfold.model.loading import Policy
from sixfold.recipe.toml import parse_recipe
from sixfold.renderer.renderer import Renderer
from sixfold.rollout.generator import SampleKey, wait_for
from sixfold.run.kv_size import reserved_bytes, text_config
from sixfold.run.remote_engine import vllm_arguments
from sixfold.types import SamplingParams

GB = 1_000_000_000


def test_a_3b_model_beside_its_trainer_on_80_gb() -> None:
    """3.09 billion parameters: 12.4 GB of float32 weights are loaded; gradients and moments take 37
    GB later.

    vLLM needs 6.2 GB of weights, 9.7 GB of KV cache and 2 GB besides: 17.9 of 80 GB. Its default
    asks for 72 GB, which are not free.
    """
    parameters = 3.09e9
    share = memory_share(
        int(67 * GB), 80 * GB, int(2 * parameters), int(9.7 * GB), int(12 * parameters)
    )
    assert share == 0.23
    assert share * 80 * GB >= 2 * parameters + 9.7 * GB + CONTEXT


def test_memory_that_training_needs_later_counts() -> None:
    """1.5 billion parameters on 24 GB: vLLM alone would fit, and AdamW would then run out of
    memory.
    """
    fits = dict(free=17 * GB, total=24 * GB, weights=3 * GB, kv=7 * GB)
    assert memory_share(**fits, training=0) == 0.5
    with pytest.raises(UserError, match=r"rollout\.backend\.kind = 'vllm' does not fit") as caught:
        memory_share(**fits, training=18 * GB)
    for part in (
        "12.0 GB",
        "18.0 GB more",
        "17.0 of 24.0 GB",
        "rollout.backend.devices",
        "rollout.backend.sleep",
        "engine.max_running",
    ):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("devices", "policy", "visible", "expected"),
    [
        ("", "cpu", None, None),
        ("", "cuda", None, None),
        ("", "cuda:1", None, "1"),
        ("2,3", "cuda:0", None, "2,3"),
        ("", "cuda:1", "4,6", "6"),
        ("0,1", "cuda:0", "GPU-aa, GPU-bb", "GPU-aa,GPU-bb"),
    ],
)
def test_gpus_are_numbered_as_the_trainer_sees_them(
    devices: str, policy: str, visible: str | None, expected: str | None
) -> None:
    assert visible_devices(devices, policy, visible, "x") == expected


def test_a_gpu_that_is_not_there_is_refused() -> None:
    with pytest.raises(UserError, match=r"rollout\.backend\.devices = '2'") as caught:
        visible_devices("2", "cuda:0", "4,6", "rollout.backend.devices")
    assert "there are 2 GPUs" in str(caught.value)


def arguments(
    policy: Policy, monkeypatch: pytest.MonkeyPatch, memory: tuple[int, int] | None, *flags: str
) -> dict[str, Any]:
    monkeypatch.setattr(sixfold.run.remote_engine, "free_memory", lambda device: memory)
    recipe = parse_recipe('run.name = "x"\nrollout.backend.kind = "vllm"', "x.toml", list(flags))
    assert recipe.rollout.backend.kind == "vllm"
    reserved = partial(reserved_bytes, recipe, policy, text_config(policy.model), 64)
    return vllm_arguments(
        recipe.engine, recipe.rollout.backend, policy, 64, torch.bfloat16, reserved
    )


def test_on_ray_vllm_computes_its_share_itself(policy: Policy) -> None:
    """The GPUs of an actor are not those that the trainer sees."""
    for memory in (0.0, 0.4):
        flags = ["--rollout.backend.kind=vllm", f"--rollout.backend.memory={memory}"]
        recipe = parse_recipe('run.name = "x"', "x.toml", flags)
        backend = recipe.rollout.backend
        assert backend.kind == "vllm"
        found = vllm_arguments(recipe.engine, backend, policy, 64, torch.bfloat16, None)
        assert found.get("gpu_memory_utilization", 0.0) == memory


def test_the_settings_reach_vllm(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "gpu_memory_utilization" not in arguments(policy, monkeypatch, None), (
        "a CPU has no such share"
    )
    beside = arguments(policy, monkeypatch, (70 * GB, 80 * GB))
    assert beside["gpu_memory_utilization"] == 0.03, "2 GB for its context, and a tiny model"
    assert (
        arguments(policy, monkeypatch, None, "--rollout.backend.memory", "0.4")[
            "gpu_memory_utilization"
        ]
        == 0.4
    )
    split = arguments(
        policy,
        monkeypatch,
        None,
        "--rollout.backend.tensor_parallel",
        "2",
        "--rollout.backend.sleep",
        "true",
    )
    assert split["tensor_parallel_size"] == 2 and split["enable_sleep_mode"] is True
    assert split["kv_cache_memory_bytes"] * 2 == beside["kv_cache_memory_bytes"], (
        "each of two GPUs holds half of the heads"
    )


@pytest.mark.slow
def test_sleep_frees_memory_between_requests_and_changes_no_token(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_fake(monkeypatch)
    config = vllm_config(policy.model.config, type(policy.model).__name__)
    params = SamplingParams(max_tokens=6, stop_token_ids=policy.stop_token_ids)
    drawn = []
    for sleep in (False, True):
        engine = VllmProcess(
            config,
            torch.float32,
            {**ARGUMENTS, **({"enable_sleep_mode": True} if sleep else {})},
            Renderer(policy.tokenizer, policy.stop_token_ids),
            sleep=sleep,
        )
        engine.ready()
        try:
            for version in (1, 2):
                load(engine, weights(policy), version)
                sampled = wait_for(engine.generate([3, 4, 5], params, SampleKey("t")))
                drawn.append(sampled.tokens)
                wait_for(engine.sleep())
            assert engine._child.last_words().count("asleep") == (2 if sleep else 0)
        finally:
            engine.close()
    assert drawn[0] == drawn[1] == drawn[2] == drawn[3]


def test_the_process_sees_the_gpus_that_it_is_given(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An interpreter that prints its environment and ends stands in for vLLM's."""
    probe = tmp_path / "python"
    probe.write_text(f"#!/bin/sh\necho $CUDA_VISIBLE_DEVICES > {tmp_path}/seen\n")
    probe.chmod(0o755)
    config = SimpleNamespace(
        save_pretrained=lambda folder: Path(folder, "config.json").write_text(json.dumps({}))
    )
    with pytest.raises(UserError):
        VllmProcess(config, torch.float32, {}, None, str(probe), devices="2,3").ready()  # type: ignore
    assert (tmp_path / "seen").read_text() == "2,3\n"
