"""GMPO: geometric-mean policy optimisation (arXiv:2507.20673).

    loss = mean_i -A_i exp(mean_t clip*(log rho_it, -0.4, 0.4)),
           clip* is one-sided: above where A > 0, below where A < 0

Patches GRPO in loss, clip_low and clip_high. The geometric mean of the token ratios replaces their
arithmetic mean, so one outlier cannot dominate. It resembles GSPO, but each token's log-ratio is
clipped before the mean, and the band is wide.

It costs credit assignment within an answer: the tokens of a row share one factor.

Runs alone on the shared task: python -m sixfold.algorithm.gmpo
"""

from __future__ import annotations

from dataclasses import replace

from .grpo import GRPO
from .method import Method

GMPO: Method = replace(
    GRPO,
    name="gmpo",
    patches="grpo",
    paper="arXiv:2507.20673 eq. 4",
    loss="geometric_surrogate",
    clip_low=0.4,
    clip_high=0.4,
)
