"""ReMax: REINFORCE with the reward of the greedy completion as baseline (arXiv:2310.10505).

    A_i  = r_i - r(greedy completion of the same prompt)
    loss = - (1 / B) sum_i A_i sum_t log pi(o_it)

Patches REINFORCE in advantage. The baseline does not depend on the sampled answers, so the gradient
stays unbiased, and one sample per prompt is enough. It needs no critic and no group. A group whose
samples all fail still trains if the greedy completion succeeds, and the reverse.

It costs one more completion per prompt, which is sampled at temperature 0, scored, and not trained
on. If its check fails, the baseline is unknown and the advantages of the prompt are 0 in this step.
Once the policy is nearly deterministic, samples equal the greedy completion and the advantages
vanish.

Runs alone on the shared task: python -m sixfold.algorithm.remax
"""

from __future__ import annotations

from dataclasses import replace

from .method import Method
from .reinforce import REINFORCE

REMAX: Method = replace(
    REINFORCE,
    name="remax",
    patches="reinforce",
    paper="arXiv:2310.10505",
    advantage="greedy_baseline",
)
