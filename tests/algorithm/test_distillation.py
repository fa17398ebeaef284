"""Distillation: golden divergences, their gradients, and which way round each is."""

from __future__ import annotations

import math

import pytest
import torch
from golden import ALGORITHM_CASES as CASES
from golden import close
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sixfold.algorithm.distillation import (
    forward_kl,
    generalised_jsd,
    per_token_advantage,
    reverse_kl,
)

torch.set_num_threads(1)


def _table(case: str, name: str, side: str = "inputs") -> Tensor:
    return torch.tensor(CASES[case][side][name], dtype=torch.float64)


def _logits() -> tuple[Tensor, Tensor]:
    return _table("distill_divergences", "student_logits").requires_grad_(), _table(
        "distill_divergences", "teacher_logits"
    )


def test_golden_divergences() -> None:
    student, teacher = _logits()
    expected = {
        name: _table("distill_divergences", name, "expected")
        for name in ("reverse_kl", "forward_kl", "jsd", "gjsd_beta03")
    }
    close(reverse_kl(student, teacher), expected["reverse_kl"])
    close(forward_kl(student, teacher), expected["forward_kl"])
    close(generalised_jsd(student, teacher, 0.5), expected["jsd"])
    close(generalised_jsd(student, teacher, 0.3), expected["gjsd_beta03"])


def test_the_ends_are_the_two_kls() -> None:
    student, teacher = _logits()
    assert torch.equal(generalised_jsd(student, teacher, 0.0), forward_kl(student, teacher))
    assert torch.equal(generalised_jsd(student, teacher, 1.0), reverse_kl(student, teacher))


def test_near_the_ends_the_formula_is_a_share_of_them() -> None:
    """beta KL(t || s) as beta goes to 0, (1 - beta) KL(s || t) as it goes to 1."""
    student, teacher = _logits()
    torch.testing.assert_close(
        generalised_jsd(student, teacher, 1e-5) / 1e-5,
        forward_kl(student, teacher),
        rtol=1e-3,
        atol=0,
    )
    torch.testing.assert_close(
        generalised_jsd(student, teacher, 1 - 1e-5) / 1e-5,
        reverse_kl(student, teacher),
        rtol=1e-3,
        atol=0,
    )


def test_gradients_by_hand() -> None:
    """Forward: s - t. Reverse: s (log s - log t - KL)."""
    student, teacher = _logits()
    s, t = student.detach().softmax(-1), teacher.softmax(-1)
    close(torch.autograd.grad(forward_kl(student, teacher).sum(), student)[0], s - t)
    gap = s.log() - t.log()
    close(
        torch.autograd.grad(reverse_kl(student, teacher).sum(), student)[0],
        s * (gap - (s * gap).sum(-1, keepdim=True)),
    )


def test_gradient_of_the_generalised_jsd_by_finite_differences() -> None:
    student, teacher = _logits()
    assert torch.autograd.gradcheck(lambda z: generalised_jsd(z, teacher, 0.3), (student,))


@given(st.integers(0, 10_000), st.floats(0.01, 0.99))
@settings(max_examples=50, deadline=None)
def test_divergences_are_zero_exactly_for_equals_and_never_negative(seed: int, beta: float) -> None:
    a, b = 3 * torch.randn(2, 4, 7, generator=torch.Generator().manual_seed(seed)).double()
    assert float(generalised_jsd(a, b, beta).min()) >= -1e-12
    close(generalised_jsd(a, a + 2.0, beta), torch.zeros(4))
    # Swapping the two is swapping beta and 1 - beta.
    close(generalised_jsd(a, b, beta), generalised_jsd(b, a, 1 - beta))


def test_excluded_tokens() -> None:
    """What the student never says adds nothing to reverse KL and makes forward KL infinite; no NaN
    in the gradient of a finite one.
    """
    student = torch.tensor([[0.0, 0.0, -torch.inf]], requires_grad=True)
    teacher = torch.tensor([[0.0, 0.0, 0.0]])
    value = reverse_kl(student, teacher)
    assert float(value.detach()) == pytest.approx(math.log(3 / 2))
    assert bool(torch.autograd.grad(value.sum(), student)[0].isfinite().all())
    assert float(forward_kl(student, teacher).detach()) == math.inf
    for shared in (
        reverse_kl(student, student.detach()),
        generalised_jsd(student, student.detach(), 0.5),
    ):
        assert float(shared.detach()) == pytest.approx(0.0, abs=1e-7)
        assert bool(torch.autograd.grad(shared.sum(), student)[0].isfinite().all())


def test_half_precision_is_worked_out_in_float32() -> None:
    student, teacher = torch.randn(
        2, 3, 5000, generator=torch.Generator().manual_seed(0)
    ).bfloat16()
    for divergence in (reverse_kl, forward_kl, lambda s, t: generalised_jsd(s, t, 0.3)):
        torch.testing.assert_close(
            divergence(student, teacher).double(),
            divergence(student.double(), teacher.double()),
            atol=1e-5,
            rtol=1e-4,
        )


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
    """E over the student of A grad log s is -grad KL(s || t), enumerated over the vocabulary."""
    student, teacher = _logits()
    logp, teacher_logp = student.log_softmax(-1), teacher.log_softmax(-1)
    advantages = per_token_advantage(logp, teacher_logp, torch.ones(logp.shape, dtype=torch.bool))
    sampled = torch.autograd.grad((logp.detach().exp() * advantages * logp).sum(), student)[0]
    close(sampled, -torch.autograd.grad(reverse_kl(student, teacher).sum(), student)[0])


def test_refusals() -> None:
    with pytest.raises(ValueError, match="vocabulary"):
        reverse_kl(torch.zeros(2, 3), torch.zeros(2, 4))
    with pytest.raises(ValueError, match="beta"):
        generalised_jsd(torch.zeros(2, 3), torch.zeros(2, 3), 1.1)
    with pytest.raises(ValueError, match="one shape"):
        per_token_advantage(torch.zeros(2, 3), torch.zeros(2), torch.ones(2, 3, dtype=torch.bool))
