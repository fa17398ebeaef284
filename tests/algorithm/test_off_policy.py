"""Off-policy corrections: golden weights, losses and gradients, the on-policy limit, and
unbiasedness where the sampler can be enumerated.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from golden import AGGREGATIONS as OURS
from golden import ALGORITHM_CASES as CASES
from golden import close, spread
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sixfold.algorithm.aggregation import AGGREGATIONS
from sixfold.algorithm.losses import clipped_surrogate, policy_gradient
from sixfold.algorithm.off_policy import (
    CORRECTIONS,
    chi2,
    effective_sample_size,
    geometric_mask,
    masked_sequence,
    masked_token,
    negative_sequence_mask,
    token_ratio,
    truncated_sequence,
    truncated_token,
)

torch.set_num_threads(1)
Params = dict[str, Any]

PUBLISHED: dict[str, Callable[[Tensor, Tensor, Params], Tensor]] = {
    "tis_token": lambda log_rho, mask, p: truncated_token(log_rho, mask, p["C"]),
    "tis_sequence": lambda log_rho, mask, p: truncated_sequence(log_rho, mask, p["C"]),
    "icepop_token_mask": lambda log_rho, mask, p: masked_token(
        log_rho, mask, p["alpha"], p["beta"]
    ),
    "mis_sequence_mask": lambda log_rho, mask, p: masked_sequence(
        log_rho, mask, p["Cmin"], p["Cmax"]
    ),
    "geo_sequence_mask": lambda log_rho, mask, p: geometric_mask(log_rho, mask, p["lo"], p["hi"]),
    "decoupled_ppo": lambda log_rho, mask, p: token_ratio(log_rho, mask, p["w_cap"]),
}
BANDS: dict[str, tuple[float | None, float]] = {name: (0.5, 2.0) for name in CORRECTIONS} | {
    "geometric": (0.9, 1.1),
    "masked-sequence": (None, 2.0),
}


def _inputs(case: str) -> dict[str, Tensor]:
    return {
        name: torch.tensor(value, dtype=torch.float64)
        for name, value in CASES[case]["inputs"].items()
    }


def _expected(case: str, name: str) -> Tensor:
    return torch.tensor(CASES[case]["expected"][name], dtype=torch.float64)


def _tables(seed: int, rows: int = 6, width: int = 8) -> tuple[Tensor, Tensor]:
    """log_rho and mask: random, some rows short, one empty."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, width + 1, (rows,), generator=g)
    lengths[0] = 0
    return (
        torch.randn(rows, width, generator=g).double() * 0.5,
        torch.arange(width) < lengths[:, None],
    )


@pytest.mark.parametrize("case", sorted(PUBLISHED))
def test_golden_weights_losses_and_gradients(case: str) -> None:
    i, p = _inputs(case), CASES[case]["params"]
    mask = i["mask"].bool()
    weights = PUBLISHED[case](i["old_logp"] - i["rollout_logp"], mask, p)
    if "weights" in CASES[case]["expected"]:
        close(weights * mask, _expected(case, "weights"))
    if "keep" in CASES[case]["expected"]:
        assert [bool(row) for row in (weights * mask).any(-1)] == CASES[case]["expected"]["keep"]
    for theirs, ours in OURS.items():
        logp = i["logp"].clone().requires_grad_()
        per_token = (
            weights
            * clipped_surrogate(
                logp, i["old_logp"], spread(i["advantages"], mask), p["eps"], p["eps"]
            ).loss
        )
        close(per_token * mask, _expected(case, "per_token_loss"))
        loss = (
            AGGREGATIONS[ours](mask, torch.arange(len(mask)), p["seq_mean_token_sum_norm_constant"])
            * per_token
        ).sum()
        close(loss, _expected(case, f"loss_{theirs}"))
        if f"grad_logp_{theirs}" in CASES[case]["expected"]:
            close(torch.autograd.grad(loss, logp)[0], _expected(case, f"grad_logp_{theirs}"))


def test_golden_negative_sequence_mask() -> None:
    """The file's old policy is the sampler, as the paper's is. Its mean_kl is what delta is held
    against: just above it a bad row stays.
    """
    i, case = _inputs("offpolicy_sequence_mask"), CASES["offpolicy_sequence_mask"]
    mask, bad = i["mask"].bool(), -i["mask"]
    keep = negative_sequence_mask(
        i["logp"], i["rollout_logp"], spread(i["advantages"], mask), mask, case["params"]["delta"]
    )
    assert keep.tolist() == case["expected"]["keep"]
    for row, kl in enumerate(case["expected"]["mean_kl"]):
        assert bool(negative_sequence_mask(i["logp"], i["rollout_logp"], bad, mask, kl + 1e-6)[row])
        assert not bool(
            negative_sequence_mask(i["logp"], i["rollout_logp"], bad, mask, kl - 1e-6)[row]
        )


def test_golden_effective_sample_size_and_chi2() -> None:
    i = _inputs("mismatch_metrics")
    mask = i["mask"].bool()
    weights = token_ratio(i["old_logp"] - i["rollout_logp"], mask)
    close(effective_sample_size(weights, mask), _expected("mismatch_metrics", "ess_frac"))
    close(chi2(weights, mask), _expected("mismatch_metrics", "chi2_token"))


@pytest.mark.parametrize("name", sorted(CORRECTIONS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_on_policy_every_weight_is_exactly_one(name: str, dtype: torch.dtype) -> None:
    """So what is left is plain policy gradient, to the bit."""
    _, mask = _tables(3)
    log_rho = torch.where(mask, torch.zeros(mask.shape, dtype=dtype), torch.nan)
    weights = CORRECTIONS[name](log_rho, mask, *BANDS[name])
    assert weights.dtype == dtype and torch.equal(weights, torch.ones_like(weights))
    logp, advantages = (
        torch.randn(mask.shape, dtype=dtype, requires_grad=True),
        torch.randn(mask.shape, dtype=dtype),
    )
    corrected, plain = (
        torch.autograd.grad((w * policy_gradient(logp, advantages)).sum(), logp)[0]
        for w in (weights, 1.0)
    )
    assert torch.equal(corrected, plain)
    assert float(effective_sample_size(weights, mask)) == 1.0 and float(chi2(weights, mask)) == 0.0


def test_raw_ratios_make_the_samplers_mean_the_policys() -> None:
    """E_sampler[rho f] = E_policy[f], enumerated: for tokens, and for two-token sequences by the
    product. The other way round it is not.
    """
    g = torch.Generator().manual_seed(0)
    policy, sampler = torch.randn(2, 5, generator=g).double().log_softmax(-1)
    f, mask = torch.randn(5, generator=g).double(), torch.ones(5, 1, dtype=torch.bool)
    rho = token_ratio((policy - sampler)[:, None], mask)[:, 0]
    close((sampler.exp() * rho * f).sum(), (policy.exp() * f).sum())
    wrong = token_ratio((sampler - policy)[:, None], mask)[:, 0]
    assert abs(float((sampler.exp() * wrong * f).sum() - (policy.exp() * f).sum())) > 0.05
    pairs = torch.cartesian_prod(torch.arange(5), torch.arange(5))
    sequences = torch.ones(25, 2, dtype=torch.bool)
    value = torch.randn(25, generator=g).double()
    weight = masked_sequence(policy[pairs] - sampler[pairs], sequences, None, 1e6)[:, 0]
    close(
        (sampler[pairs].sum(-1).exp() * weight * value).sum(),
        (policy[pairs].sum(-1).exp() * value).sum(),
    )


def test_chi2_of_raw_ratios_is_the_divergence() -> None:
    """sum pi^2 / mu - 1, with tokens in the sampler's proportions: mu = 1/2, 1/4, 1/4."""
    mu, pi = (
        torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64),
        torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64),
    )
    drawn = torch.tensor([[0, 0, 1, 2]])
    weights = (pi / mu)[drawn]
    mask = torch.ones(1, 4, dtype=torch.bool)
    close(chi2(weights, mask), (pi**2 / mu).sum() - 1)
    # For weights of mean 1 the two measures are one.
    close(effective_sample_size(weights, mask), 1 / (1 + chi2(weights, mask)))


@given(
    st.integers(0, 10_000),
    st.sampled_from([torch.nan, torch.inf, -torch.inf, 1e30]),
    st.sampled_from(sorted(CORRECTIONS)),
)
@settings(max_examples=80, deadline=None)
def test_padding_junk_and_the_order_of_rows_change_nothing(
    seed: int, junk: float, name: str
) -> None:
    log_rho, mask = _tables(seed)
    order = torch.randperm(len(mask), generator=torch.Generator().manual_seed(seed))
    dirty = torch.cat(
        [torch.where(mask, log_rho, junk), torch.full((len(mask), 2), junk, dtype=torch.float64)],
        -1,
    )[order]
    wide = torch.cat([mask, torch.zeros(len(mask), 2, dtype=torch.bool)], -1)[order]
    clean, found = (
        CORRECTIONS[name](log_rho, mask, *BANDS[name]),
        CORRECTIONS[name](dirty, wide, *BANDS[name]),
    )
    close(found[:, :-2], clean[order])
    assert bool((found[~wide] == 1).all())
    for measure in (effective_sample_size, chi2):
        close(measure(torch.where(wide, found, junk), wide), measure(clean, mask))


@pytest.mark.slow
@given(st.integers(0, 10_000), st.floats(0.05, 1), st.floats(1, 6))
@settings(max_examples=80, deadline=None)
def test_bounds_are_respected(seed: int, low: float, high: float) -> None:
    """Every weight is 0, within its band, or, of truncated ones, at the cap; and equal to the slow
    version.
    """
    log_rho, mask = _tables(seed)
    for row, sampled in zip(range(len(mask)), mask.sum(-1).tolist(), strict=True):
        rho = [math.exp(x) for x in log_rho[row, :sampled].tolist()]
        whole, mean = math.prod(rho), math.prod(rho) ** (1 / max(sampled, 1))
        slow = {
            "truncated": [min(r, high) for r in rho],
            "truncated-sequence": [min(whole, high)] * sampled,
            "masked": [r if low <= r <= high else 0.0 for r in rho],
            "masked-sequence": [whole if low <= whole <= high else 0.0] * sampled,
            "geometric": [r if low <= mean <= high else 0.0 for r in rho],
            "decoupled": [r if r <= high else 0.0 for r in rho],
        }
        assert slow.keys() == CORRECTIONS.keys()
        for name, expected in slow.items():
            assert CORRECTIONS[name](log_rho, mask, low, high)[
                row, :sampled
            ].tolist() == pytest.approx(expected, abs=1e-9), name


def test_no_bound_is_no_bound() -> None:
    log_rho, mask = torch.tensor([[-3.0, -1.0, 2.0]]), torch.ones(1, 3, dtype=torch.bool)
    assert masked_sequence(log_rho, mask, None, 3.0).tolist() == [
        [pytest.approx(math.exp(-2.0))] * 3
    ]
    assert masked_sequence(log_rho, mask, 0.5, 3.0).tolist() == [[0.0] * 3]
    assert token_ratio(log_rho, mask).tolist() == [
        [pytest.approx(math.exp(x)) for x in (-3.0, -1.0, 2.0)]
    ]
    assert token_ratio(log_rho, mask, 5.0).tolist() == [
        [pytest.approx(math.exp(-3.0)), pytest.approx(math.exp(-1.0)), 0.0]
    ]


@pytest.mark.parametrize("name", sorted(CORRECTIONS))
def test_weights_are_constants_and_finite(name: str) -> None:
    """No gradient flows into a weight; long rows far from the policy do not overflow."""
    log_rho = torch.tensor([[200.0] * 50, [-200.0] * 50], requires_grad=True)
    low = None if name == "masked-sequence" else 0.0
    weights = CORRECTIONS[name](log_rho, torch.ones(2, 50, dtype=torch.bool), low, 1e30)
    assert not weights.requires_grad and bool(weights.isfinite().all())
    assert float(weights.max()) == pytest.approx(math.exp(20.0))


@pytest.mark.parametrize("name", sorted(CORRECTIONS))
def test_a_ratio_that_is_nan_is_not_dropped_in_silence(name: str) -> None:
    weights = CORRECTIONS[name](
        torch.tensor([[torch.nan, 0.0]]), torch.ones(1, 2, dtype=torch.bool), *BANDS[name]
    )
    assert bool(weights[0, 0].isnan())


def test_only_negative_rows_are_dropped_and_junk_is_ignored() -> None:
    old = torch.zeros(4, 3)
    logp = torch.tensor([[-1.0, -1.0, torch.nan]] * 2 + [[1.0, 1.0, torch.nan]] * 2)
    advantages = torch.tensor([[-1.0, -1.0, torch.inf], [1.0, 1.0, -torch.inf]] * 2)
    mask = torch.tensor([[True, True, False]] * 4)
    assert negative_sequence_mask(logp, old, advantages, mask, 0.5).tolist() == [
        False,
        True,
        True,
        True,
    ]
    assert (
        negative_sequence_mask(logp, old, advantages, torch.zeros_like(mask), 0.5).tolist()
        == [True] * 4
    )


def test_measures_without_tokens_and_without_weight() -> None:
    mask = torch.ones(1, 3, dtype=torch.bool)
    assert math.isnan(effective_sample_size(torch.ones(1, 3), ~mask)) and math.isnan(
        chi2(torch.ones(1, 3), ~mask)
    )
    assert float(effective_sample_size(torch.zeros(1, 3), mask)) == 0.0
    assert float(effective_sample_size(torch.tensor([[1.0, 0.0, 0.0]]), mask)) == pytest.approx(
        1 / 3
    )


def test_refusals() -> None:
    table, mask = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)
    for name, correction in CORRECTIONS.items():
        with pytest.raises(ValueError, match="one shape"):
            correction(table, mask[:, :2], 0.5, 2.0)
        with pytest.raises(ValueError, match="one shape"):
            correction(table, mask.float(), 0.5, 2.0)
        with pytest.raises(ValueError, match="on-policy"):
            correction(table, mask, 0.5, 0.9)
        if name in ("masked", "masked-sequence", "geometric"):
            with pytest.raises(ValueError, match="on-policy"):
                correction(table, mask, 1.1, 2.0)
        if name != "decoupled":
            with pytest.raises(ValueError, match="high bound"):
                correction(table, mask, 0.5, None)
        if name in ("masked", "geometric"):
            with pytest.raises(ValueError, match="low bound"):
                correction(table, mask, None, 2.0)
    with pytest.raises(ValueError, match="one shape"):
        negative_sequence_mask(table, table, table[0], mask, 0.5)
