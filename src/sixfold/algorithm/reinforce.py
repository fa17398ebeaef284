"""REINFORCE (Williams 1992, doi:10.1007/BF00992696).

    A_i = r_i          loss = - (1 / B) sum_i A_i sum_t log pi(o_it)

The root of the family: what is rewarded becomes likelier. Unbiased, and noisy: with rewards of 0
and 1 the failures teach nothing at all, and the successes push everything that happened to be
sampled with them. No ratio and no clip, so every sample serves one update.

A KL, where one is wanted, is k1 taken off the reward, the estimator whose score-function gradient
is that of KL(policy || reference); as a loss term k1 has zero expected gradient. With
`algorithm.advantage = "group_mean"` this is REINFORCE with a baseline (Kool, van Hoof, Welling
2019).

Runs alone on the shared task: python -m sixfold.algorithm.reinforce
"""

from __future__ import annotations

from .method import Method

REINFORCE: Method = Method(
    name="reinforce",
    patches="",
    paper="Williams 1992, doi:10.1007/BF00992696",
    advantage="no_baseline",
    loss="policy_gradient",
    aggregation="sequence-sum",
    kl="k1",
    kl_in="reward",
)


if __name__ == "__main__":
    from ..run.shared_task import main

    main("reinforce")
