"""Supervised fine-tuning: the negative log-prob of worked solutions, prompt masked.

It prepares a batch and computes a loss as an algorithm does, and the same trainer trains on it.
"""

from __future__ import annotations

from torch import Tensor

from ..batch import Batch, LossOutput, filled
from ..errors import UserError
from ..types import Group, Reward, Task, Trajectory


def example(task: Task, prompt: list[int], solution: list[int]) -> Group:
    """A worked solution as a trajectory whose completion is scored.

    Args:
        prompt: token ids of the prompt.
        solution: token ids of the solution. The caller appends the end-of-sequence token.

    Raises:
        UserError: if the solution is empty.
    """
    if not solution:
        raise UserError(
            f"task {task.id} has no worked solution: set data.trace_field to a column of solutions,"
            " or sft.steps = 0"
        )
    logp, version = [0.0] * len(solution), [-1] * len(solution)
    trajectory = Trajectory.one_turn(
        task.id, 0, prompt, solution, logp, version, "stop", reward=Reward(0.0)
    )
    return Group(task, [trajectory])


class SupervisedLoss:
    """Mean negative log-prob of the scored tokens of a step."""

    def prepare(self, batch: Batch) -> Batch:
        """Fill in weights that average over all scored tokens."""
        return batch.with_(weights=batch.mask / batch.mask.sum())

    def compute_loss(self, batch: Batch, logp: Tensor) -> LossOutput:
        """Weighted negative log-prob of some rows of that batch. logp: [B, T]."""
        loss = -(filled(batch.weights, "weights") * logp).sum()
        return LossOutput(loss, {"train/loss": loss.detach()})
