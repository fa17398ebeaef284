"""Lite PPO (arXiv:2508.08221): "tricks or traps", reduced to two tricks.

    A_i  = (r_i - mean of the group) / std over the rewards of the whole batch
    loss = sum_i sum_t -min(rho_it A_i, clip(rho_it, 1 - eps, 1 + eps) A_i) / sum_i |o_i|

Patches GRPO in advantage and aggregation. The std is that of the batch, so a group with one lucky
sample is not amplified. The loss is averaged over tokens. The clip is PPO's, and there is no
critic. It costs nothing in addition to GRPO.

Runs alone on the shared task: python -m sixfold.algorithm.lite_ppo
"""

from __future__ import annotations

from dataclasses import replace

from .grpo import GRPO
from .method import Method

LITE_PPO: Method = replace(
    GRPO,
    name="lite_ppo",
    patches="grpo",
    paper="arXiv:2508.08221",
    advantage="batch_std",
    aggregation="token",
)
