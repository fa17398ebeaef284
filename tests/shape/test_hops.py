"""How many files a reader opens to get from a command to the loss that it computes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.run.processes import tiny_recipe
from torch import Tensor

import sixfold
from sixfold.algorithm.composed import Composed
from sixfold.batch import Batch, LossOutput
from sixfold.cli import main

PACKAGE = Path(sixfold.__file__).parent
REWARD = "def even(completion, task):\n    return float(len(completion) % 2)\n"
MOST = 5


def files_on_the_stack() -> list[str]:
    """Files of the package with a function on the caller's stack, from the command on."""
    frame, files = sys._getframe(1), list[str]()
    while frame:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(PACKAGE):
            files.append(path.relative_to(PACKAGE).as_posix())
        frame = frame.f_back  # type: ignore[assignment]
    return list(dict.fromkeys(reversed(files)))


def test_from_command_to_loss_are_at_most_five_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first file is the verb's, the last the one that defines the loss of the algorithm."""
    stacks: list[list[str]] = []
    compute_loss = Composed.compute_loss

    def watched(algorithm: Composed, batch: Batch, logp: Tensor) -> LossOutput:
        stacks.append(files_on_the_stack())
        return compute_loss(algorithm, batch, logp)

    monkeypatch.setattr(Composed, "compute_loss", watched)
    (tmp_path / "rewards.py").write_text(REWARD)
    (tmp_path / "r.toml").write_text('run.name = "r"\n')
    reward = f"{tmp_path}/rewards.py:even"
    flags = tiny_recipe(tmp_path, run__steps=1, sft__steps=0, environment__rewards=reward)
    assert main(["train", str(tmp_path / "r.toml"), *flags]) == 0

    defined_in = Path(compute_loss.__code__.co_filename).relative_to(PACKAGE).as_posix()
    hops = [*stacks[0][stacks[0].index("cli/train.py") :], defined_in]
    assert hops == [
        "cli/train.py",
        "run/start.py",
        "controller/loop.py",
        "trainer/trainer.py",
        "algorithm/composed.py",
    ]
    assert len(hops) <= MOST
