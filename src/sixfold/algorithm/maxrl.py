"""MaxRL: maximum-likelihood reinforcement learning (arXiv:2602.02710).

    A_i = (r_i - mean) / mean of the group; 0 where no sample is right

Patches GRPO in advantage. The mean stands where the std stood. For 0/1 rewards this is the gradient
of log p(right) rather than of p(right), so a prompt solved once in K counts K times as much as by
r - mean alone: hard prompts lead. It costs variance, since few samples carry them.

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


if __name__ == "__main__":
    from ..run.shared_task import main

    main("maxrl")
