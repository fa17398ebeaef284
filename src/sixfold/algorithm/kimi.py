"""Kimi: online policy mirror descent (k1.5, arXiv:2501.12599 eq. 3; K2, arXiv:2507.20534 section
3.2.3).

    loss = mean_i (r_i - mean - tau sum_t (log pi - log pi_old))^2

Patches REINFORCE in advantage, loss, aggregation and tau. A regression instead of a score function:
the optimum of "reward minus tau KL(pi || pi_old)" has log pi / pi_old equal to (r - mean) / tau up
to a constant, and the square pulls there. On-policy its gradient is that of REINFORCE with the
group mean, times 2 tau; off-policy the square itself holds the policy back, without a clip. It
costs tau, which is not published; 0.1 here.

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


if __name__ == "__main__":
    from ..run.shared_task import main

    main("kimi")
