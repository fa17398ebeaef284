"""Entropy: golden values, exact expectations on policies that can be enumerated, and which tokens
each rule picks.
"""

from __future__ import annotations

import math

import pytest
import torch
from golden import ALGORITHM_CASES as CASES
from golden import close, spread
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sixfold.algorithm.entropy import (
    AdaptiveEntropy,
    clip_cov_tokens,
    covariance,
    kl_cov_tokens,
    sampled_entropy,
    top_entropy_tokens,
)
from sixfold.algorithm.losses import clipped_surrogate
from sixfold.trainer.logprobs import entropy_of

torch.set_num_threads(1)


def entropy_of_logits(logits: Tensor) -> Tensor:
    """Entropy of softmax(logits); [..., V] -> [...]."""
    return entropy_of(logits.log_softmax(-1))


def _table(case: str, name: str, side: str = "inputs") -> Tensor:
    return torch.tensor(CASES[case][side][name], dtype=torch.float64)


def _cells(chosen: Tensor) -> list[list[int]]:
    return chosen.nonzero().tolist()


def _tables(seed: int, rows: int = 6, width: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    """advantages, logp, mask: random, some rows short, one empty."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, width + 1, (rows,), generator=g)
    lengths[0] = 0
    mask = torch.arange(width) < lengths[:, None]
    return (
        torch.randn(rows, width, generator=g).double(),
        -torch.rand(rows, width, generator=g).double() * 4,
        mask,
    )


def test_golden_entropy_of_logits() -> None:
    logits = _table("entropy_from_logits", "logits")
    close(entropy_of_logits(logits), _table("entropy_from_logits", "H", "expected"))
    close(entropy_of_logits(logits).mean(), _table("entropy_from_logits", "mean", "expected"))
    close(entropy_of_logits(logits / 2), _table("entropy_from_logits", "temp2_H", "expected"))


def test_gradient_of_the_entropy() -> None:
    """dH/dz_i = -p_i (log p_i + H)."""
    logits = _table("entropy_from_logits", "logits").requires_grad_()
    entropy = entropy_of_logits(logits)
    entropy.sum().backward()
    logp = logits.detach().log_softmax(-1)
    assert logits.grad is not None
    close(logits.grad, -logp.exp() * (logp + entropy.detach()[:, None]))


def test_excluded_tokens_add_nothing() -> None:
    """A masked vocabulary entry leaves the entropy of the others, and no NaN in the gradient."""
    logits = torch.tensor([[0.0, 0.0, -torch.inf]], requires_grad=True)
    entropy = entropy_of_logits(logits)
    entropy.sum().backward()
    assert float(entropy.detach()) == pytest.approx(math.log(2))
    assert logits.grad is not None and logits.grad.tolist() == [
        [pytest.approx(0.0, abs=1e-7)] * 2 + [0.0]
    ]


def test_sampled_entropy_is_unbiased_on_an_enumerable_policy() -> None:
    """Two tokens of three, the second conditioned on the first: the mean over all nine answers is
    the exact entropy of a token.
    """
    first = torch.tensor([0.3, -1.0, 0.7], dtype=torch.float64).log_softmax(-1)
    second = torch.tensor(
        [[1.0, 0.0, -2.0], [0.0, 0.0, 0.0], [3.0, 0.5, 0.1]], dtype=torch.float64
    ).log_softmax(-1)
    exact = (entropy_of_logits(first) + (first.exp() * entropy_of_logits(second)).sum()) / 2
    mask, mean = torch.tensor([[True, True, False]]), torch.tensor(0.0, dtype=torch.float64)
    for a in range(3):
        for b in range(3):
            logp = torch.stack([first[a], second[a, b], torch.tensor(torch.nan)])[None]
            mean = mean + (first[a] + second[a, b]).exp() * sampled_entropy(logp, mask)
    close(mean, exact)


def test_sampled_entropy_by_monte_carlo() -> None:
    logp = torch.tensor([2.0, 0.0, -1.0, 0.5], dtype=torch.float64).log_softmax(-1)
    actions = torch.multinomial(
        logp.exp(), 200_000, replacement=True, generator=torch.Generator().manual_seed(1)
    )
    sample = logp[actions].reshape(1000, 200)
    error = float(sample.std()) / math.sqrt(200_000)
    assert (
        abs(
            float(
                sampled_entropy(sample, torch.ones(1000, 200, dtype=torch.bool))
                - entropy_of_logits(logp)
            )
        )
        < 4 * error
    )


def test_sampled_entropy_weighs_tokens_and_is_a_constant() -> None:
    logp = torch.tensor([[-1.0, -2.0, -3.0], [-10.0, torch.nan, torch.inf]], requires_grad=True)
    mask = torch.tensor([[True, True, True], [True, False, False]])
    entropy = sampled_entropy(logp, mask)
    assert float(entropy) == 4.0 and not entropy.requires_grad
    assert float(sampled_entropy(logp, torch.zeros_like(mask))) == 0.0


def test_golden_adaptive_entropy() -> None:
    case = CASES["adaptive_entropy"]
    p, measured = case["params"], case["inputs"]["entropy_per_step"]
    bonus = AdaptiveEntropy(p["init"], p["target"], p["delta"], p["max"])
    applied = [0.0]
    for entropy, expected in zip(measured, case["expected"]["coef_after"], strict=True):
        bonus.update(entropy)
        assert bonus.coefficient == pytest.approx(expected, abs=1e-9)
        applied.append(bonus.applied(entropy))
    # The file applies in step k what step k - 1 measured.
    assert applied[:-1] == pytest.approx(
        case["expected"]["coef_applied_next_step_semantics"], abs=1e-9
    )


def test_adaptive_entropy_at_the_target_and_at_its_bounds() -> None:
    """By hand: at the target it applies and grows; it never passes `highest`, nor 0."""
    bonus = AdaptiveEntropy(0.0, target=0.5, delta=0.2, highest=0.3)
    bonus.update(0.5)
    assert (bonus.coefficient, bonus.applied(0.5), bonus.applied(0.500001)) == (0.2, 0.2, 0.0)
    bonus.update(0.1)
    assert bonus.coefficient == 0.3
    for _ in range(3):
        bonus.update(0.9)
    assert bonus.coefficient == 0.0
    for bad in (dict(coefficient=-0.1), dict(coefficient=0.4), dict(delta=0.0)):
        with pytest.raises(ValueError, match="coefficient must be in"):
            AdaptiveEntropy(
                **{"coefficient": 0.0, "target": 0.5, "delta": 0.1, "highest": 0.3, **bad}
            )
    with pytest.raises(ValueError, match="finite"):
        bonus.update(math.nan)


def test_golden_clip_cov() -> None:
    case, p = "clip_cov", CASES["clip_cov"]["params"]
    mask = _table(case, "mask").bool()
    advantages, logp = spread(_table(case, "advantages"), mask), _table(case, "logp")
    close(covariance(advantages, logp, mask), _table(case, "cov", "expected"))
    clipped = clipped_surrogate(
        logp.requires_grad_(), _table(case, "old_logp"), advantages, p["eps"], p["eps"]
    )
    chosen = (
        clip_cov_tokens(advantages, logp, mask, p["ratio"], p["lb"], p["ub"], seed=0)
        & ~clipped.active
    )
    assert _cells(chosen) == CASES[case]["expected"]["candidates"]
    loss = torch.where(mask & ~chosen, clipped.loss, 0.0).sum() / mask.sum()
    close(loss.detach(), _table(case, "loss_token_mean_if_all_candidates_clipped", "expected"))


def test_golden_kl_cov() -> None:
    case, p = "kl_cov", CASES["kl_cov"]["params"]
    mask = _table(case, "mask").bool()
    advantages, logp, old = (
        spread(_table(case, "advantages"), mask),
        _table(case, "logp"),
        _table(case, "old_logp"),
    )
    chosen = kl_cov_tokens(advantages, logp, mask, p["ratio"])
    assert _cells(chosen) == CASES[case]["expected"]["selected"]
    per_token = -(logp - old).exp() * advantages + torch.where(
        chosen, p["beta"] * (logp - old).abs(), 0.0
    )
    close(
        torch.where(mask, per_token, 0.0).sum() / mask.sum(),
        _table(case, "loss_token_mean", "expected"),
    )


def test_golden_top_entropy() -> None:
    case = "top_entropy_mask"
    entropy, mask = _table(case, "entropy"), _table(case, "mask").bool()
    kept = top_entropy_tokens(entropy, mask, 1 - CASES[case]["params"]["rho"])
    assert kept.tolist() == CASES[case]["expected"]["keep"]
    assert torch.equal(kept, mask & (entropy >= CASES[case]["expected"]["threshold"]))


@given(st.integers(0, 10_000), st.integers(0, 100).map(lambda percent: percent / 100))
@settings(max_examples=50, deadline=None)
def test_top_entropy_is_the_quantile(seed: int, quantile: float) -> None:
    _, entropy, mask = _tables(seed)
    expected = mask & (entropy >= torch.quantile(entropy[mask], quantile) - 1e-12)
    assert torch.equal(top_entropy_tokens(entropy, mask, quantile), expected)


def test_clip_cov_is_strict_and_stops_at_its_share() -> None:
    """By hand: log-probs centred on 0 and A = +-1, so the covariances are known."""
    logp = torch.tensor([[4.0, 2.0, 1.0, 0.0, -2.0, -5.0]])
    advantages = torch.tensor([[1.0, 1.0, 1.0, -1.0, -1.0, -1.0]])
    mask = torch.ones(1, 6, dtype=torch.bool)
    assert covariance(advantages, logp, mask).tolist() == [[4.0, 2.0, 1.0, 0.0, 2.0, 5.0]]

    def chosen(fraction: float, seed: int = 0) -> list[int]:
        found = clip_cov_tokens(advantages, logp, mask, fraction, 1.0, 5.0, seed)
        return [column for _, column in _cells(found)]

    assert chosen(1.0) == [0, 1, 4]
    assert all(len(chosen(2 / 6, seed=seed)) == 2 for seed in range(10))
    assert chosen(0.16) == []
    picks = {tuple(chosen(1 / 6, seed=seed)) for seed in range(40)}
    assert picks == {(0,), (1,), (4,)}
    assert chosen(1 / 6, seed=7) == chosen(1 / 6, seed=7)


def test_kl_cov_takes_the_largest() -> None:
    logp = torch.tensor([[4.0, 2.0, 1.0, 0.0, -2.0, -5.0]])
    advantages = torch.tensor([[1.0, 1.0, 1.0, -1.0, -1.0, -1.0]])
    mask = torch.ones(1, 6, dtype=torch.bool)
    assert [_cells(kl_cov_tokens(advantages, logp, mask, f)) for f in (0.1, 2 / 6)] == [
        [],
        [[0, 0], [0, 5]],
    ]


def test_a_share_is_counted_exactly() -> None:
    """0.29 of 100 tokens is 29 and the 0.55 quantile of 101 is the 55th, though the products of the
    floats are just below and just above.
    """
    advantages, logp = torch.randn(2, 10, 10, generator=torch.Generator().manual_seed(0))
    assert (
        int(kl_cov_tokens(advantages, logp, torch.ones(10, 10, dtype=torch.bool), 0.29).sum()) == 29
    )
    assert (
        int(
            top_entropy_tokens(
                torch.arange(101, dtype=torch.float64)[None],
                torch.ones(1, 101, dtype=torch.bool),
                0.55,
            ).sum()
        )
        == 46
    )


@pytest.mark.slow
@given(st.integers(0, 10_000), st.sampled_from([torch.nan, torch.inf, -torch.inf, 1e30]))
@settings(max_examples=50, deadline=None)
def test_selections_ignore_padding_junk_and_the_order_of_rows(seed: int, junk: float) -> None:
    advantages, logp, mask = _tables(seed)
    order = torch.randperm(len(mask), generator=torch.Generator().manual_seed(seed))

    def dirty(t: Tensor) -> Tensor:
        return torch.cat(
            [torch.where(mask, t, junk), torch.full((len(mask), 2), junk, dtype=t.dtype)], -1
        )[order]

    wide = torch.cat([mask, torch.zeros(len(mask), 2, dtype=torch.bool)], -1)[order]
    rules = {
        "clip-cov": lambda a, p, m: clip_cov_tokens(a, p, m, 0.1, -1.0, 5.0, seed),
        "kl-cov": lambda a, p, m: kl_cov_tokens(a, p, m, 0.2),
        "top-entropy": lambda a, p, m: top_entropy_tokens(p, m),
    }
    for name, rule in rules.items():
        clean = rule(advantages, logp, mask)
        found = rule(dirty(advantages), dirty(logp), wide)
        assert torch.equal(found[:, :-2], clean[order]) and not (found & ~wide).any(), name
    close(
        covariance(dirty(advantages), dirty(logp), wide)[:, :-2],
        covariance(advantages, logp, mask)[order],
    )


def test_nothing_sampled_selects_nothing() -> None:
    empty, table = torch.zeros(2, 3, dtype=torch.bool), torch.ones(2, 3)
    assert not covariance(table, table, empty).any()
    assert not clip_cov_tokens(table, table, empty, 1.0, -1.0, 1.0, 0).any()
    assert (
        not kl_cov_tokens(table, table, empty, 1.0).any()
        and not top_entropy_tokens(table, empty).any()
    )


def test_refusals() -> None:
    table, mask = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)
    for call in (
        lambda: covariance(table, table[:1], mask),
        lambda: sampled_entropy(table, mask.float()),
        lambda: top_entropy_tokens(table[0], mask[0]),
        lambda: clip_cov_tokens(table, table, mask[:1], 0.5, 1.0, 5.0, 0),
    ):
        with pytest.raises(ValueError, match="one shape"):
            call()
    with pytest.raises(ValueError, match="quantile"):
        top_entropy_tokens(table, mask, 1.5)
    with pytest.raises(ValueError, match="fraction"):
        kl_cov_tokens(table, table, mask, -0.1)
