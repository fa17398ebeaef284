"""Properties of every loss: on-policy it is REINFORCE, and nothing depends on padding, order or the
split into micro-batches.

Each loss is put beside a slow version of its formula in plain Python, which also gives the gradient
by central differences.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor

from sixfold.algorithm import losses, sequence_losses
from sixfold.algorithm.aggregation import AGGREGATIONS

torch.set_num_threads(1)

Row = list[float]
Slow = Callable[[Row, Row, Row, Row], Row]
"""One row's scored tokens: logp, old_logp, advantages, and logp where the gradient is stopped ->
loss of each token.
"""


@dataclass(frozen=True)
class Loss:
    """A loss at its paper's settings. fast: of (logp, old_logp, advantages, mask). factor: of a row
    of n tokens, its on-policy gradient over -A.
    """

    fast: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    slow: Slow
    factor: Callable[[int], float] = lambda n: 1.0
    by_row: bool = False
    aggregation: str = "token"


def _clip(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def _ppo(low: float, high: float, cap: float = math.inf) -> Slow:
    """PPO's cells spelt out; cap bounds the loss where A < 0."""

    def token(r: float, a: float) -> float:
        return -a * (min(r, 1 + high) if a > 0 else min(max(r, 1 - low), cap))

    return lambda logp, old, adv, at: [
        token(math.exp(x - y), a) for x, y, a in zip(logp, old, adv, strict=True)
    ]


def _mean(xs: Row) -> float:
    return sum(xs) / len(xs)


def _log_ratios(logp: Row, old: Row) -> Row:
    return [x - y for x, y in zip(logp, old, strict=True)]


def _gspo(low: float, high: float, scaled: bool = False) -> Slow:
    def rows(logp: Row, old: Row, adv: Row, at: Row) -> Row:
        s, a, n = math.exp(_mean(_log_ratios(logp, old))), _mean(adv), len(logp)
        return [-(n if scaled else 1) * min(s * a, _clip(s, 1 - low, 1 + high) * a)] * n

    return rows


def _gspo_token(low: float, high: float) -> Slow:
    def tokens(logp: Row, old: Row, adv: Row, at: Row) -> Row:
        s = math.exp(_mean(_log_ratios(at, old)))
        ratios = [s * math.exp(x - y) for x, y in zip(logp, at, strict=True)]
        return [
            -min(r * a, _clip(r, 1 - low, 1 + high) * a) for r, a in zip(ratios, adv, strict=True)
        ]

    return tokens


def _cispo(logp: Row, old: Row, adv: Row, at: Row) -> Row:
    return [
        -min(math.exp(z - y), 1.5) * a * x for x, y, a, z in zip(logp, old, adv, at, strict=True)
    ]


def _sapo(logp: Row, old: Row, adv: Row, at: Row) -> Row:
    def token(r: float, a: float) -> float:
        tau = 1.0 if a > 0 else 1.05
        return -a * 4 / tau / (1 + math.exp(-tau * (r - 1)))

    return [token(math.exp(x - y), a) for x, y, a in zip(logp, old, adv, strict=True)]


def _gmpo(logp: Row, old: Row, adv: Row, at: Row) -> Row:
    a = _mean(adv)
    kept = [(min if a > 0 else max)(x, _clip(x, -0.4, 0.4)) for x in _log_ratios(logp, old)]
    return [-a * math.exp(_mean(kept))] * len(logp)


def _kimi(logp: Row, old: Row, adv: Row, at: Row) -> Row:
    return [(_mean(adv) - 0.1 * sum(_log_ratios(logp, old))) ** 2] * len(logp)


def _vespo(logp: Row, old: Row, adv: Row, at: Row) -> Row:
    w = math.exp(sum(_log_ratios(at, old)))
    phi = [w**2 * math.exp(3 * (1 - w)) if a >= 0 else w**3 * math.exp(2 * (1 - w)) for a in adv]
    return [-f * a * x for f, a, x in zip(phi, adv, logp, strict=True)]


LOSSES: dict[str, Loss] = {
    "policy_gradient": Loss(
        lambda lp, old, a, m: losses.policy_gradient(lp, a),
        lambda lp, old, a, at: [-x * y for x, y in zip(lp, a, strict=True)],
    ),
    "ppo": Loss(
        lambda lp, old, a, m: losses.clipped_surrogate(lp, old, a, 0.2, 0.2).loss, _ppo(0.2, 0.2)
    ),
    "clip higher": Loss(
        lambda lp, old, a, m: losses.clipped_surrogate(lp, old, a, 0.2, 0.28).loss, _ppo(0.2, 0.28)
    ),
    "dual clip": Loss(
        lambda lp, old, a, m: losses.clipped_surrogate(lp, old, a, 0.2, 0.2, dual_clip=3.0).loss,
        _ppo(0.2, 0.2, 3.0),
    ),
    "cispo": Loss(lambda lp, old, a, m: losses.clipped_weight(lp, old, a, None, 0.5).loss, _cispo),
    "sapo": Loss(
        lambda lp, old, a, m: losses.soft_gate(lp, old, a, 1.0, 1.05).loss,
        _sapo,
        aggregation="sequence",
    ),
    "gspo": Loss(
        lambda lp, old, a, m: sequence_losses.sequence_surrogate(lp, old, a, m, 0.1, 0.2).loss,
        _gspo(0.1, 0.2),
        by_row=True,
        aggregation="sequence",
    ),
    "gspo-token": Loss(
        lambda lp, old, a, m: (
            sequence_losses.sequence_token_surrogate(lp, old, a, m, 0.1, 0.2).loss
        ),
        _gspo_token(0.1, 0.2),
        aggregation="sequence",
    ),
    "luspo": Loss(
        lambda lp, old, a, m: (
            sequence_losses.length_scaled_sequence_surrogate(lp, old, a, m, 0.1, 0.2).loss
        ),
        _gspo(0.1, 0.2, scaled=True),
        factor=float,
        by_row=True,
        aggregation="sequence",
    ),
    "gmpo": Loss(
        lambda lp, old, a, m: sequence_losses.geometric_surrogate(lp, old, a, m, 0.4, 0.4).loss,
        _gmpo,
        by_row=True,
        aggregation="sequence",
    ),
    "kimi": Loss(
        lambda lp, old, a, m: sequence_losses.mirror_descent(lp, old, a, m, 0.1).loss,
        _kimi,
        factor=lambda n: 2 * 0.1 * n,
        by_row=True,
        aggregation="sequence",
    ),
    "vespo": Loss(
        lambda lp, old, a, m: sequence_losses.power_weight(lp, old, a, m, 2, 3, 3, 2).loss, _vespo
    ),
}
WITH_MASK = ["gspo", "gspo-token", "luspo", "gmpo", "kimi", "vespo"]
every_loss = pytest.mark.parametrize("name", LOSSES)


@dataclass(frozen=True)
class Tables:
    """Arguments of a loss, [B, T] float64. Tokens that are not scored are zero."""

    logp: Tensor
    old_logp: Tensor
    advantages: Tensor
    mask: Tensor

    def map(self, change: Callable[[Tensor], Tensor]) -> Tables:
        return Tables(
            change(self.logp), change(self.old_logp), change(self.advantages), change(self.mask)
        )


def _floats(shape: tuple[int, int], low: float, high: float) -> st.SearchStrategy[Tensor]:
    return hnp.arrays(
        "float64", shape, elements=st.floats(low, high, width=32, allow_subnormal=False)
    ).map(torch.from_numpy)


@st.composite
def tables(draw: st.DrawFn, row_advantages: bool = False) -> Tables:
    """Some rows may be scored nowhere, and masks have holes, as tool outputs leave them."""
    shape = draw(st.tuples(st.integers(1, 4), st.integers(1, 5)))
    mask = torch.from_numpy(draw(hnp.arrays("bool", shape)))
    old = draw(_floats(shape, -4.0, -0.0625))
    advantages = draw(_floats((shape[0], 1 if row_advantages else shape[1]), -2.0, 2.0)).expand(
        shape
    )
    full = Tables(old + draw(_floats(shape, -1.5, 1.5)), old, advantages, mask)
    return Tables(
        *(torch.where(mask, t, 0.0) for t in (full.logp, full.old_logp, full.advantages)), mask
    )


def weights_of(name: str, mask: Tensor) -> Tensor:
    """Of the whole batch, two rows a group, horizon 7."""
    return AGGREGATIONS[name](mask, torch.arange(len(mask)) // 2, 7).double()


def value_and_gradient(loss: Loss, t: Tables, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The aggregated loss, and its gradient for logp."""
    logp = t.logp.clone().requires_grad_()
    value = torch.where(
        t.mask, weights * loss.fast(logp, t.old_logp, t.advantages, t.mask), 0.0
    ).sum()
    (grad,) = torch.autograd.grad(value, logp)
    return value.detach(), grad


def same(actual: Tensor, expected: Tensor) -> None:
    """Equal but for the order of float64 sums."""
    torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-13)


@pytest.mark.mostly_slow(1)
@every_loss
@settings(max_examples=10, deadline=None)
@given(t=tables(row_advantages=True))
def test_on_the_old_policy_it_is_reinforce(name: str, t: Tables) -> None:
    """Ratio 1: -A under the weights, times the method's factor (|o| of LUSPO, 2 tau |o| of Kimi, 1
    elsewhere), for every aggregation.
    """
    loss = LOSSES[name]
    factor = torch.tensor([loss.factor(int(n)) for n in t.mask.sum(-1)], dtype=torch.float64)[
        :, None
    ]
    for aggregation in AGGREGATIONS:
        weights = weights_of(aggregation, t.mask)
        _, grad = value_and_gradient(
            loss, Tables(t.old_logp, t.old_logp, t.advantages, t.mask), weights
        )
        same(grad, weights * -t.advantages * factor)


@pytest.mark.mostly_slow(1)
@every_loss
@settings(max_examples=10, deadline=None)
@given(t=tables(), columns=st.integers(1, 3), junk=st.sampled_from([99.0, -99.0]))
def test_padding_changes_nothing(name: str, t: Tables, columns: int, junk: float) -> None:
    for aggregation in AGGREGATIONS:
        value, grad = value_and_gradient(LOSSES[name], t, weights_of(aggregation, t.mask))
        padded = t.map(
            lambda x: torch.nn.functional.pad(
                x, (0, columns), value=0 if x.dtype == torch.bool else junk
            )
        )
        padded_value, padded_grad = value_and_gradient(
            LOSSES[name], padded, weights_of(aggregation, padded.mask)
        )
        same(padded_value, value)
        same(padded_grad, torch.nn.functional.pad(grad, (0, columns)))


@pytest.mark.mostly_slow(1)
@every_loss
@settings(max_examples=10, deadline=None)
@given(t=tables(), data=st.data())
def test_the_order_of_rows_changes_nothing(name: str, t: Tables, data: st.DataObject) -> None:
    order = torch.tensor(data.draw(st.permutations(range(len(t.mask)))))
    group = torch.arange(len(t.mask)) // 2
    for aggregation in AGGREGATIONS.values():
        value, grad = value_and_gradient(LOSSES[name], t, aggregation(t.mask, group, 7))
        shuffled = t.map(lambda x: x[order])
        shuffled_value, shuffled_grad = value_and_gradient(
            LOSSES[name], shuffled, aggregation(shuffled.mask, group[order], 7)
        )
        torch.testing.assert_close(
            shuffled_value, value, rtol=1e-6, atol=1e-6
        )  # the weights are float32
        torch.testing.assert_close(shuffled_grad, grad[order], rtol=1e-6, atol=1e-6)


@pytest.mark.mostly_slow(1)
@every_loss
@settings(max_examples=10, deadline=None)
@given(t=tables(), data=st.data())
def test_any_split_into_micro_batches_gives_the_same_gradient(
    name: str, t: Tables, data: st.DataObject
) -> None:
    """Rows fall into up to three micro-batches at will; the weights are the whole batch's."""
    rows = len(t.mask)
    where = torch.tensor(data.draw(st.lists(st.integers(0, 2), min_size=rows, max_size=rows)))
    for aggregation in AGGREGATIONS:
        weights = weights_of(aggregation, t.mask)
        value, grad = value_and_gradient(LOSSES[name], t, weights)
        parts, summed = torch.zeros_like(grad), torch.zeros_like(value)
        for part in where.unique():
            mine = where == part
            part_value, parts[mine] = value_and_gradient(
                LOSSES[name], t.map(lambda x, mine=mine: x[mine]), weights[mine]
            )
            summed += part_value
        same(summed, value)
        same(parts, grad)


@pytest.mark.mostly_slow(1)
@every_loss
@settings(max_examples=10, deadline=None)
@given(t=tables(), junk=st.floats(-3.0, 3.0))
def test_a_row_scored_nowhere_counts_nothing(name: str, t: Tables, junk: float) -> None:
    longer = t.map(
        lambda x: torch.cat([x, torch.full_like(x[:1], False if x.dtype == torch.bool else junk)])
    )
    group = torch.arange(len(longer.mask))
    for aggregation in AGGREGATIONS.values():
        value, grad = value_and_gradient(
            LOSSES[name], t, aggregation(t.mask, group[:-1], 7).double()
        )
        longer_value, longer_grad = value_and_gradient(
            LOSSES[name], longer, aggregation(longer.mask, group, 7).double()
        )
        same(longer_value, value)
        same(longer_grad, torch.cat([grad, torch.zeros_like(grad[:1])]))


@pytest.mark.mostly_slow(1)
@every_loss
@settings(max_examples=10, deadline=None)
@given(t=tables())
def test_no_advantage_no_loss_no_gradient(name: str, t: Tables) -> None:
    """Exactly zero off the policy; but Kimi's square, which pulls back, only on it."""
    old = t.logp if name == "kimi" else t.old_logp
    still = Tables(t.logp, old, torch.zeros_like(t.advantages), t.mask)
    value, grad = value_and_gradient(LOSSES[name], still, weights_of("sequence", t.mask))
    assert value == 0 and (grad == 0).all()


@pytest.mark.mostly_slow(2)
@every_loss
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@settings(max_examples=10, deadline=None)
@given(t=tables(), far=st.lists(st.sampled_from([-1000.0, 0.0, 1000.0]), min_size=20, max_size=20))
def test_far_off_the_policy_everything_is_finite(
    name: str, dtype: torch.dtype, t: Tables, far: list[float]
) -> None:
    shift = torch.tensor(far).double()[: t.mask.numel()].view_as(t.logp)
    moved = Tables(
        torch.where(t.mask, t.old_logp + shift, 0.0), t.old_logp, t.advantages, t.mask
    ).map(lambda x: x.to(dtype) if x.is_floating_point() else x)
    value, grad = value_and_gradient(LOSSES[name], moved, weights_of("token", t.mask).to(dtype))
    assert value.isfinite() and grad.isfinite().all()


@pytest.mark.mostly_slow(2)
@pytest.mark.parametrize("name", WITH_MASK)
@settings(max_examples=10, deadline=None)
@given(
    t=tables(),
    junk=st.lists(st.sampled_from([math.nan, math.inf, -math.inf, 7.0]), min_size=3, max_size=3),
)
def test_masked_values_are_never_read(name: str, t: Tables, junk: list[float]) -> None:
    dirty = Tables(
        *(
            torch.where(t.mask, x, j)
            for x, j in zip((t.logp, t.old_logp, t.advantages), junk, strict=True)
        ),
        t.mask,
    )
    weights = torch.ones_like(t.logp)
    value, grad = value_and_gradient(LOSSES[name], t, weights)
    dirty_value, dirty_grad = value_and_gradient(LOSSES[name], dirty, weights)
    assert torch.equal(dirty_value, value) and torch.equal(dirty_grad, grad)
    assert (
        LOSSES[name].fast(dirty.logp, dirty.old_logp, dirty.advantages, dirty.mask)[~t.mask] == 0
    ).all()


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(t=tables(row_advantages=True), far=st.sampled_from([0.0, 0.0, 30.0, -30.0]))
def test_gspo_token_is_gspo_where_a_rows_advantages_are_equal(t: Tables, far: float) -> None:
    """Also past the clamp of the log-ratio, where neither has a gradient left."""
    moved = Tables(torch.where(t.mask, t.logp + far, 0.0), t.old_logp, t.advantages, t.mask)
    for aggregation in AGGREGATIONS:
        weights = weights_of(aggregation, t.mask)
        value, grad = value_and_gradient(LOSSES["gspo"], moved, weights)
        token_value, token_grad = value_and_gradient(LOSSES["gspo-token"], moved, weights)
        same(token_value, value)
        same(token_grad, grad)


@pytest.mark.slow
@every_loss
@settings(max_examples=20, deadline=None)
@given(t=tables())
def test_values_match_the_slow_version(name: str, t: Tables) -> None:
    fast = LOSSES[name].fast(t.logp, t.old_logp, t.advantages, t.mask)
    for i in range(len(t.mask)):
        same(
            fast[i, t.mask[i]], torch.tensor(_slow_row(name, t, i, t.logp[i]), dtype=torch.float64)
        )


@pytest.mark.mostly_slow(24)
@every_loss
@pytest.mark.parametrize("seed", range(6))
def test_gradients_match_central_differences_of_the_slow_version(name: str, seed: int) -> None:
    """Fixed seeds, so that no table falls on a corner of a clip."""
    generator = torch.Generator().manual_seed(seed)
    old = -2 * torch.rand(4, 5, generator=generator, dtype=torch.float64)
    mask = torch.rand(4, 5, generator=generator) < 0.8
    spread = 0.15 if LOSSES[name].by_row or name == "gspo-token" else 0.8
    logp = old + spread * torch.randn(4, 5, generator=generator, dtype=torch.float64)
    cleaned = [
        torch.where(mask, x, 0.0)
        for x in (logp, old, torch.randn(4, 5, generator=generator, dtype=torch.float64))
    ]
    t = Tables(*cleaned, mask)
    weights = weights_of(LOSSES[name].aggregation, mask)
    _, grad = value_and_gradient(LOSSES[name], t, weights)
    step, slopes = 1e-6, torch.zeros_like(grad)
    for i, j in mask.nonzero().tolist():
        up, down = (
            _slow_row(name, t, i, t.logp[i] + sign * step * torch.eye(5, dtype=torch.float64)[j])
            for sign in (1, -1)
        )
        rise = torch.tensor([x - y for x, y in zip(up, down, strict=True)], dtype=torch.float64)
        slopes[i, j] = (weights[i, mask[i]] * rise).sum() / (2 * step)
    torch.testing.assert_close(grad, slopes, rtol=1e-6, atol=1e-8)


def _slow_row(name: str, t: Tables, i: int, logp: Tensor) -> Row:
    """Row i's scored tokens with `logp` in place of its own; stopped gradients stay at its own."""
    scored = t.mask[i]
    row = [x[scored].tolist() for x in (logp, t.old_logp[i], t.advantages[i], t.logp[i])]
    return LOSSES[name].slow(*row) if scored.any() else []


@settings(max_examples=30, deadline=None)
@given(data=st.data(), clip=st.floats(0.05, 1.0))
def test_value_loss_matches_the_slow_version(data: st.DataObject, clip: float) -> None:
    shape = data.draw(st.tuples(st.integers(1, 3), st.integers(1, 4)))
    values, old, returns = (data.draw(_floats(shape, -2.0, 2.0)) for _ in range(3))
    fast = losses.clipped_value_loss(values, old, returns, clip)
    for v, o, r, found in zip(
        values.flatten(), old.flatten(), returns.flatten(), fast.flatten(), strict=True
    ):
        slow = 0.5 * max((v - r) ** 2, (_clip(float(v), float(o) - clip, float(o) + clip) - r) ** 2)
        same(found, torch.as_tensor(slow))


def test_value_loss_gradient_matches_central_differences() -> None:
    generator = torch.Generator().manual_seed(0)
    values, old, returns = (
        torch.randn(4, 5, generator=generator, dtype=torch.float64) for _ in range(3)
    )
    assert torch.autograd.gradcheck(
        lambda v: losses.clipped_value_loss(v, old, returns, 0.3), values.requires_grad_()
    )
