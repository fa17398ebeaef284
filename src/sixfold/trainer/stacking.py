"""Gather rows from the ranks of a group that have unequal numbers of them, and add them up."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def stack_rows(own: Tensor, most: int, group: dist.ProcessGroup) -> Tensor:
    """Rows of all ranks, [ranks * most, ...], in rank order. Unused places are 0.

    Args:
        own: [n, ...] rows of this rank, n <= most.
        most: places of each rank, equal on all ranks.
    """
    padded = own.new_zeros(most, *own.shape[1:])
    padded[: len(own)] = own
    every = own.new_empty(dist.get_world_size(group) * most, *own.shape[1:])
    dist.all_gather(list(every.split(most)), padded, group=group)
    return every


def sum_rows(every: Tensor, most: int, group: dist.ProcessGroup) -> Tensor:
    """Sum of this rank's rows over the ranks, [most, ...], added in rank order.

    Args:
        every: [ranks * most, ...] a summand of the rows of all ranks, as `stack_rows` orders them.
        most: places of each rank.
    """
    summands = torch.empty_like(every)
    dist.all_to_all_single(summands, every, group=group)
    return summands.view(-1, most, *every.shape[1:]).sum(0)
