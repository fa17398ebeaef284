"""REINFORCE (Williams 1992, doi:10.1007/BF00992696).

    A_i  = r_i
    loss = - (1 / B) sum_i A_i sum_t log pi(o_it)

The root of the family. Tokens of a rewarded answer become more likely. The gradient is unbiased but
has a high variance. With rewards of 0 and 1, failures give no gradient, and a success reinforces
every token that was sampled with it. There is no ratio and no clip, so each sample serves only one
update.

A KL, if wanted, is k1 subtracted from the reward. Its score-function gradient is that of
KL(policy || reference). As a loss term k1 has zero expected gradient. With
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
