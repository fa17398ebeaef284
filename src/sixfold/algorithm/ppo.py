"""PPO: proximal policy optimisation (arXiv:1707.06347 eq. 7, 9).

For language models: InstructGPT, arXiv:2203.02155.

    delta_t = r_t + gamma V_{t+1} - V_t
    A_t     = delta_t + gamma lam A_{t+1}, then standardised over the batch
    loss    = mean_t -min(rho_t A_t, clip(rho_t, 1 - eps, 1 + eps) A_t),
              rho_t = pi(o_t) / pi_old(o_t)
    critic  = mean_t 1/2 max((V - R)^2, (clip(V, V_old +- eps_v) - R)^2),  R = A + V_old

Patches REINFORCE in advantage, loss, aggregation, clip_low, clip_high and epochs. A critic predicts
the value of each state, so each token has its own advantage, and one sample per prompt is enough.
The clipped ratio allows several updates on one batch: a token's gradient vanishes once its ratio
has moved by eps in the direction of its advantage.

It costs a second model in training. The advantages are only as good as the critic: with an
explained variance near 0, PPO is REINFORCE with added noise.

The InstructGPT form subtracts k1 to the reference from every token's reward:
`algorithm.beta = 0.02`.

Runs alone on the shared task: python -m sixfold.algorithm.ppo
"""

from __future__ import annotations

from dataclasses import replace

from .method import Method
from .reinforce import REINFORCE

PPO: Method = replace(
    REINFORCE,
    name="ppo",
    patches="reinforce",
    paper="arXiv:1707.06347 eq. 7; arXiv:2203.02155",
    advantage="gae",
    loss="clipped_surrogate",
    clip_low=0.2,
    clip_high=0.2,
    aggregation="token",
    epochs=2,
)
