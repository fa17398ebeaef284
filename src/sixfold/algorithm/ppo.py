"""PPO: proximal policy optimisation (arXiv:1707.06347 eq. 7, 9; for language models InstructGPT,
arXiv:2203.02155).

    delta_t = r_t + gamma V_{t+1} - V_t          A_t = delta_t + gamma lam A_{t+1}, then
    standardised over the batch loss    = mean_t -min(rho_t A_t, clip(rho_t, 1 - eps, 1 + eps) A_t),
    rho_t = pi(o_t) / pi_old(o_t) critic  = mean_t 1/2 max((V - R)^2, (clip(V, V_old +- eps_v) -
    R)^2),  R = A + V_old

Patches REINFORCE in advantage, loss, aggregation, clip_low, clip_high and epochs. A critic says
what each token was worth, so the advantage is per token and a prompt needs only one sample. The
clipped ratio lets a batch serve several updates: the gradient vanishes once a token has moved by
eps in the direction its advantage asks for. It costs a second model to train and keep, and is only
as good as that model: explained variance near 0 means REINFORCE with noise added.

The InstructGPT form takes k1 to the reference off every token's reward: `algorithm.beta = 0.02`.

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


if __name__ == "__main__":
    from ..run.shared_task import main

    main("ppo")
