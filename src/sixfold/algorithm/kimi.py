"""Kimi: online policy mirror descent (k1.5, arXiv:2501.12599 eq. 3).

Also in K2, arXiv:2507.20534 section 3.2.3.

    loss = mean_i (r_i - mean - tau sum_t (log pi - log pi_old))^2

Patches REINFORCE in advantage, loss, aggregation and tau. The loss is a regression instead of a
score function. At the optimum of "reward minus tau KL(pi || pi_old)", log pi / pi_old equals
(r - mean) / tau up to a constant, and the square pulls the policy there. On-policy, its gradient is
that of REINFORCE with the group mean, times 2 tau. Off-policy, the square itself holds the policy
back, without a clip.

It costs a parameter, tau, which is not published; here it is 0.1.

Runs alone on the shared task: python -m sixfold.algorithm.kimi
"""

from __future__ import annotations

from dataclasses import replace

from .method import Method
from .reinforce import REINFORCE

KIMI: Method = replace(
    REINFORCE,
    name="kimi",
    patches="reinforce",
    paper="arXiv:2501.12599 eq. 3",
    advantage="group_mean",
    loss="mirror_descent",
    aggregation="sequence",
    tau=0.1,
)
