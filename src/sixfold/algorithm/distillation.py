"""On-policy distillation: a teacher's log-probs of the student's own samples as an advantage."""

from __future__ import annotations

import torch
from torch import Tensor


def per_token_advantage(student_logp: Tensor, teacher_logp: Tensor, mask: Tensor) -> Tensor:
    """A_t = teacher_logp - student_logp at the sampled token, without gradient.

    Thinking Machines, "On-Policy Distillation" (2025). This is minus k1 as a reward with discount
    0: each token gets credit only for its own divergence. In expectation the policy gradient with
    this advantage is that of -KL(student || teacher) per token.

    Args:
        student_logp: [B, T] log-probs of the policy that ratios are taken against: the sampler, or
            the trainer if the gap to the sampler is corrected for.
        teacher_logp: [B, T] log-probs of the teacher.
        mask: [B, T] bool, True for sampled tokens.

    Returns:
        [B, T], 0 off the mask.

    Raises:
        ValueError: if the shapes differ.
    """
    if not student_logp.shape == teacher_logp.shape == mask.shape or mask.ndim != 2:
        shapes = [tuple(t.shape) for t in (student_logp, teacher_logp, mask)]
        raise ValueError(f"log-probs and mask must be [B, T] of one shape, got {shapes}")
    return torch.where(mask, (teacher_logp - student_logp).detach(), 0.0)
