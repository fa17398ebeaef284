"""What a supervised stage trains on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ..controller.stream import task_stream
from ..data.task_set import drawn_tasks
from ..errors import UserError
from ..run.assemble import Assembly
from ..run.worked import solved_tasks, training_tasks, worked_groups
from ..types import Group


class Examples(Protocol):
    """Training examples of a supervised stage.

    Attributes:
        heldout: examples that are never trained on, each a Group with one trajectory.
        notes: messages for the user, one line each.
        fingerprint: hash of what the tasks of the run do not decide, compared at a resume.
        heldout_bytes: UTF-8 bytes of the texts that `heldout` predicts. 0 if they are no texts.
        steps_per_epoch: steps of a pass over the examples. 0 if there are no passes.
    """

    heldout: Sequence[Group]
    notes: list[str]
    fingerprint: str
    heldout_bytes: int
    steps_per_epoch: int

    def groups(self, step: int) -> list[Group]:
        """Examples of step 1, 2, ... They depend on the seed and the step alone."""
        ...


class TaskExamples:
    """Worked solutions of the recipe's tasks.

    Args:
        assembly: tasks, and what makes tokens of them.

    Raises:
        UserError: if no task has a solution, or fewer than `sft.tasks` have.
    """

    fingerprint = ""
    heldout_bytes = 0

    def __init__(self, assembly: Assembly) -> None:
        self._assembly = assembly
        recipe, tasks = assembly.recipe, training_tasks(assembly)
        if recipe.sft.tasks > len(tasks):
            raise UserError(
                f"sft.tasks = {recipe.sft.tasks}: only {len(tasks)} training tasks have a solution."
                " Lower it"
            )
        tasks = drawn_tasks(tasks, recipe.sft.tasks, recipe.run.seed)
        self._stream = task_stream(
            tasks, recipe.sft.examples_per_step, recipe.run.seed, assembly.tasks.weights
        )
        self.steps_per_epoch = self._stream.steps_per_epoch
        count = recipe.eval.tasks
        heldout = solved_tasks(drawn_tasks(assembly.tasks.heldout, count, recipe.run.seed))
        self.heldout: Sequence[Group] = worked_groups(assembly, heldout)
        unsolved = len(assembly.tasks.train) - len(training_tasks(assembly))
        self.notes = (
            [f"{unsolved} training tasks have no solution to imitate and are left out"]
            if unsolved
            else []
        )

    def groups(self, step: int) -> list[Group]:
        return worked_groups(self._assembly, self._stream(step))
