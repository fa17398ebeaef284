"""vLLM beside several ranks: those of a machine share its processes."""

from __future__ import annotations

import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from sixfold.backends.samplers import Samplers
from sixfold.backends.vllm_process import VllmProcess
from sixfold.errors import UserError
from sixfold.recipe.schema import VllmBackend
from sixfold.run.remote_engine import check_own_gpus
from tests.rank_runs import train_on_ranks
from tests.run.processes import metrics, tiny_recipe
from tests.run.test_ahead_outside import AHEAD, FAKE, gaps
from tests.run.test_several_ranks import METHODS, curve, same

VLLM: dict[str, Any] = dict(
    rollout__backend__kind="vllm", rollout__backend__python=sys.executable,
    model__scratch__head_dim=16,
)  # fmt: skip
OF_ONE = ("sync/", "mismatch/")
"""Metrics of one of the two alone, or that rounding decides."""


def learned(run: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in line.items() if not k.startswith(OF_ONE)} for line in curve(run)]


def prepare(fault: str, killing: bool, rank: int) -> None:
    """On a rank: let a stand-in be found as vLLM, and let it be killed at its fifth request."""
    os.environ |= {"PYTHONPATH": str(FAKE), "FAKE_VLLM": fault}
    generate, asked = Samplers.generate, 0

    async def generate_and_kill(self: Samplers, *given: Any, **more: Any) -> Any:
        nonlocal asked
        asked += 1
        if asked == 5:
            process = self.places[0].process
            assert isinstance(process, VllmProcess)
            os.kill(process._child.pid, signal.SIGKILL)
        return await generate(self, *given, **more)

    if killing:
        Samplers.generate = generate_and_kill  # type: ignore[method-assign]


def on_ranks(
    folder: Path, size: int, fault: str | None = "", killing: bool = False, **settings: Any
) -> tuple[list[int | None], Path, str]:
    """Exit codes, folder and output of a run. fault: of the stand-in. None: there is none."""
    name = f"on-{size}"
    flags = tiny_recipe(folder, **{"run__steps": 2, **VLLM, **settings}, run__name=name)
    before = None if fault is None else partial(prepare, fault, killing)
    run = train_on_ranks(size, ["train", "demo", *flags], folder / f"{name}-errors", before)
    return run.codes(), folder / name, run.errors()


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "groups"),
    [
        ("grpo", {}),
        ("ppo", {"parallel__tensor": 2, "rollout__backend__tensor_parallel": 2}),
        (
            "lora, reference with an adapter",
            {"placement__kind": "processes"},
        ),
    ],
)
def test_ranks_that_share_vllm_learn_what_one_process_does(
    name: str, groups: dict[str, Any], tmp_path: Path
) -> None:
    """Also where it dies, and is replaced. R-189."""
    dies = "placement__kind" in groups
    codes, alone, errors = on_ranks(tmp_path, 1, **METHODS[name])
    assert codes == [0], errors
    codes, shared, errors = on_ranks(tmp_path, 2, killing=dies, **METHODS[name], **groups)
    assert codes == [0, 0], errors
    assert errors.count("It is replaced") == dies
    same(learned(shared), learned(alone))


@pytest.mark.nightly
def test_tokens_that_ranks_sample_ahead_have_the_log_probs_of_their_versions(
    tmp_path: Path,
) -> None:
    codes, ahead, errors = on_ranks(tmp_path, 2, **{**AHEAD, "engine__max_running": 3})
    assert codes == [0, 0], errors
    assert max(line["async/mixed_frac"] for line in metrics(ahead)) > 0
    right, wrong = gaps(ahead)
    assert right < 1e-4 and wrong > 1e-2


@pytest.mark.nightly
def test_a_vllm_that_ignores_new_weights_ends_the_run(tmp_path: Path) -> None:
    """The probe of every sync finds it, on all ranks. R-174."""
    codes, _, errors = on_ranks(tmp_path, 2, "stale")
    assert 0 not in codes, errors
    assert "engine and trainer score the probe differently" in errors


def test_vllm_of_ranks_needs_gpus_beside_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    check_own_gpus(VllmBackend(devices="4,5,6,7", tensor_parallel=2), False, 2)
    for devices, by_ray, said in (
        ("3,4,5,6", False, "must list 4 GPUs of each machine for vLLM, beside the GPUs 0 to 3"),
        ("4,5,6", False, "must list 4 GPUs"),
        ("", False, "rollout.backend.devices = '' must list 4 GPUs"),
        ("4,5,6,7", True, "gives vLLM no GPUs. Start the ranks by torchrun"),
    ):
        with pytest.raises(UserError, match=said):
            check_own_gpus(VllmBackend(devices=devices, tensor_parallel=2), by_ray, 2)
