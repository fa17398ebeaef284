"""GSPO: group sequence policy optimisation (arXiv:2507.18071 eq. 5; the token form eq. 13).

    s_i  = exp(mean_t (log pi - log pi_old)) = (pi(o_i) / pi_old(o_i))^(1 / |o_i|)
    loss = mean_i -min(s_i A_i, clip(s_i, 1 - 3e-4, 1 + 4e-4) A_i)

Patches GRPO in loss, clip_low and clip_high. The ratio is that of the whole sequence, because the
reward is. An answer is clipped or kept as a whole. A single token whose probability jumps, such as
one that a mixture of experts routes differently, no longer dominates the gradient. The band is over
five hundred times narrower than GRPO's, because s is a geometric mean.

It costs credit assignment within an answer. `gspo_token` restores it: s_it = sg[s_i] pi / sg[pi],
which gives the same numbers if A is constant over a row.

Runs alone on the shared task: python -m sixfold.algorithm.gspo
"""

from __future__ import annotations

from dataclasses import replace

from .grpo import GRPO
from .method import Method

GSPO: Method = replace(
    GRPO,
    name="gspo",
    patches="grpo",
    paper="arXiv:2507.18071 eq. 5",
    loss="sequence_surrogate",
    clip_low=3e-4,
    clip_high=4e-4,
)

GSPO_TOKEN: Method = replace(
    GSPO,
    name="gspo_token",
    patches="gspo",
    paper="arXiv:2507.18071 eq. 13",
    loss="sequence_token_surrogate",
)
