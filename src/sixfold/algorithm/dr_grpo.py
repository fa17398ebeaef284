"""Dr. GRPO: GRPO done right (arXiv:2503.20783 section 3.2).

    A_i  = r_i - mean of the group
    loss = (1 / B) sum_i sum_t -min(rho_it A_i, clip(rho_it, 1 - eps, 1 + eps) A_i) / L,   L = the
    longest completion allowed, a constant

Patches GRPO in advantage and aggregation. Both divisors go. Without 1 / |o_i| a wrong answer pays
for every one of its tokens, so that length no longer hides it; without 1 / std a prompt that is
nearly always (or never) solved no longer weighs more than one solved half the time. What is left is
REINFORCE with the group mean behind PPO's clip. It costs the scale: the step now follows the
reward's size and the constant L.

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


if __name__ == "__main__":
    from ..run.shared_task import main

    main("dr_grpo")
