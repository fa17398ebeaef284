"""Supervised fine-tuning as just another loss: the negative log-prob of worked solutions, prompt masked. Same batch, same trainer."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..batch import Batch, LossOutput, collate
from ..errors import UserError
from ..types import Group, Reward, Task, Trajectory


def example(task: Task, prompt: list[int], solution: list[int]) -> Group:
    """A worked solution as a trajectory whose completion is scored, end-of-sequence token included (the caller put it there)."""
    if not solution:
        raise UserError(f"task {task.id} has no worked solution to learn from (data.trace_field)")
    tokens = prompt + solution
    trajectory = Trajectory(
        task_id=task.id,
        sample=0,
        tokens=tokens,
        prompt_length=len(prompt),
        mask=[False] * len(prompt) + [True] * len(solution),
        logp=[0.0] * len(tokens),
        version=[-1] * len(tokens),
        finish_reason="stop",
        reward=Reward(0.0),
    )
    return Group(task, [trajectory])


def sft_batch(groups: Sequence[Group]) -> Batch:
    """Examples as a batch whose weights average over all their tokens."""
    batch = collate(groups)
    return batch.with_(weights=batch.mask / batch.mask.sum())


def sft_loss(batch: Batch, logp: Tensor) -> LossOutput:
    """-log p(token), weighted: the loss for any trainer. logp [B, T]."""
    if batch.weights is None:
        raise ValueError("sft_loss needs weights: build the batch by sft_batch")
    loss = -(batch.weights * logp).sum()
    return LossOutput(loss, {"train/loss": loss.detach()})
