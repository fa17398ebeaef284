"""Supervised fine-tuning as a loss: the negative log-prob of worked solutions, prompt masked.

It uses the same batch type and the same trainer as RL.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..batch import Batch, LossOutput, collate
from ..errors import UserError
from ..types import Group, Reward, Task, Trajectory


def example(task: Task, prompt: list[int], solution: list[int]) -> Group:
    """A worked solution as a trajectory whose completion is scored.

    Args:
        task: the task.
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


def sft_batch(groups: Sequence[Group]) -> Batch:
    """Batch of examples with weights that average over all their tokens."""
    batch = collate(groups)
    return batch.with_(weights=batch.mask / batch.mask.sum())


def sft_loss(batch: Batch, logp: Tensor) -> LossOutput:
    """Weighted negative log-prob of the tokens. logp: [B, T].

    Raises:
        ValueError: if batch.weights is None.
    """
    if batch.weights is None:
        raise ValueError("sft_loss needs weights: build the batch by sft_batch")
    loss = -(batch.weights * logp).sum()
    return LossOutput(loss, {"train/loss": loss.detach()})
