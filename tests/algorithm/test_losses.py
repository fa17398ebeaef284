"""Token losses by hand: golden values of the plain ones, each cell of each clip, and refusals. The
other golden cases: `test_losses_golden.py`.
"""

from __future__ import annotations

import math

import pytest
import torch
from golden import AGGREGATIONS as OURS
from golden import CASES, close, spread, table
from torch import Tensor

from sixfold.algorithm.aggregation import AGGREGATIONS
from sixfold.algorithm.losses import (
    Surrogate,
    clipped_surrogate,
    clipped_value_loss,
    clipped_weight,
    policy_gradient,
    soft_gate,
)
from sixfold.algorithm.sequence_losses import (
    geometric_surrogate,
    length_scaled_sequence_surrogate,
    mirror_descent,
    power_weight,
    sequence_surrogate,
    sequence_token_surrogate,
)

torch.set_num_threads(1)


def row(*values: float) -> Tensor:
    """[1, T] in float64."""
    return torch.tensor([values], dtype=torch.float64)


def gradient(loss: Tensor, logp: Tensor) -> Tensor:
    """d sum(loss) / d logp."""
    (grad,) = torch.autograd.grad(loss.sum(), logp)
    return grad


@pytest.mark.parametrize("case", ["ppo_clip", "ppo_clip_token_adv", "reinforce_pg"])
def test_golden_values_and_gradients(case: str) -> None:
    mask, params = table(case, "mask"), CASES[case]["params"]
    advantages, old_logp = spread(table(case, "advantages"), mask), table(case, "old_logp")
    for theirs, ours in OURS.items():
        logp = table(case, "logp").requires_grad_()
        if case == "reinforce_pg":
            per_token = policy_gradient(logp, advantages)
        else:
            per_token = clipped_surrogate(
                logp, old_logp, advantages, params["eps"], params["eps"]
            ).loss
        close(per_token * mask, table(case, "per_token_loss", "expected"))
        weights = AGGREGATIONS[ours](
            mask, torch.arange(len(mask)), params["seq_mean_token_sum_norm_constant"]
        )
        loss = (weights * per_token).sum()
        close(loss, table(case, f"loss_{theirs}", "expected"))
        if f"grad_logp_{theirs}" in CASES[case]["expected"]:
            loss.backward()
            assert logp.grad is not None
            close(logp.grad, table(case, f"grad_logp_{theirs}", "expected"))


def test_golden_clip_fraction() -> None:
    mask = table("ppo_clip", "mask")
    s = clipped_surrogate(
        table("ppo_clip", "logp"),
        table("ppo_clip", "old_logp"),
        spread(table("ppo_clip", "advantages"), mask),
        0.2,
        0.2,
    )
    close((s.active & mask).sum() / mask.sum(), table("ppo_clip", "clipfrac", "expected"))


@pytest.mark.parametrize(
    ("advantage", "ratio", "gradient", "outside", "active"),
    [
        (+2.0, 1.1, -2.0 * 1.1, False, False),
        (+2.0, 1.5, 0.0, True, True),
        (+2.0, 0.5, -2.0 * 0.5, True, False),
        (-2.0, 1.1, +2.0 * 1.1, False, False),
        (-2.0, 1.5, +2.0 * 1.5, True, False),
        (-2.0, 0.5, 0.0, True, True),
    ],
)
def test_the_six_cells(
    advantage: float, ratio: float, gradient: float, outside: bool, active: bool
) -> None:
    """d/dlogp of -min(r A, clip(r) A) is -r A where the clip does not bite, and 0 in two cells of
    six.
    """
    old = torch.tensor([[-3.0]], dtype=torch.float64)
    logp = (old + math.log(ratio)).requires_grad_()
    s = clipped_surrogate(logp, old, torch.tensor([[advantage]], dtype=torch.float64), 0.2, 0.3)
    s.loss.sum().backward()
    assert logp.grad is not None
    assert float(logp.grad) == pytest.approx(gradient, abs=1e-9)
    assert (bool(s.outside), bool(s.active)) == (outside, active)
    assert float(s.ratio.detach()) == pytest.approx(ratio)


def test_the_band_is_not_symmetric_when_asked() -> None:
    """clip_low 0.2, clip_high 0.28, A > 0: the ratio 1.25 still learns, 1.3 does not. A < 0: 0.81
    does, 0.75 does not.
    """
    logp = row(1.25, 1.3, 0.81, 0.75).log().requires_grad_()
    s = clipped_surrogate(logp, torch.zeros_like(logp), row(1, 1, -1, -1), 0.2, 0.28)
    close(s.loss, row(-1.25, -1.28, 0.81, 0.8))
    close(gradient(s.loss, logp), row(-1.25, 0, 0.81, 0))
    assert s.outside.tolist() == s.active.tolist() == [[False, True, False, True]]


@pytest.mark.parametrize(
    ("advantage", "ratio", "loss", "gradient_", "active"),
    [
        (-2.0, 2.9, 2.0 * 2.9, 2.0 * 2.9, False),
        (-2.0, 3.5, 2.0 * 3.0, 0.0, True),
        (-2.0, 1.1, 2.0 * 1.1, 2.0 * 1.1, False),
        (-2.0, 0.5, 2.0 * 0.8, 0.0, True),
        (+2.0, 3.5, -2.0 * 1.2, 0.0, True),
        (+2.0, 1.1, -2.0 * 1.1, -2.0 * 1.1, False),
    ],
)
def test_the_cells_of_the_dual_clip(
    advantage: float, ratio: float, loss: float, gradient_: float, active: bool
) -> None:
    """A third dead cell: A < 0 with r above the cap of 3."""
    logp = row(math.log(ratio)).requires_grad_()
    s = clipped_surrogate(logp, row(0), row(advantage), 0.2, 0.2, dual_clip=3.0)
    close(s.loss, row(loss))
    close(gradient(s.loss, logp), row(gradient_))
    assert s.active.tolist() == [[active]]


def test_clipped_weight_bounds_the_weight_and_keeps_every_gradient() -> None:
    logp = row(0.5, 1.1, 4.0).log().requires_grad_()
    s = clipped_weight(logp, torch.zeros_like(logp), row(2, -2, 2), None, 0.5)
    close(gradient(s.loss, logp), row(-2 * 0.5, 2 * 1.1, -2 * 1.5))
    close(s.loss, row(-2 * 0.5 * math.log(0.5), 2 * 1.1 * math.log(1.1), -2 * 1.5 * math.log(4)))
    assert (s.outside.tolist(), s.active.any().item()) == ([[False, False, True]], False)
    bounded = clipped_weight(logp, torch.zeros_like(logp), row(2, -2, 2), 0.2, 0.5)
    close(gradient(bounded.loss, logp), row(-2 * 0.8, 2 * 1.1, -2 * 1.5))
    assert bounded.outside.tolist() == [[True, False, True]]


def test_soft_gate_by_hand() -> None:
    """tau by the sign of A: sigmoid(ln 3) = 3/4, so r = 1 + ln 3 at tau 1 gives loss -3 A and slope
    4 x 3/16 of r A.
    """
    r = 1 + math.log(3)
    logp = row(r, 1 + math.log(3) / 2).log().requires_grad_()
    s = soft_gate(logp, torch.zeros_like(logp), row(2, -2), 1.0, 2.0)
    close(s.loss, row(-2 * 3, 2 * 1.5))
    close(gradient(s.loss, logp), row(-2 * 0.75 * r, 2 * 0.75 * (1 + math.log(3) / 2)))
    assert not s.outside.any() and not s.active.any()


def test_whole_sequence_is_clipped() -> None:
    """Ratios 2 and 1/2 make s = 1: kept, though each token is outside. Ratios 1.69 and 1 make s =
    1.3: dropped, though A > 0 on a ratio of 1.
    """
    logp = (
        torch.tensor([[2.0, 0.5, 7.0], [1.69, 1.0, 7.0]], dtype=torch.float64)
        .log()
        .requires_grad_()
    )
    mask = torch.tensor([[True, True, False]] * 2)
    s = sequence_surrogate(logp, torch.zeros_like(logp), torch.ones_like(logp), mask, 0.2, 0.2)
    close(s.ratio, torch.tensor([[1, 1, 1], [1.3, 1.3, 1]]))
    close(s.loss, torch.tensor([[-1, -1, 0], [-1.2, -1.2, 0]]))
    close(gradient(s.loss, logp), torch.tensor([[-1, -1, 0], [0, 0, 0]]))
    assert s.outside.tolist() == s.active.tolist() == [[False] * 3, [True, True, False]]


def test_a_sequences_advantage_is_its_scored_tokens_mean() -> None:
    logp = row(-1, -1, -1)
    s = sequence_surrogate(logp, logp, row(1, 4, 90), torch.tensor([[True, True, False]]), 0.2, 0.2)
    close(s.loss, row(-2.5, -2.5, 0))


def test_the_length_scaled_form_undoes_the_division_by_length() -> None:
    """Two answers of 4 and 2 tokens, on the old policy, aggregated by sequence: every token gets -A
    / B.
    """
    mask = torch.tensor([[True] * 4, [True, True, False, False]])
    logp = torch.full((2, 4), -1.0, dtype=torch.float64, requires_grad=True)
    s = length_scaled_sequence_surrogate(logp, logp.detach(), torch.ones_like(logp), mask, 0.2, 0.2)
    weights = AGGREGATIONS["sequence"](mask, torch.arange(2), 4)
    close(gradient(weights * s.loss, logp), -0.5 * mask)


@pytest.mark.parametrize(
    ("advantage", "killed"), [(1.0, [False, False, True]), (-1.0, [False, True, False])]
)
def test_the_geometric_clip_takes_tokens_not_rows(advantage: float, killed: list[bool]) -> None:
    """Log-ratios 0.1, -0.7, 0.9 with a band of -0.3 .. 0.5: A > 0 holds the last at 0.5, A < 0 the
    middle at -0.3.
    """
    logp = row(0.1, -0.7, 0.9).requires_grad_()
    s = geometric_surrogate(
        logp, torch.zeros_like(logp), advantage * row(1, 1, 1), torch.ones(1, 3).bool(), 0.3, 0.5
    )
    ratio = math.exp((0.1 - 0.7 + 0.5) / 3 if advantage > 0 else (0.1 - 0.3 + 0.9) / 3)
    close(s.loss, -advantage * ratio * row(1, 1, 1))
    close(gradient(s.loss, logp), torch.where(torch.tensor([killed]), 0.0, -advantage * ratio))
    assert s.active.tolist() == [killed]
    assert s.outside.tolist() == [[False, True, True]]


def test_mirror_descent_pulls_back_where_there_is_no_advantage() -> None:
    """A = 0, summed log-ratio 0.5, tau 0.1: loss (0.05)^2 on both tokens, gradient 2 x 0.05 x 0.1
    from each of them.
    """
    logp = row(0.2, 0.3).requires_grad_()
    s = mirror_descent(logp, row(0, 0), row(0, 0), torch.ones(1, 2).bool(), 0.1)
    close(s.loss, row(0.0025, 0.0025))
    close(gradient(s.loss, logp), row(0.02, 0.02))
    close(s.ratio, math.exp(0.5) * row(1, 1))


def test_the_power_weight_peaks_where_it_should() -> None:
    """W = k / lam: (2/3)^2 e for A >= 0, (3/2)^3 / e for A < 0; W is the product of the row's
    ratios.
    """
    mask = torch.ones(1, 2).bool()
    for advantage, w, phi in ((1.0, 2 / 3, 4 / 9 * math.e), (-1.0, 3 / 2, 27 / 8 / math.e)):
        logp = row(math.log(w) + 1, -1).requires_grad_()
        s = power_weight(logp, row(0, 0), advantage * row(1, 1), mask, 2, 3, 3, 2)
        close(s.ratio, w * row(1, 1))
        close(gradient(s.loss, logp), -advantage * phi * row(1, 1))


def test_the_power_weight_does_not_overflow_in_float32() -> None:
    """W^k = e^100 beside exp(lam (1 - W)) = 0: the weight is 0, not NaN."""
    logp = torch.full((1, 2), 10.0, requires_grad=True)
    s = power_weight(logp, torch.zeros(1, 2), torch.ones(1, 2), torch.ones(1, 2).bool(), 5, 3, 5, 3)
    close(gradient(s.loss, logp), torch.zeros(1, 2))


def test_value_loss_takes_the_larger_error() -> None:
    """Old value 0, clip 0.2: moving past the band towards the return stops learning; away from it
    does not; inside it is the plain error.
    """
    values = row(0.5, -0.5, 0.1).requires_grad_()
    loss = clipped_value_loss(values, row(0, 0, 0), row(1, 1, 1), 0.2)
    close(loss, row(0.5 * 0.8**2, 0.5 * 1.5**2, 0.5 * 0.9**2))
    close(gradient(loss, values), row(0, -1.5, -0.9))


def test_ratio_one_gives_the_policy_gradient_exactly() -> None:
    old = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)) - 2
    advantages = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    a, b = old.clone().requires_grad_(), old.clone().requires_grad_()
    clipped_surrogate(a, old, advantages, 0.2, 0.2).loss.sum().backward()
    policy_gradient(b, advantages).sum().backward()
    assert a.grad is not None and b.grad is not None and torch.equal(a.grad, b.grad)


def test_a_token_far_off_the_policy_stays_finite() -> None:
    logp = torch.tensor([[0.0, -300.0]], requires_grad=True)
    loss = clipped_surrogate(
        logp, torch.tensor([[-300.0, 0.0]]), torch.tensor([[-1.0, -1.0]]), 0.2, 0.2
    ).loss
    loss.sum().backward()
    assert (
        bool(loss.isfinite().all()) and logp.grad is not None and bool(logp.grad.isfinite().all())
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_only_the_loss_carries_a_gradient_and_the_dtype_stays(dtype: torch.dtype) -> None:
    logp = torch.full((2, 3), -1.0, dtype=dtype, requires_grad=True)
    for s in every_surrogate(
        logp,
        torch.full_like(logp, -1.2).detach(),
        torch.ones(2, 3, dtype=dtype),
        torch.ones(2, 3).bool(),
    ):
        assert s.loss.requires_grad and not (
            s.ratio.requires_grad or s.outside.requires_grad or s.active.requires_grad
        )
        assert s.loss.dtype == s.ratio.dtype == dtype
        assert s.outside.dtype == s.active.dtype == torch.bool


@pytest.mark.parametrize("far", [-1000.0, 1000.0])
def test_far_off_the_policy_the_reported_ratio_is_finite(far: float) -> None:
    logp = torch.full((2, 3), far, requires_grad=True)
    for s in every_surrogate(logp, torch.zeros(2, 3), torch.ones(2, 3), torch.ones(2, 3).bool()):
        assert s.ratio.isfinite().all() and s.loss.isfinite().all()


def test_shapes_are_checked() -> None:
    table2, table1 = torch.zeros(2, 3), torch.zeros(3)
    with pytest.raises(ValueError, match=r"\[B, T\]"):
        policy_gradient(table1, table1)
    with pytest.raises(ValueError, match=r"\[B, T\]"):
        clipped_value_loss(table2, table2, table1, 0.2)
    for n in range(9):
        with pytest.raises(ValueError, match=r"\[B, T\]"):
            every_surrogate(table2, table2, table1, torch.ones(2, 3).bool(), only=n)


def every_surrogate(
    logp: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, only: int | None = None
) -> list[Surrogate]:
    """Each loss that gives a Surrogate, with its paper's settings; or just one of them."""
    calls = [
        lambda: clipped_surrogate(logp, old, advantages, 0.2, 0.2),
        lambda: clipped_weight(logp, old, advantages, None, 4.0),
        lambda: soft_gate(logp, old, advantages, 1.0, 1.05),
        lambda: sequence_surrogate(logp, old, advantages, mask, 3e-4, 4e-4),
        lambda: sequence_token_surrogate(logp, old, advantages, mask, 3e-4, 4e-4),
        lambda: length_scaled_sequence_surrogate(logp, old, advantages, mask, 2e-3, 2.5e-3),
        lambda: geometric_surrogate(logp, old, advantages, mask, 0.4, 0.4),
        lambda: mirror_descent(logp, old, advantages, mask, 0.1),
        lambda: power_weight(logp, old, advantages, mask, 2, 3, 3, 2),
    ]
    return [call() for call in (calls if only is None else [calls[only]])]
