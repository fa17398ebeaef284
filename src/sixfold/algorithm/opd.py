"""On-policy distillation (arXiv:2306.13649; as a policy gradient: Thinking Machines Lab 2025,
"On-Policy Distillation"; Qwen3, arXiv:2505.09388).

    A_t = -(log pi_old(o_t) - log teacher(o_t))          loss = mean_t -rho_t A_t, clipped as PPO
    does

Patches REINFORCE in advantage, loss, aggregation, clip_low and clip_high. The reward is a teacher's
opinion of every token that the student itself wrote, the sampled reverse KL with no discount; the
clip is PPO's. As dense as supervised learning and on the student's own states, so there is nothing
to verify and no group. It costs a second model that shares the tokenizer (`reference.path`), and
cannot go beyond it. The task's reward is logged, not trained on.

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


if __name__ == "__main__":
    from ..run.shared_task import main

    main("opd")
