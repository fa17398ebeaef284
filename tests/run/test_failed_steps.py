"""A step that fails costs that step alone: what was done before it is saved, and a resume gives
what the whole run gives.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from sixfold.checkpoint.checkpoint import load_checkpoint
from sixfold.checkpoint.listing import list_checkpoints
from sixfold.engine.model_runner import ModelRunner
from sixfold.errors import RunFailed, UserError
from sixfold.files import durable
from sixfold.recipe.toml import parse_recipe
from sixfold.rollout.driver import Driver
from sixfold.run.start import train_run
from sixfold.types import Task

from .processes import metrics, tiny_recipe

STEPS = 5
NAN = float("nan")
TRAINER = "sixfold.trainer.trainer.Trainer"
SETTINGS: dict[str, Any] = {
    "run__name": "r",
    "run__steps": STEPS,
    "sft__steps": 4,
    "checkpoint__every": 0,
    "eval__every": 2,
    "data__heldout": 4,
}


def reward(completion: str, task: Task) -> float:
    return float(len(completion) % 3)


def train(
    folder: Path,
    *,
    resume: bool = False,
    check: Callable[[str, Task], float] = reward,
    **overrides: Any,
) -> int:
    recipe = parse_recipe(
        'run.name = "r"', "test", tiny_recipe(folder, **{**SETTINGS, **overrides})
    )
    return train_run(recipe, resume=folder / "r" if resume else None, reward=check)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    assert train(folder) == 0
    return folder / "r"


def newest(run: Path) -> str:
    return list_checkpoints(run / "checkpoints")[-1].name


def sft_lines(run: Path) -> list[str]:
    return [line.split('"train/tok_s"')[0] for line in (run / "sft.jsonl").read_text().splitlines()]


def assert_goes_on_exactly(folder: Path, whole: Path) -> None:
    assert train(folder, resume=True) == 0
    ours, theirs = (
        load_file(run / "checkpoints" / f"step-{STEPS:06d}" / "model" / "model.safetensors")
        for run in (folder / "r", whole)
    )
    assert all(ours[name].equal(theirs[name]) for name in theirs)
    assert metrics(folder / "r") == metrics(whole)
    assert sft_lines(folder / "r") == sft_lines(whole)
    assert not list((folder / "r" / "checkpoints").glob("damaged-*"))


@contextmanager
def at_call(
    monkeypatch: pytest.MonkeyPatch, where: str, number: int, action: Callable[[], None]
) -> Iterator[None]:
    """Do `action` before the call of that number (from 1) to the function named `where`."""
    module, _, name = where.rpartition(".")
    owner: Any = resolve_name(module)
    calls, original = count(1), getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == number:
            action()
        return original(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, wrapped)
        yield


def raises(error: BaseException) -> Callable[[], None]:
    def action() -> None:
        raise error

    return action


@pytest.mark.slow
def test_another_runtime_error_stays_what_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        at_call(monkeypatch, f"{TRAINER}._accumulate", 7, raises(RuntimeError("a bug"))),
        pytest.raises(RuntimeError, match="a bug"),
    ):
        train(tmp_path)
    assert newest(tmp_path / "r") == "step-000002", "what was done is saved all the same"


@pytest.mark.mostly_nightly(1)
@pytest.mark.slow
@pytest.mark.parametrize(("first", "left"), [(2, "sft-000001"), (7, "step-000002")])
def test_divergence_keeps_the_last_good_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: Path, first: int, left: str
) -> None:
    """Loss not finite from one update on: skipped, skipped, raised. The checkpoint is of the step
    before the first of them.
    """
    calls, original = count(1), torch.nn.utils.get_total_norm

    def norm(*args: Any, **kwargs: Any) -> torch.Tensor:
        return original(*args, **kwargs) * (float("nan") if next(calls) >= first else 1.0)

    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.utils, "get_total_norm", norm)
        with pytest.raises(
            RunFailed,
            match=f"training has diverged: .*trainer.learning_rate.*The last good state is {left}",
        ):
            train(tmp_path)
    assert newest(tmp_path / "r") == left
    assert_goes_on_exactly(tmp_path, whole)


NOT_FINITE = [
    # part that becomes NaN, number of the update, settings, newest checkpoint, named tensor
    ("weight", 4, {}, "", "model/model.embed_tokens.weight"),
    ("weight", 7, {"checkpoint__every": 2}, "step-000002", "model.embed_tokens.weight"),
    ("weight", 7, {"sync__kind": "copy", "checkpoint__every": 2}, "step-000002", "model.embed"),
    ("exp_avg_sq", 7, {"checkpoint__every": 1}, "step-000002", "policy/optimizer/exp_avg_sq/model"),
]


@pytest.mark.mostly_nightly(1)
@pytest.mark.slow
@pytest.mark.parametrize(("part", "update", "settings", "left", "named"), NOT_FINITE)
def test_non_finite_tensors_are_never_saved(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    part: str,
    update: int,
    settings: dict[str, Any],
    left: str,
    named: str,
) -> None:
    """Update 7 is that of RL step 3, because SFT makes the first four updates."""
    calls, step = count(1), torch.optim.AdamW.step

    def overflows(self: torch.optim.AdamW, *args: Any) -> Any:
        done = step(self, *args)
        if next(calls) == update:
            parameter = self.param_groups[0]["params"][0]
            with torch.no_grad():
                (parameter if part == "weight" else self.state[parameter][part]).view(-1)[0] = NAN
        return done

    with monkeypatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "step", overflows)
        with pytest.raises(
            RunFailed, match=f"training has diverged: .*'{named}.*not finite.*learning_rate.*{left}"
        ):
            train(tmp_path, **{"checkpoint__keep": 9, "sft__stop_at_accuracy": 0, **settings})
    saved = list_checkpoints(tmp_path / "r" / "checkpoints")
    assert (saved[-1].name if saved else "") == left
    for path in saved:
        assert all(t.isfinite().all() for t in load_checkpoint(path).payload.tensors.values())
        weights = load_file(path / "model" / "model.safetensors")
        assert all(tensor.isfinite().all() for tensor in weights.values())
    if left:
        assert train(tmp_path, resume=True, **settings) == 0
        assert len(metrics(tmp_path / "r")) == STEPS


@pytest.mark.slow
def test_engine_that_starts_to_disagree_stops_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: Path
) -> None:
    """From the rollout of step 3 on the engine computes other logits than the trainer. No update
    learns from them.
    """
    calls, generate, logits = count(1), Driver.play, ModelRunner._logits
    wrong = False

    def generated(*args: Any, **kwargs: Any) -> Any:
        nonlocal wrong
        wrong = next(calls) >= 6  # before it: pre-flight, an evaluation, two steps, an evaluation
        return generate(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Driver, "play", generated)
        patch.setattr(
            ModelRunner,
            "_logits",
            lambda self, hidden: logits(self, hidden) * (8.0 if wrong else 1.0),
        )
        with pytest.raises(
            RunFailed,
            match=(
                r"engine and trainer disagree .*limit 0\.05.*The last good state is step-000002"
            ),
        ):
            train(tmp_path)
    assert newest(tmp_path / "r") == "step-000002"
    assert_goes_on_exactly(tmp_path, whole)


@pytest.mark.slow
def test_a_disk_that_refuses_trajectories_leaves_the_finished_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: Path
) -> None:
    flush = durable.fsync_path

    def full(path: Path) -> None:
        if "step-000003.jsonl.zst" in path.name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        flush(path)

    with monkeypatch.context() as patch:
        patch.setattr(durable, "fsync_path", full)
        with pytest.raises(UserError, match=r"step-000003\.jsonl\.zst: no space left.*run\.dir"):
            train(tmp_path)
    assert newest(tmp_path / "r") == "step-000003"
    assert_goes_on_exactly(tmp_path, whole)


@pytest.mark.slow
def test_a_full_disk_is_the_error_if_it_refuses_the_checkpoint_too(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    whole: Path,
) -> None:
    flush = durable.fsync_path

    def full(path: Path) -> None:
        if "step-000003" in str(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        flush(path)

    with monkeypatch.context() as patch:
        patch.setattr(durable, "fsync_path", full)
        for module in ("checkpoint.checkpoint", "checkpoint.publication", "checkpoint.payload"):
            patch.setattr(f"sixfold.{module}.fsync_path", full, raising=False)
        with pytest.raises(UserError, match=r"step-000003\.jsonl\.zst: no space left"):
            train(tmp_path)
    said = " ".join(capsys.readouterr().err.split())
    assert "step-000003: no space left" in said
    assert newest(tmp_path / "r") == "step-000000"
    assert_goes_on_exactly(tmp_path, whole)


@pytest.mark.slow
def test_rewards_that_break_in_the_middle_cost_one_step(tmp_path: Path, whole: Path) -> None:
    calls = count(1)

    def breaks(completion: str, task: Task) -> float:
        if next(calls) > 16 * 3:
            raise ConnectionError("judge is down")
        return reward(completion, task)

    breaks.__name__ = "reward"
    with pytest.raises(UserError, match="judge is down"):
        train(tmp_path, check=breaks)
    assert newest(tmp_path / "r").startswith("step-")
    assert_goes_on_exactly(tmp_path, whole)
