"""Divide the work of the output head over a tensor group, by positions.

Every rank of a group has all hidden states, and the whole head. It scores some of the positions,
and the group exchanges the scores. In the backward pass the group exchanges the gradients of the
hidden states, because every rank needs those of all positions.

Gradients of the root are averaged over a group (`sharded.shard_root`): those of embedding and last
norm are equal on its ranks. A rank's gradient of the head is only one summand of the whole. So it
is multiplied by the size of the group before the average.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from .packing import PackedRow
from .stacking import stack_rows


class HeadShare:
    """One rank's share of the positions of a head."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.ranks = dist.get_world_size(group)

    def positions(self, count: int) -> slice:
        """Positions that this rank scores. May be empty."""
        most = self.most(count)
        return slice(min(self.rank * most, count), min((self.rank + 1) * most, count))

    def most(self, count: int) -> int:
        """Maximum number of positions of a rank."""
        return -(-count // self.ranks)

    def divide(self, hidden: Tensor, row: PackedRow) -> tuple[Tensor, PackedRow]:
        """Hidden states of this rank's positions, and the row with their targets and kept sets.

        Args:
            hidden: [S, hidden], equal on all ranks of the group.
        """
        count = len(row.target)
        own, kept = self.positions(count), None
        if row.kept is not None and own.start < own.stop:
            kept = row.kept.split(self.most(count))[self.rank]
        return _Divide.apply(hidden, self), replace(row, target=row.target[own], kept=kept)

    def gather(self, values: Tensor, count: int) -> Tensor:
        """Numbers of all positions, [S], from those of this rank."""
        found: Tensor = _Gather.apply(values, self, count)
        return found

    def exchanged(self, own: Tensor, count: int) -> Tensor:
        """Rows of all positions, from the rows of this rank's positions."""
        # A new tensor: FSDP warns of roots that return a view.
        return stack_rows(own, self.most(count), self.group)[:count].clone()


class _Divide(torch.autograd.Function):
    """Hidden states [S, H] -> those of this rank's positions."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, share: HeadShare) -> Tensor:
        ctx.share, ctx.count = share, len(hidden)
        return hidden[share.positions(len(hidden))].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # `_Gather` has multiplied all gradients of the head by the size of the group.
        return ctx.share.exchanged(grad, ctx.count) / ctx.share.ranks, None


class _Gather(torch.autograd.Function):
    """Numbers of this rank's positions -> those of all positions [S]."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, share: HeadShare, count: int) -> Tensor:
        ctx.share, ctx.count = share, count
        return share.exchanged(values, count)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad[ctx.share.positions(ctx.count)] * ctx.share.ranks, None, None
