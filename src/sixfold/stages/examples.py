"""What a supervised stage trains on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from ..controller.stream import task_stream
from ..data.task_set import drawn_tasks
from ..errors import UserError
from ..run.assemble import Assembly
from ..run.worked import training_tasks, worked_groups
from ..types import Group, Task


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
        self._limit = recipe.sft.max_tokens or assembly.policy.context
        drawn = drawn_tasks(assembly.tasks.heldout, recipe.eval.tasks, recipe.run.seed)
        # As the training tasks: the loss on bare answers says nothing of worked solutions.
        worked = any(task.trace for task in tasks)
        heldout = [task for task in drawn if (task.trace if worked else _imitable(task))]
        self.heldout: Sequence[Group] = [
            group for group in worked_groups(assembly, heldout) if self._fits(group)
        ]
        unsolved = len(assembly.tasks.train) - len(training_tasks(assembly))
        self.notes = (
            [f"{unsolved} training tasks have no solution to imitate and are left out"]
            if unsolved
            else []
        )

    def groups(self, step: int) -> list[Group]:
        """As `Examples.groups`. Solutions that are too long are left out, or refused.

        Raises:
            UserError: a solution is too long and may not be left out, or none of the step fits.
        """
        made = worked_groups(self._assembly, self._stream(step))
        found = [group for group in made if self._fits(group)]
        if len(found) < len(made) and (self._assembly.recipe.data.overlong == "error" or not found):
            long = next(group for group in made if not self._fits(group))
            raise UserError(
                f"task {long.task.id}: the prompt and its solution have"
                f" {len(long.trajectories[0].tokens)} tokens, but only {self._limit} fit"
                " (sft.max_tokens, or the model's context). Set data.overlong = 'drop' to leave"
                " out such tasks, or raise sft.max_tokens"
            )
        return found

    def _fits(self, group: Group) -> bool:
        return len(group.trajectories[0].tokens) <= self._limit


def _imitable(task: Task) -> bool:
    """True if the answer of a task is text or a number."""
    return task.answer is not None and not isinstance(task.answer, list | tuple | Mapping)
