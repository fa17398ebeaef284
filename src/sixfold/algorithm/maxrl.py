"""MaxRL: maximum-likelihood reinforcement learning (arXiv:2602.02710).

    A_i = (r_i - mean) / mean of the group; 0 where no sample is right

Patches GRPO in advantage. The mean of the group replaces its std. For rewards of 0 and 1 this is
the gradient of log p(right) rather than of p(right). A prompt solved once in K counts K times as
much as with r - mean alone, so hard prompts dominate.

It costs variance, because few samples carry the hard prompts.

Runs alone on the shared task: python -m sixfold.algorithm.maxrl
"""

from __future__ import annotations

from dataclasses import replace

from .grpo import GRPO
from .method import Method

MAXRL: Method = replace(
    GRPO,
    name="maxrl",
    patches="grpo",
    paper="arXiv:2602.02710",
    advantage="maxrl",
)
