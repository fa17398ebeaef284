"""A step that fails costs that step alone: what was done before it is saved, and a resume gives
what the whole run gives.
"""

from __future__ import annotations

import errno
import os
import signal
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
from sixfold.cli import main
from sixfold.engine.model_runner import ModelRunner
from sixfold.errors import RunFailed, UserError
from sixfold.files import durable
from sixfold.recipe.toml import parse_recipe
from sixfold.rollout.driver import Driver
from sixfold.run.out_of_memory import free_memory_of
from sixfold.run.start import train_run
from sixfold.types import Task

from .processes import metrics, tiny_recipe

STEPS = 5
NAN = float("nan")
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


OUT_OF_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory"),
    MemoryError(),
    RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"),
]
TRAINER = "sixfold.trainer.trainer.Trainer"
PLACES = [
    # where, number of the call, checkpoint that is left, phase, a setting that is named
    (f"{TRAINER}._accumulate", 3, "sft-000002", "SFT", "trainer.max_tokens_per_microbatch"),
    (
        "sixfold.rollout.driver.Driver.play",
        1,
        "sft-000004",
        "pre-flight",
        "engine.kv_tokens",
    ),
    (f"{TRAINER}._accumulate", 7, "step-000002", "trainer", "trainer.activation_checkpointing"),
    ("sixfold.controller.loop.collate", 4, "step-000003", "batch", "trainer.logprob_chunk"),
    (
        "sixfold.rollout.driver.Driver.play",
        5,
        "step-000002",
        "evaluation",
        "rollout.max_new_tokens",
    ),
]


CASES = [(place, OUT_OF_MEMORY[0]) for place in PLACES] + [
    (PLACES[2], error) for error in OUT_OF_MEMORY[1:]
]


@pytest.mark.mostly_nightly(3)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "error"),
    CASES,
    ids=[f"{place[3]} {place[2]} {type(error).__name__}" for place, error in CASES],
)
def test_out_of_memory_leaves_the_last_step(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    whole: Path,
    place: tuple[str, int, str, str, str],
    error: Exception,
) -> None:
    where, number, left, phase, setting = place
    with at_call(monkeypatch, where, number, raises(error)), pytest.raises(RunFailed) as failed:
        train(tmp_path)
    said = str(failed.value)
    assert (
        said.startswith(f"out of memory in {phase}: lower ")
        and setting in said
        and f"The last good state is {left}" in said
    )
    assert newest(tmp_path / "r") == left
    assert_goes_on_exactly(tmp_path, whole)


@pytest.mark.slow
def test_out_of_memory_in_the_middle_of_an_update_falls_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: Path
) -> None:
    """Some weights may be new and some old: nothing of this moment may be saved."""
    with (
        at_call(monkeypatch, "torch.optim.AdamW.step", 7, raises(torch.OutOfMemoryError("x"))),
        pytest.raises(RunFailed, match=r"step-000000"),
    ):
        train(tmp_path)
    assert_goes_on_exactly(tmp_path, whole)


def test_out_of_memory_while_the_model_loads_names_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        at_call(monkeypatch, "sixfold.run.assemble.load_policy", 1, raises(MemoryError())),
        pytest.raises(RunFailed, match=r"model\.path"),
    ):
        train(tmp_path)
    assert not (tmp_path / "r").exists()


@pytest.mark.slow
def test_the_command_line_exits_3_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "r.toml").write_text('run.name = "r"\n')
    with at_call(monkeypatch, f"{TRAINER}._accumulate", 1, raises(MemoryError())):
        assert main(["train", str(tmp_path / "r.toml"), *tiny_recipe(tmp_path, **SETTINGS)]) == 3
    assert "sixfold: error: out of memory in SFT" in capsys.readouterr().err


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


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


INTERRUPTED = [
    (f"{TRAINER}._accumulate", 2, "sft-000002", "stopped after SFT step 2"),
    (
        "sixfold.rollout.driver.Driver.play",
        1,
        "sft-000004",
        "stopped after SFT step 4",
    ),
    ("sixfold.engine.engine.Engine.step", 3, "sft-000004", "stopped after SFT step 4"),
    ("sixfold.controller.loop.collate", 3, "step-000002", "stopped after step 2"),
    (f"{TRAINER}._accumulate", 7, "step-000003", "stopped after step 3"),
    (
        "sixfold.rollout.driver.Driver.play",
        5,
        "step-000002",
        "stopped after step 2",
    ),
]


@pytest.mark.mostly_nightly(3)
@pytest.mark.slow
@pytest.mark.parametrize(("where", "number", "left", "said"), INTERRUPTED)
def test_signal_stops_immediately_if_nothing_is_lost(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    whole: Path,
    where: str,
    number: int,
    left: str,
    said: str,
) -> None:
    with at_call(monkeypatch, where, number, interrupt):
        assert train(tmp_path) == 130
    assert newest(tmp_path / "r") == left and said in capsys.readouterr().err
    assert_goes_on_exactly(tmp_path, whole)


def test_a_signal_while_the_model_loads_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with at_call(monkeypatch, "sixfold.run.assemble.load_policy", 1, interrupt):
        assert train(tmp_path) == 130
    assert (
        not (tmp_path / "r").exists()
        and "stopped before anything was trained" in capsys.readouterr().err
    )


@pytest.mark.slow
def test_a_signal_inside_a_reward_is_no_failed_check(tmp_path: Path, whole: Path) -> None:
    calls = count(1)

    def interrupted(completion: str, task: Task) -> float:
        if next(calls) == 60:
            interrupt()
        return reward(completion, task)

    interrupted.__name__ = "reward"
    assert train(tmp_path, check=interrupted) == 130
    assert_goes_on_exactly(tmp_path, whole)


@pytest.mark.slow
def test_signal_in_the_last_evaluation_leaves_only_that_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: Path
) -> None:
    with at_call(monkeypatch, "sixfold.rollout.driver.Driver.play", 10, interrupt):
        assert train(tmp_path) == 130
    assert (
        newest(tmp_path / "r") == f"step-{STEPS:06d}"
        and not (tmp_path / "r" / "summary.json").exists()
    )
    assert_goes_on_exactly(tmp_path, whole)
    assert (tmp_path / "r" / "summary.json").exists()


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


def test_memory_of_a_failed_step_is_freed_before_saving() -> None:
    class Large:
        alive = 0

        def __init__(self) -> None:
            Large.alive += 1

        def __del__(self) -> None:
            Large.alive -= 1

    def inner() -> None:
        large = Large()
        raise MemoryError(id(large))

    try:
        inner()
    except MemoryError as error:
        assert Large.alive == 1
        free_memory_of(error)
        assert Large.alive == 0


@pytest.mark.parametrize(
    ("where", "number", "words"),
    [
        (
            "sixfold.trainer.trainer.Trainer._forward",
            6,
            r"in trainer \(micro-batch of \d+ rows ",
        ),
        ("sixfold.engine.model_runner.ModelRunner.prefill", 4, r"\d+ running sequences"),
    ],
)
def test_out_of_memory_names_the_phase_and_the_size_of_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, number: int, words: str
) -> None:
    """An engine without memory is a failure of the run, not an empty completion."""
    full = raises(torch.OutOfMemoryError("CUDA out of memory"))
    with at_call(monkeypatch, where, number, full), pytest.raises(RunFailed, match=words):
        train(tmp_path, data__heldout=0)
