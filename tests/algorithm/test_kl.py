"""KL estimators: golden values, exact expectations on a distribution that can be enumerated, and which way round they are."""

from __future__ import annotations

import pytest
import torch
from golden import close, table
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sixfold.algorithm.kl import KL, k1, k2, k3

torch.set_num_threads(1)
EXACT = "kl_gradient_bias_exact"


def _policy() -> tuple[Tensor, Tensor, Tensor]:
    """theta, log pi, log pi_ref over four actions."""
    theta = table(EXACT, "theta").requires_grad_()
    return theta, theta.log_softmax(-1), table(EXACT, "ref_logits").log_softmax(-1)


@pytest.mark.parametrize("name", sorted(KL))
def test_golden_values(name: str) -> None:
    mask = table("kl_estimators", "mask")
    value = KL[name](table("kl_estimators", "logp"), table("kl_estimators", "ref_logp")) * mask
    close(value, table("kl_estimators", name, "expected"))
    close(value.sum() / mask.sum(), table("kl_estimators", f"mean_{name}", "expected"))


def test_golden_gradient_of_k3() -> None:
    logp = table("kl_estimators", "logp").requires_grad_()
    k3(logp, table("kl_estimators", "ref_logp")).sum().backward()
    assert logp.grad is not None
    close(logp.grad, table("kl_estimators", "grad_k3", "expected"))


def test_exact_expectations() -> None:
    """E[k1] = E[k3] = KL(pi || ref); k2 is biased."""
    _, logp, ref = _policy()
    pi, kl = logp.exp(), table(EXACT, "KL_pi_ref", "expected")
    close((pi * k1(logp, ref)).sum(), kl)
    close((pi * k3(logp, ref)).sum(), kl)
    assert abs(float((pi * k2(logp, ref)).sum().detach() - kl)) > 1e-3


def test_swapped_arguments_are_another_number() -> None:
    """The sign test: with policy and reference exchanged E[k1] is negative and E[k3] is not the KL."""
    logp, ref = (t.detach() for t in _policy()[1:])
    pi, kl = logp.exp(), float(table(EXACT, "KL_pi_ref", "expected"))
    assert float((pi * k1(ref, logp)).sum()) == pytest.approx(-kl, abs=1e-6)
    assert abs(float((pi * k3(ref, logp)).sum()) - kl) > 1e-3
    # And by hand, for one token twice as likely under the policy: r = log 2.
    twice, once = torch.tensor([[0.5]]).log(), torch.tensor([[0.25]]).log()
    assert float(k1(twice, once)) == pytest.approx(0.693147, abs=1e-6)
    assert float(k2(twice, once)) == pytest.approx(0.240227, abs=1e-6)
    assert float(k3(twice, once)) == pytest.approx(0.5 + 0.693147 - 1, abs=1e-6)


@pytest.mark.parametrize(("name", "expected"), [("k1", "E_grad_k1_loss"), ("k2", "E_grad_k2_loss"), ("k3", "E_grad_k3_loss")])
def test_exact_gradients_as_a_loss_term(name: str, expected: str) -> None:
    """Sampled from pi and differentiated through logp: k1 gives nothing, k2 reverse KL, k3 forward KL."""
    theta, logp, ref = _policy()
    (logp.detach().exp() * KL[name](logp, ref)).sum().backward()
    assert theta.grad is not None
    close(theta.grad, table(EXACT, expected, "expected"))


def test_exact_gradient_of_k1_as_a_reward() -> None:
    theta, logp, ref = _policy()
    (logp.detach().exp() * k1(logp, ref).detach() * logp).sum().backward()
    assert theta.grad is not None
    close(theta.grad, table(EXACT, "E_score_times_k1", "expected"))
    close(theta.grad, table(EXACT, "grad_reverse", "expected"))


@given(st.floats(-200, 0, width=32), st.floats(-200, 0, width=32))
def test_k3_is_never_negative_and_always_finite(logp: float, ref: float) -> None:
    p = torch.tensor([[logp]], requires_grad=True)
    value = k3(p, torch.tensor([[ref]]))
    value.sum().backward()
    assert float(value.detach()) >= -1e-6 and bool(value.isfinite())
    assert p.grad is not None and bool(p.grad.isfinite())


@pytest.mark.parametrize("name", sorted(KL))
def test_equal_policies_cost_nothing(name: str) -> None:
    same = torch.tensor([[-0.3, -7.0]])
    assert KL[name](same, same).tolist() == [[0.0, 0.0]]
