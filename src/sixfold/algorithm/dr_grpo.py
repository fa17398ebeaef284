"""Dr. GRPO: GRPO done right (arXiv:2503.20783 section 3.2).

    A_i  = r_i - mean of the group
    loss = (1 / B) sum_i sum_t -min(rho_it A_i, clip(rho_it, 1 - eps, 1 + eps) A_i) / L,
           L = the longest completion allowed, a constant

Patches GRPO in advantage and aggregation. Both divisions of GRPO are removed. Without 1 / |o_i|,
every token of a wrong answer is penalised equally, so a longer answer no longer dilutes the
penalty. Without 1 / std, a prompt that is almost always or almost never solved no longer weighs
more than one that is solved half the time. What remains is REINFORCE with the group mean and PPO's
clip.

It costs the independence of scale: the step size follows the size of the rewards and the
constant L.

Runs alone on the shared task: python -m sixfold.algorithm.dr_grpo
"""

from __future__ import annotations

from dataclasses import replace

from .grpo import GRPO
from .method import Method

DR_GRPO: Method = replace(
    GRPO,
    name="dr_grpo",
    patches="grpo",
    paper="arXiv:2503.20783 section 3.2",
    advantage="group_mean",
    aggregation="constant",
)
