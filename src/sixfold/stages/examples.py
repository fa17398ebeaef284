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

_TURN_END = 16
"""Tokens that a template writes after a reply, at most."""


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
        self._limit = recipe.sft.max_tokens or assembly.policy.context
        self._drops = recipe.data.overlong == "drop"
        chosen = drawn_tasks(tasks, recipe.sft.tasks, recipe.run.seed)
        tasks = [task for task in chosen if not self._too_long(task)]
        if not tasks:
            raise UserError(
                f"no training task has a solution that fits: all {len(chosen)} have more than"
                f" {self._limit} tokens with their prompts. Raise sft.max_tokens, or use a model"
                " with a longer context"
            )
        self._stream = task_stream(
            tasks, recipe.sft.examples_per_step, recipe.run.seed, assembly.tasks.weights
        )
        self.steps_per_epoch = self._stream.steps_per_epoch
        drawn = drawn_tasks(assembly.tasks.heldout, recipe.eval.tasks, recipe.run.seed)
        # As the training tasks: the loss on bare answers says nothing of worked solutions.
        worked = any(task.trace for task in tasks)
        heldout = [task for task in drawn if (task.trace if worked else _imitable(task))]
        self.heldout: Sequence[Group] = [
            group for group in worked_groups(assembly, heldout) if self._fits(group)
        ]
        unsolved = len(assembly.tasks.train) - len(training_tasks(assembly))
        found = {
            "training tasks have no solution to imitate and are left out": unsolved,
            f"training tasks have solutions of more than {self._limit} tokens and are left out": (
                len(chosen) - len(tasks)
            ),
        }
        self.notes = [f"{count} {why}" for why, count in found.items() if count]

    def groups(self, step: int) -> list[Group]:
        made = worked_groups(self._assembly, self._stream(step))
        for group in made:
            if not self._fits(group):  # an episode, whose length shows when it is played
                raise self._refusal(group.task, len(group.trajectories[0].tokens))
        return made

    def _fits(self, group: Group) -> bool:
        return len(group.trajectories[0].tokens) <= self._limit

    def _too_long(self, task: Task) -> bool:
        """True if a task is to be left out. Episodes have their length when they are played.

        Raises:
            UserError: if it is too long and may not be left out, or cannot be imitated.
        """
        if self._assembly.player.environment:
            return False
        renderer = self._assembly.renderer
        prompt = len(renderer.encode(task))
        # A text has no more tokens than bytes.
        if prompt + len(str(task.worked).encode()) + _TURN_END <= self._limit:
            return False
        length = prompt + len(renderer.solution(task))
        if length > self._limit and not self._drops:
            raise self._refusal(task, length)
        return length > self._limit

    def _refusal(self, task: Task, length: int) -> UserError:
        advice = "Set data.overlong = 'drop' to leave out such tasks, or raise sft.max_tokens"
        return UserError(
            f"task {task.id}: the prompt and its solution have {length} tokens, but only"
            f" {self._limit} fit (sft.max_tokens, or the model's context)."
            f" {'Raise sft.max_tokens, or use shorter tasks' if self._drops else advice}"
        )


def _imitable(task: Task) -> bool:
    """True if the answer of a task is text or a number."""
    return task.answer is not None and not isinstance(task.answer, list | tuple | Mapping)
