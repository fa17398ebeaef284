"""SAPO: soft adaptive policy optimisation (arXiv:2511.20347 section 3).

    loss = mean_i mean_t -f(rho_t) A_t,   f(rho) = 4 / tau sigmoid(tau (rho - 1)),
           tau = 1.0 where A > 0, 1.05 where A < 0

Patches GRPO in loss, clip_low, clip_high, tau and tau_negative. The hard edge of the clip becomes a
slope. The gradient fades as the ratio leaves 1, with weight 4 p (1 - p) rho,
p = sigmoid(tau (rho - 1)), instead of stopping at 1 +- eps. It fades slightly sooner for tokens
with A < 0, because lowering a token raises many unrelated ones.

It costs the hard bound on how far one batch can move the policy.

Runs alone on the shared task: python -m sixfold.algorithm.sapo
"""

from __future__ import annotations

from dataclasses import replace

from .grpo import GRPO
from .method import Method

SAPO: Method = replace(
    GRPO,
    name="sapo",
    patches="grpo",
    paper="arXiv:2511.20347 section 3",
    loss="soft_gate",
    clip_low=None,
    clip_high=None,
    tau=1.0,
    tau_negative=1.05,
)
