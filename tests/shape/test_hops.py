"""How many files a reader opens to get from a command to the loss that it computes, and from the
driver of episodes to the reward function of a user.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from tests.rollout.episodes import Recording, letters, played
from tests.run.processes import tiny_recipe
from torch import Tensor

import sixfold
from sixfold.algorithm.composed import Composed
from sixfold.batch import Batch, LossOutput
from sixfold.checks.environment import Environment
from sixfold.checks.queue import CheckQueue
from sixfold.cli import main
from sixfold.model.scratch import character_tokenizer
from sixfold.processes.child import Child
from sixfold.renderer.renderer import Renderer
from sixfold.rollout.player import OneTurn
from sixfold.types import Task

PACKAGE = Path(sixfold.__file__).parent
REWARD = "def even(completion, task):\n    return float(len(completion) % 2)\n"
STACK = """
import json, sys

def writes_its_stack(completion, task):
    frame, files = sys._getframe(), []
    while frame:
        files.append(frame.f_code.co_filename)
        frame = frame.f_back
    with open(task.answer, "w") as file:
        json.dump(files, file)
    return 1.0
"""


def files_on_the_stack() -> list[str]:
    """Files of the package with a function on the caller's stack, outermost first."""
    frame, files = sys._getframe(1), list[str]()
    while frame:
        files.append(frame.f_code.co_filename)
        frame = frame.f_back  # type: ignore[assignment]
    return of_the_package(files)


def of_the_package(files: Iterable[str]) -> list[str]:
    """Files of the package among those of a stack, innermost first. The outermost comes first."""
    paths = [Path(file) for file in files if Path(file).is_relative_to(PACKAGE)]
    return list(dict.fromkeys(path.relative_to(PACKAGE).as_posix() for path in reversed(paths)))


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
    hops = [*stacks[0][stacks[0].index("commands/train.py") :], defined_in]
    assert hops == [
        "commands/train.py",
        "run/start.py",
        "controller/loop.py",
        "trainer/trainer.py",
        "algorithm/composed.py",
    ]
    assert len(hops) <= 5


@pytest.mark.parametrize("named", [True, False], ids=["named", "from Python"])
def test_from_driver_to_reward_are_at_most_six_files(
    named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first file is the driver's, the last the one that calls the user's function.

    The check of a named reward crosses to another process. So its way has three parts: until it is
    queued, until it is sent, and from there to the function. `processes/`, which carries bytes of
    any kind, does not count.
    """
    way: dict[str, list[str]] = {}

    def watch(owner: type, name: str) -> None:
        original = getattr(owner, name)

        def watched(*arguments: Any) -> Any:
            way[name] = files_on_the_stack()
            return original(*arguments)

        monkeypatch.setattr(owner, name, watched)

    watch(CheckQueue, "put")
    watch(Child, "post")
    file, stack = tmp_path / "rewards.py", tmp_path / "stack.json"
    file.write_text(STACK)
    members: dict[str, Any] = {}
    exec(STACK, members)
    renderer = Renderer(character_tokenizer("01+=?abcxyz "), (1,))
    generator = Recording(renderer, letters(renderer, None))
    tasks = [Task("t", "1+1=", answer=str(stack))]
    reward = f"{file}:writes_its_stack" if named else members["writes_its_stack"]
    with Environment([reward]) as environment:
        ((group,), _) = played(generator, renderer, OneTurn, tasks, scorer=environment.scorer(1))
    assert group.rewards == [1.0]

    called = of_the_package(json.loads(stack.read_text()))
    every = [*way.get("put", []), *way.get("post", []), *called]
    hops = [f for f in dict.fromkeys(every) if not f.startswith("processes/")]
    assert hops == [
        "rollout/driver.py",
        "checks/scorer.py",
        *(["checks/queue.py", "checks/process.py"] if named else []),
        "checks/worker.py",
        "environment/rewards.py",
    ]
    assert len(hops) <= 6
