"""Advantages from rewards, group by group. Pure functions on [B]: rewards and the number of each row's group in, advantages out.

A row whose checker failed has reward NaN: it takes no part in its group's statistics and gets advantage 0.
"""

from __future__ import annotations

import torch
from torch import Tensor


def group_statistics(rewards: Tensor, group: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """rewards, group [B] -> (mean, population standard deviation, count) of each row's group over its finite rewards, [B] each."""
    _check(rewards, group)
    groups = int(group.max()) + 1
    known = rewards.isfinite()
    value = torch.where(known, rewards, 0.0)
    zeros = rewards.new_zeros(groups)
    count = zeros.index_add(0, group, known.to(rewards.dtype)).clamp_min(1.0)
    mean = zeros.index_add(0, group, value) / count
    centred = torch.where(known, rewards - mean[group], 0.0)
    variance = zeros.index_add(0, group, centred**2) / count
    return mean[group], variance.sqrt()[group], count[group]


def degenerate(rewards: Tensor, group: Tensor) -> Tensor:
    """[B] True where all known rewards of the row's group are equal: nothing to learn from, advantage exactly 0."""
    _check(rewards, group)
    known = rewards.isfinite()
    groups = int(group.max()) + 1
    highest = rewards.new_full((groups,), -torch.inf).scatter_reduce(0, group, torch.where(known, rewards, -torch.inf), "amax")
    lowest = rewards.new_full((groups,), torch.inf).scatter_reduce(0, group, torch.where(known, rewards, torch.inf), "amin")
    return (highest <= lowest)[group]


def group_mean(rewards: Tensor, group: Tensor) -> Tensor:
    """A_i = r_i - mean of the group; [B] -> [B]. REINFORCE with the group mean as baseline (Williams 1992; Kool et al. 2019)."""
    mean, _, _ = group_statistics(rewards, group)
    return _cleaned(rewards - mean, rewards, group)


def group_zscore(rewards: Tensor, group: Tensor, eps: float = 1e-6) -> Tensor:
    """A_i = (r_i - mean) / (std + eps), population std; [B] -> [B]. GRPO (arXiv:2402.03300, section 4.1.2).

    Peers use the n - 1 form of std: same direction, smaller by sqrt((K - 1) / K).
    """
    mean, std, _ = group_statistics(rewards, group)
    return _cleaned((rewards - mean) / (std + eps), rewards, group)


def _cleaned(advantages: Tensor, rewards: Tensor, group: Tensor) -> Tensor:
    # Equal float rewards can leave a residue of rounding in r - mean, which the division by a tiny std would blow up: exactly zero instead.
    return torch.where(rewards.isfinite() & ~degenerate(rewards, group), advantages, 0.0)


def _check(rewards: Tensor, group: Tensor) -> None:
    if rewards.ndim != 1 or rewards.shape != group.shape:
        raise ValueError(f"rewards and group must both be [B]: got {tuple(rewards.shape)} and {tuple(group.shape)}")
