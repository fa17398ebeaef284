"""KL estimators: golden values, exact expectations on a distribution that can be enumerated, and
which way round they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from golden import AGGREGATIONS as OURS
from golden import ALGORITHM_CASES as CASES
from golden import close, spread, table
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sixfold.algorithm.aggregation import AGGREGATIONS
from sixfold.algorithm.kl import KL, AdaptiveBeta, k1, k2, k3, k3_plus, unbiased
from sixfold.algorithm.losses import clipped_surrogate
from sixfold.batch import final_rewards

torch.set_num_threads(1)
EXACT = "kl_gradient_bias_exact"


def _policy() -> tuple[Tensor, Tensor, Tensor]:
    """theta, log pi, log pi_ref over four actions."""
    theta = table(EXACT, "theta").requires_grad_()
    return theta, theta.log_softmax(-1), table(EXACT, "ref_logits").log_softmax(-1)


def _inputs(case: str) -> dict[str, Tensor]:
    return {
        name: torch.tensor(value, dtype=torch.float64)
        for name, value in CASES[case]["inputs"].items()
    }


def _grad(loss: Tensor, of: Tensor) -> Tensor:
    return torch.autograd.grad(loss, of)[0]


@pytest.mark.parametrize("name", sorted(KL))
def test_golden_values(name: str) -> None:
    mask, published = table("kl_estimators", "mask"), name.removesuffix("+")
    value = KL[name](table("kl_estimators", "logp"), table("kl_estimators", "ref_logp")) * mask
    close(value, table("kl_estimators", published, "expected"))
    close(value.sum() / mask.sum(), table("kl_estimators", f"mean_{published}", "expected"))


@pytest.mark.parametrize(("name", "expected"), [("k3", "grad_k3"), ("k3+", "k1"), ("k2", "k1")])
def test_golden_gradients(name: str, expected: str) -> None:
    """d k2 / d logp is r, which is k1; k3+ has it too."""
    logp = table("kl_estimators", "logp").requires_grad_()
    close(
        _grad(KL[name](logp, table("kl_estimators", "ref_logp")).sum(), logp),
        table("kl_estimators", expected, "expected"),
    )


@pytest.mark.parametrize(
    ("case", "kl"),
    [
        ("grpo_full_with_k3", lambda logp, old, ref: k3(logp, ref)),
        ("grpo_unbiased_kl_v32", unbiased),
    ],
)
def test_golden_grpo_with_kl(case: str, kl: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
    i, p, expected = _inputs(case), CASES[case]["params"], CASES[case]["expected"]
    mask = i["mask"].bool()
    for theirs, ours in OURS.items():
        logp = i["logp"].clone().requires_grad_()
        surrogate = clipped_surrogate(
            logp, i["old_logp"], spread(i["advantages"], mask), p["eps"], p["eps"]
        )
        per_token = surrogate.loss + p["beta"] * kl(logp, i["old_logp"], i["ref_logp"])
        close(per_token * mask, torch.tensor(expected["per_token_loss"]))
        weights = AGGREGATIONS[ours](
            mask, torch.arange(len(mask)), p["seq_mean_token_sum_norm_constant"]
        )
        loss = (weights * per_token).sum()
        close(loss, torch.tensor(expected[f"loss_{theirs}"]))
        if f"grad_logp_{theirs}" in expected:
            close(_grad(loss, logp), torch.tensor(expected[f"grad_logp_{theirs}"]))


def test_golden_k1_in_the_reward() -> None:
    case = "reward_kl_shaping_returns"
    i, expected = _inputs(case), CASES[case]["expected"]
    mask = i["mask"].bool()
    kl = torch.where(mask, k1(i["old_logp"], i["ref_logp"]), 0.0)
    rewards = final_rewards(i["score"].tolist(), mask).double() - CASES[case]["params"]["beta"] * kl
    close(rewards, torch.tensor(expected["token_rewards"]))
    close(rewards.flip(-1).cumsum(-1).flip(-1) * mask, torch.tensor(expected["returns"]))


def test_exact_expectations() -> None:
    """E[k1] = E[k3] = KL(pi || ref); k2 is biased."""
    _, logp, ref = _policy()
    pi, kl = logp.exp(), table(EXACT, "KL_pi_ref", "expected")
    for name in ("k1", "k3", "k3+"):
        close((pi * KL[name](logp, ref)).sum(), kl)
    assert abs(float((pi * k2(logp, ref)).sum().detach() - kl)) > 1e-3


def test_monte_carlo_means() -> None:
    """Over 400,000 samples k1 and k3 come within four standard errors of the exact KL, and k3 with
    the smaller one; k2 misses by more than ten.
    """
    logp, ref = (t.detach() for t in _policy()[1:])
    exact = float((logp.exp() * (logp - ref)).sum())
    actions = torch.multinomial(
        logp.exp(), 400_000, replacement=True, generator=torch.Generator().manual_seed(0)
    )
    off, error = {}, {}
    for name in ("k1", "k2", "k3"):
        sample = KL[name](logp[actions], ref[actions])
        error[name] = float(sample.std()) / math.sqrt(len(sample))
        off[name] = abs(float(sample.mean()) - exact) / error[name]
    assert off["k1"] < 4 and off["k3"] < 4 and off["k2"] > 10
    assert error["k3"] < error["k1"]


def test_swapped_policy_and_reference_change_the_kl() -> None:
    """The sign test: with policy and reference exchanged E[k1] is negative and E[k3] is
    not the KL.
    """
    logp, ref = (t.detach() for t in _policy()[1:])
    pi, kl = logp.exp(), float(table(EXACT, "KL_pi_ref", "expected"))
    assert float((pi * k1(ref, logp)).sum()) == pytest.approx(-kl, abs=1e-6)
    for name in ("k3", "k3+"):
        assert abs(float((pi * KL[name](ref, logp)).sum()) - kl) > 1e-3
    # And by hand, for one token twice as likely under the policy: r = log 2.
    twice, once = torch.tensor([[0.5]]).log(), torch.tensor([[0.25]]).log()
    assert float(k1(twice, once)) == pytest.approx(0.693147, abs=1e-6)
    assert float(k2(twice, once)) == pytest.approx(0.240227, abs=1e-6)
    assert float(k3(twice, once)) == pytest.approx(0.5 + 0.693147 - 1, abs=1e-6)
    assert float(unbiased(twice, once, once)) == pytest.approx(2 * (0.5 + 0.693147 - 1), abs=1e-6)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("k1", "E_grad_k1_loss"),
        ("k2", "E_grad_k2_loss"),
        ("k3", "E_grad_k3_loss"),
        ("k3+", "grad_reverse"),
    ],
)
def test_exact_gradients_as_a_loss_term(name: str, expected: str) -> None:
    """Sampled from pi and differentiated through logp: k1 gives nothing, k2 and k3+ reverse KL, k3
    forward KL.
    """
    theta, logp, ref = _policy()
    close(
        _grad((logp.detach().exp() * KL[name](logp, ref)).sum(), theta),
        table(EXACT, expected, "expected"),
    )


def test_the_published_gradients_are_those_of_the_two_kls() -> None:
    """The file's grad_reverse and grad_forward against autograd through the KLs themselves."""
    theta, logp, ref = _policy()
    close(_grad((logp.exp() * (logp - ref)).sum(), theta), table(EXACT, "grad_reverse", "expected"))
    theta, logp, ref = _policy()
    close(_grad((ref.exp() * (ref - logp)).sum(), theta), table(EXACT, "grad_forward", "expected"))


def test_exact_gradient_of_k1_as_a_reward() -> None:
    theta, logp, ref = _policy()
    gradient = _grad((logp.detach().exp() * k1(logp, ref).detach() * logp).sum(), theta)
    close(gradient, table(EXACT, "E_score_times_k1", "expected"))
    close(gradient, table(EXACT, "grad_reverse", "expected"))


@pytest.mark.parametrize("behaviour", [None, [0.4, 0.3, 0.2, 0.1]])
def test_the_ratio_restores_the_gradient_of_reverse_kl(behaviour: list[float] | None) -> None:
    """E over the sampler of grad(r k3) is grad KL(pi || ref), on-policy and, since r is an
    importance weight, for any other sampler.
    """
    theta, logp, ref = _policy()
    sampler = (
        logp.detach() if behaviour is None else torch.tensor(behaviour, dtype=torch.float64).log()
    )
    loss = (sampler.exp() * unbiased(logp, sampler, ref)).sum()
    close(loss, table(EXACT, "KL_pi_ref", "expected"))
    close(_grad(loss, theta), table(EXACT, "E_grad_ratio_times_k3", "expected"))


@given(st.floats(-200, 0, width=32), st.floats(-200, 0, width=32))
@settings(deadline=None)
def test_k3_is_never_negative_and_always_finite(logp: float, ref: float) -> None:
    for estimator in (k3, k3_plus):
        p = torch.tensor([[logp]], requires_grad=True)
        value = estimator(p, torch.tensor([[ref]]))
        assert float(value.detach()) >= -1e-6 and bool(value.isfinite())
        assert bool(_grad(value.sum(), p).isfinite())


@given(st.floats(-200, 0, width=32), st.floats(-200, 0, width=32), st.floats(-200, 0, width=32))
@settings(deadline=None)
def test_unbiased_stays_finite(logp: float, old: float, ref: float) -> None:
    p = torch.tensor([[logp]], requires_grad=True)
    value = unbiased(p, torch.tensor([[old]]), torch.tensor([[ref]]))
    assert bool(value.isfinite()) and bool(_grad(value.sum(), p).isfinite())


@pytest.mark.parametrize("name", sorted(KL))
def test_equal_policies_cost_nothing(name: str) -> None:
    same = torch.tensor([[-0.3, -7.0]])
    assert KL[name](same, same).tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("name", sorted(KL))
def test_shapes_that_would_broadcast_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="one shape"):
        KL[name](torch.zeros(2, 3), torch.zeros(3))
    with pytest.raises(ValueError, match="one shape"):
        unbiased(torch.zeros(2, 3), torch.zeros(2, 1), torch.zeros(2, 3))


def test_golden_adaptive_beta() -> None:
    case = CASES["kl_controller_adaptive"]
    beta = AdaptiveBeta(case["params"]["init"], case["params"]["target"], case["params"]["horizon"])
    for kl, expected in zip(case["inputs"]["kl"], case["expected"]["beta"], strict=True):
        beta.update(kl, case["inputs"]["n_steps"])
        assert beta.beta == pytest.approx(expected, abs=1e-6)


def test_adaptive_beta_brings_the_kl_to_its_target() -> None:
    """A policy whose KL is 1 / beta: whatever beta starts at, the KL ends at the target."""
    for start in (0.01, 10.0):
        beta = AdaptiveBeta(start, target=2.0, horizon=100)
        for _ in range(300):
            beta.update(1 / beta.beta, 50)
        assert 1 / beta.beta == pytest.approx(2.0, rel=1e-3)


def test_adaptive_beta_never_turns_negative() -> None:
    """Counted in tokens, one batch is many horizons: still one step of 20 %."""
    beta = AdaptiveBeta(0.1, target=1.0, horizon=10_000)
    beta.update(-3.0, 1_000_000)
    assert beta.beta == pytest.approx(0.08)


@pytest.mark.parametrize(
    "bad", [dict(beta=0.0), dict(target=0.0), dict(horizon=-1.0), dict(beta=math.nan)]
)
def test_adaptive_beta_refuses(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="positive"):
        AdaptiveBeta(**{"beta": 0.1, "target": 1.0, "horizon": 10_000.0, **bad})
    with pytest.raises(ValueError, match="finite"):
        AdaptiveBeta(0.1, 1.0, 10_000).update(math.nan, 1)
