"""DAPO: decoupled clip and dynamic sampling (arXiv:2503.14476).

Patches GRPO in aggregation, clip_high, overlong_buffer and dynamic_sampling. Each of the four can
be switched off alone. With all four off, the row is exactly GRPO.

    clip-higher         clip(rho, 1 - 0.2, 1 + 0.28)         eq. 10
        A token of probability 0.01 may grow to 0.0128 instead of 0.012. The entropy lasts longer.
    dynamic sampling    0 < #right < K in every group        eq. 11
        Every prompt of the step gives a gradient. It costs the samples that are discarded.
    token-level loss    sum_i sum_t loss / sum_i |o_i|       eq. 12
        A token weighs the same in a long answer as in a short one.
    overlong penalty    0 ... -1 over the last fifth         eq. 13
        The reward falls before the length limit, not only at it.

They are switched off by `algorithm.clip_high = 0.2`, `dynamic_sampling = 0`,
`aggregation = "sequence"` and `overlong_buffer = 0`. The paper has no KL and makes 16 updates per
step (`minibatches = 16`).

Runs alone on the shared task: python -m sixfold.algorithm.dapo
"""

from __future__ import annotations

from dataclasses import replace

from .grpo import GRPO
from .method import Method

DAPO: Method = replace(
    GRPO,
    name="dapo",
    patches="grpo",
    paper="arXiv:2503.14476 eq. 8",
    clip_high=0.28,
    dynamic_sampling=4,
    aggregation="token",
    overlong_buffer=0.2,
)
