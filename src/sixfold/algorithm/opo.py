"""OPO: on-policy with the optimal baseline (arXiv:2505.23585).

    A_i  = r_i - sum_j l_j r_j / sum_j l_j
    loss = - (1 / B) sum_i A_i sum_t log pi(o_it)

Patches REINFORCE in advantage. The baseline with the least variance weighs each reward by the
squared norm of its gradient. That norm grows roughly in proportion to the length l of the answer.
The method is exactly on-policy: one update per step, no ratio, no KL, no entropy bonus.

It costs K samples per prompt.

Runs alone on the shared task: python -m sixfold.algorithm.opo
"""

from __future__ import annotations

from dataclasses import replace

from .method import Method
from .reinforce import REINFORCE

OPO: Method = replace(
    REINFORCE,
    name="opo",
    patches="reinforce",
    paper="arXiv:2505.23585 eq. 6",
    advantage="length_weighted",
)
