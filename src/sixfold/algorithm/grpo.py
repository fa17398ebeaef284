"""GRPO: group-relative policy optimisation (DeepSeekMath, arXiv:2402.03300 eq. 3).

    A_i  = (r_i - mean) / (std + 1e-6) over the group, population std
    loss = mean_i mean_t -min(rho_it A_i, clip(rho_it, 1 - eps, 1 + eps) A_i) + beta k3(pi, ref)

Patches PPO in advantage, aggregation, kl, kl_in and epochs. The mean and std of K samples of the
prompt replace the critic, which halves the memory. Ratio and clip are those of PPO. The KL moves
from the reward into the loss, as k3. There is one pass over the samples instead of two.

It costs K samples per prompt. A group with equal rewards gives no gradient. The mean over each
sequence weighs a token by 1 / |o_i|: right answers are pushed towards being short, and long wrong
answers are penalised less per token (see Dr. GRPO).

The paper trains with beta = 0.04. The default here is 0: a verifier cannot be drifted away from
like a reward model, and without the KL no reference model is kept.

Runs alone on the shared task: python -m sixfold.algorithm.grpo
"""

from __future__ import annotations

from dataclasses import replace

from .method import Method
from .ppo import PPO

GRPO: Method = replace(
    PPO,
    name="grpo",
    patches="ppo",
    paper="arXiv:2402.03300 eq. 3",
    advantage="group_zscore",
    aggregation="sequence",
    kl="k3",
    kl_in="loss",
    epochs=1,
)
