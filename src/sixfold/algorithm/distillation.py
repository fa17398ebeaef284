"""Learning from a teacher on the student's own samples: divergences over the whole vocabulary, and
the sampled form as an advantage.

s, t: softmax of the student's and the teacher's logits [..., V]. A token that a distribution
excludes (logit -inf) adds nothing to its own expectation. Half precision is worked out in float32.
"""

from __future__ import annotations

from math import log

import torch
from torch import Tensor


def reverse_kl(student_logits: Tensor, teacher_logits: Tensor) -> Tensor:
    """KL(s || t) = sum s (log s - log t); [..., V] -> [...]. Mode-seeking: the student drops what
    it cannot match.
    """
    student, teacher = _log_probs(student_logits, teacher_logits)
    return _kl(student, teacher)


def forward_kl(student_logits: Tensor, teacher_logits: Tensor) -> Tensor:
    """KL(t || s) = sum t (log t - log s); [..., V] -> [...]. The classic distillation loss: the
    student covers all that the teacher does.
    """
    student, teacher = _log_probs(student_logits, teacher_logits)
    return _kl(teacher, student)


def generalised_jsd(student_logits: Tensor, teacher_logits: Tensor, beta: float) -> Tensor:
    """beta KL(t || m) + (1 - beta) KL(s || m), m = beta t + (1 - beta) s; [..., V] -> [...] (GKD,
    arXiv:2306.13649; as TRL has it).

    0 is forward KL and 1 reverse KL by definition. The formula tends to 0 there, to beta KL(t || s)
    and (1 - beta) KL(s || t): near either end the loss is small, at it the whole divergence. Raises
    ValueError on a beta outside [0, 1].
    """
    if not 0 <= beta <= 1:
        raise ValueError(f"beta must be in [0, 1], got {beta}")
    student, teacher = _log_probs(student_logits, teacher_logits)
    if beta == 0:
        return _kl(teacher, student)
    if beta == 1:
        return _kl(student, teacher)
    # Where both exclude a token, the gradient of logaddexp(-inf, -inf) is NaN; any finite number
    # does, for nothing reads the mixture there.
    neither = student.isneginf() & teacher.isneginf()
    mixture = torch.logaddexp(
        teacher.masked_fill(neither, 0.0) + log(beta),
        student.masked_fill(neither, 0.0) + log(1 - beta),
    )
    return beta * _kl(teacher, mixture) + (1 - beta) * _kl(student, mixture)


def per_token_advantage(student_logp: Tensor, teacher_logp: Tensor, mask: Tensor) -> Tensor:
    """A_t = teacher_logp - student_logp at the sampled token, a constant, 0 outside the mask; [B,
    T].

    Thinking Machines, "On-Policy Distillation" (2025): minus k1 as a reward with discount 0, so
    that each token answers for its own divergence only.
    student_logp: of the policy that ratios are taken against: the sampler, or the trainer where the
    way there is corrected for.
    """
    if not student_logp.shape == teacher_logp.shape == mask.shape or mask.ndim != 2:
        shapes = [tuple(t.shape) for t in (student_logp, teacher_logp, mask)]
        raise ValueError(f"log-probs and mask must be [B, T] of one shape, got {shapes}")
    return torch.where(mask, (teacher_logp - student_logp).detach(), 0.0)


def _log_probs(student_logits: Tensor, teacher_logits: Tensor) -> tuple[Tensor, Tensor]:
    if student_logits.shape != teacher_logits.shape:
        shapes = f"{tuple(student_logits.shape)} and {tuple(teacher_logits.shape)}"
        raise ValueError(
            f"student and teacher need logits of one shape, over one vocabulary: got {shapes}"
        )
    dtype = torch.promote_types(student_logits.dtype, torch.float32)
    return student_logits.log_softmax(-1, dtype=dtype), teacher_logits.log_softmax(-1, dtype=dtype)


def _kl(p: Tensor, q: Tensor) -> Tensor:
    """KL(p || q) of two log-probs [..., V]."""
    # Where p is 0 both logs are taken out before they meet: 0 * inf is NaN, in the value and in the
    # gradient.
    excluded = p.isneginf()
    gap = p.masked_fill(excluded, 0.0) - q.masked_fill(excluded, 0.0)
    return (p.exp() * gap).sum(-1)
