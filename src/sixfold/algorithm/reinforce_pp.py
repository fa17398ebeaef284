"""REINFORCE++ and its form with a group baseline (arXiv:2501.03262).

    A_t = (G_t - mean) / std over all tokens of the batch,
          G_t = sum of the token rewards from t on, each less beta k1 to the reference
    baseline form: A_i = r_i - mean of the group, then standardised over all tokens of the batch

Patches PPO in advantage and epochs. The statistics of the whole batch replace the critic. One std
for all prompts does not amplify a nearly solved prompt, and is not biased by a small group. One
sample per prompt and one pass over the samples are enough.

It costs the baseline of each prompt: without the group mean, all answers to an easy prompt look
good. The baseline form (`reinforce_pp_baseline`) restores the group mean and moves the KL into the
loss, as k2.

Runs alone on the shared task: python -m sixfold.algorithm.reinforce_pp
"""

from __future__ import annotations

from dataclasses import replace

from .method import Method
from .ppo import PPO

REINFORCE_PP: Method = replace(
    PPO,
    name="reinforce_pp",
    patches="ppo",
    paper="arXiv:2501.03262",
    advantage="whitened_return",
    epochs=1,
)

REINFORCE_PP_BASELINE: Method = replace(
    REINFORCE_PP,
    name="reinforce_pp_baseline",
    patches="reinforce_pp",
    advantage="whitened_group_mean",
    kl="k2",
    kl_in="loss",
)
