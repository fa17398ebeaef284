"""On-policy distillation (arXiv:2306.13649).

As a policy gradient: Thinking Machines Lab 2025, "On-Policy Distillation"; Qwen3, arXiv:2505.09388.

    A_t  = -(log pi_old(o_t) - log teacher(o_t))
    loss = mean_t -rho_t A_t, clipped as in PPO

Patches REINFORCE in advantage, loss, aggregation, clip_low and clip_high. The reward of a token is
the log-prob of a teacher minus that of the student, on text that the student wrote. This is the
sampled reverse KL without a discount. The clip is PPO's. The signal is as dense as in supervised
learning but on the student's own states, and it needs no verifier and no group.

It costs a second model that shares the tokenizer (`reference.path`), and the student cannot become
better than the teacher. The task's reward is logged but not trained on.

Runs alone on the shared task: python -m sixfold.algorithm.opd
"""

from __future__ import annotations

from dataclasses import replace

from .method import Method
from .reinforce import REINFORCE

OPD: Method = replace(
    REINFORCE,
    name="opd",
    patches="reinforce",
    paper="arXiv:2306.13649; arXiv:2505.09388",
    advantage="teacher",
    loss="clipped_surrogate",
    clip_low=0.2,
    clip_high=0.2,
    aggregation="token",
)
