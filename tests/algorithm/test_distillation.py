"""Distillation: the sampled advantage, and the divergence whose gradient it gives."""

from __future__ import annotations

import pytest
import torch
from golden import ALGORITHM_CASES as CASES
from golden import close
from torch import Tensor

from sixfold.algorithm.distillation import per_token_advantage

torch.set_num_threads(1)


def _table(case: str, name: str, side: str = "inputs") -> Tensor:
    return torch.tensor(CASES[case][side][name], dtype=torch.float64)


def test_golden_per_token_advantage() -> None:
    case = "opd_per_token_advantage"
    mask = _table(case, "mask").bool()
    student = torch.where(mask, _table(case, "student_logp"), torch.nan).requires_grad_()
    advantages = per_token_advantage(
        student, torch.where(mask, _table(case, "teacher_logp"), torch.inf), mask
    )
    close(advantages, _table(case, "adv", "expected"))
    close(-advantages.sum() / mask.sum(), _table(case, "mean_reverse_kl_estimate", "expected"))
    assert not advantages.requires_grad


def test_the_sampled_advantage_gives_the_gradient_of_reverse_kl() -> None:
    """E over the student of A grad log s is -grad KL(s || t), enumerated over the vocabulary; the
    divergence itself is the published one.
    """
    case = "distill_divergences"
    student, teacher = (
        _table(case, "student_logits").requires_grad_(),
        _table(case, "teacher_logits"),
    )
    logp, teacher_logp = student.log_softmax(-1), teacher.log_softmax(-1)
    divergence = (logp.exp() * (logp - teacher_logp)).sum(-1)
    close(divergence, _table(case, "reverse_kl", "expected"))
    advantages = per_token_advantage(logp, teacher_logp, torch.ones(logp.shape, dtype=torch.bool))
    surrogate = (logp.detach().exp() * advantages * logp).sum()
    sampled = torch.autograd.grad(surrogate, student, retain_graph=True)[0]
    close(sampled, -torch.autograd.grad(divergence.sum(), student)[0])


def test_refusals() -> None:
    with pytest.raises(ValueError, match="one shape"):
        per_token_advantage(torch.zeros(2, 3), torch.zeros(2), torch.ones(2, 3, dtype=torch.bool))
