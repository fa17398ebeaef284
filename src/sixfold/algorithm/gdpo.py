"""GDPO: group reward-decoupled normalisation policy optimisation (arXiv:2601.05242).

    s_i  = sum_n w_n (r_i^n - mean) / (std + 1e-6), mean and std of reward n over the group
    A_i  = (s_i - mean) / (std + 1e-6) over all rows of the batch
    loss = GRPO's

Patches GRPO in advantage. GRPO adds the rewards of an answer first and normalises the sum. Two
answers with different rewards but equal sums then get the same advantage, and a reward with a small
spread is lost beside one with a large spread. GDPO normalises each reward within the group before
it adds them with their weights, so every reward counts in proportion to its weight. The
normalisation over the batch keeps the scale of the advantages independent of the number of rewards.

It needs several rewards (`environment.rewards`, `environment.weights`). With one reward it is GRPO
with one more normalisation. A reward that does not apply to an answer adds nothing to its sum. A
rare reward weighs as much as a frequent one, which also amplifies its noise.

Runs alone on the shared task: python -m sixfold.algorithm.gdpo
"""

from __future__ import annotations

from dataclasses import replace

from .grpo import GRPO
from .method import Method

GDPO: Method = replace(
    GRPO,
    name="gdpo",
    patches="grpo",
    paper="arXiv:2601.05242",
    advantage="normalise_then_sum",
)
