"""CISPO: clipped importance-sampling weights (MiniMax-M1, arXiv:2506.13585 eq. 4-5).

    loss = sum_t -sg[min(rho_t, 1 + eps_high)] A_t log pi(o_t) / sum |o_i|

Patches DAPO in loss, clip_low and clip_high. The clip bounds the weight of a token and never
removes its gradient. Under a clipped ratio, a rare but decisive token ("however", "wait") drops out
of the batch after its first update. Here every token keeps a gradient with a bounded weight. There
is no lower bound.

eps_high is not published. ScaleRL (arXiv:2510.13786) caps the weight at 5. verl caps at
1 + eps_high, as here; TRL caps at eps_high itself.

Runs alone on the shared task: python -m sixfold.algorithm.cispo
"""

from __future__ import annotations

from dataclasses import replace

from .dapo import DAPO
from .method import Method

CISPO: Method = replace(
    DAPO,
    name="cispo",
    patches="dapo",
    paper="arXiv:2506.13585 eq. 4",
    loss="clipped_weight",
    clip_low=None,
    clip_high=4.0,
)
