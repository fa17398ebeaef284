"""A step that runs out of memory costs that step alone, and the error names what to lower."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sixfold.cli import main
from sixfold.errors import RunFailed
from sixfold.run.out_of_memory import free_memory_of

from .processes import tiny_recipe
from .test_failed_steps import (
    SETTINGS,
    TRAINER,
    assert_goes_on_exactly,
    at_call,
    newest,
    raises,
    train,
)

OUT_OF_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory"),
    MemoryError(),
    RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"),
]
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


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    assert train(folder) == 0
    return folder / "r"


@pytest.mark.mostly_nightly(1)
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
