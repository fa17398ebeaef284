"""Token losses: golden values and gradients, the six cells of the clip, and refusals."""

from __future__ import annotations

import math

import pytest
import torch
from golden import AGGREGATIONS as OURS
from golden import CASES, close, spread, table

from sixfold.algorithm.aggregation import AGGREGATIONS
from sixfold.algorithm.losses import clipped_surrogate, policy_gradient

torch.set_num_threads(1)


@pytest.mark.parametrize("case", ["ppo_clip", "ppo_clip_token_adv", "reinforce_pg"])
def test_golden_values_and_gradients(case: str) -> None:
    mask, params = table(case, "mask"), CASES[case]["params"]
    advantages, old_logp = spread(table(case, "advantages"), mask), table(case, "old_logp")
    for theirs, ours in OURS.items():
        logp = table(case, "logp").requires_grad_()
        if case == "reinforce_pg":
            per_token = policy_gradient(logp, advantages)
        else:
            per_token = clipped_surrogate(logp, old_logp, advantages, params["eps"], params["eps"]).loss
        close(per_token * mask, table(case, "per_token_loss", "expected"))
        weights = AGGREGATIONS[ours](mask, torch.arange(len(mask)), params["seq_mean_token_sum_norm_constant"])
        loss = (weights * per_token).sum()
        close(loss, table(case, f"loss_{theirs}", "expected"))
        if f"grad_logp_{theirs}" in CASES[case]["expected"]:
            loss.backward()
            assert logp.grad is not None
            close(logp.grad, table(case, f"grad_logp_{theirs}", "expected"))


def test_golden_clip_fraction() -> None:
    mask = table("ppo_clip", "mask")
    s = clipped_surrogate(table("ppo_clip", "logp"), table("ppo_clip", "old_logp"), spread(table("ppo_clip", "advantages"), mask), 0.2, 0.2)
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
def test_the_six_cells(advantage: float, ratio: float, gradient: float, outside: bool, active: bool) -> None:
    """d/dlogp of -min(r A, clip(r) A) is -r A where the clip does not bite, and 0 in two cells of six."""
    old = torch.tensor([[-3.0]], dtype=torch.float64)
    logp = (old + math.log(ratio)).requires_grad_()
    s = clipped_surrogate(logp, old, torch.tensor([[advantage]], dtype=torch.float64), 0.2, 0.3)
    s.loss.sum().backward()
    assert logp.grad is not None
    assert float(logp.grad) == pytest.approx(gradient, abs=1e-9)
    assert (bool(s.outside), bool(s.active)) == (outside, active)
    assert float(s.ratio.detach()) == pytest.approx(ratio)


def test_the_band_is_not_symmetric_when_asked() -> None:
    """clip_low 0.2, clip_high 0.28: the ratio 1.25 is inside, 0.75 is not."""
    logp = torch.tensor([[1.25, 0.75, 1.29]]).log()
    s = clipped_surrogate(logp, torch.zeros(1, 3), torch.tensor([[1.0, -1.0, 1.0]]), 0.2, 0.28)
    close(s.loss, torch.tensor([[-1.25, 0.8, -1.28]]))
    assert s.outside.tolist() == [[False, True, True]]


def test_ratio_one_gives_the_policy_gradient_exactly() -> None:
    old = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)) - 2
    advantages = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    a, b = old.clone().requires_grad_(), old.clone().requires_grad_()
    clipped_surrogate(a, old, advantages, 0.2, 0.2).loss.sum().backward()
    policy_gradient(b, advantages).sum().backward()
    assert a.grad is not None and b.grad is not None and torch.equal(a.grad, b.grad)


def test_a_token_far_off_the_policy_stays_finite() -> None:
    logp = torch.tensor([[0.0, -300.0]], requires_grad=True)
    loss = clipped_surrogate(logp, torch.tensor([[-300.0, 0.0]]), torch.tensor([[-1.0, -1.0]]), 0.2, 0.2).loss
    loss.sum().backward()
    assert bool(loss.isfinite().all()) and logp.grad is not None and bool(logp.grad.isfinite().all())


def test_shapes_are_checked() -> None:
    table2, table1 = torch.zeros(2, 3), torch.zeros(3)
    with pytest.raises(ValueError, match=r"\[B, T\]"):
        clipped_surrogate(table2, table2, table1, 0.2, 0.2)
    with pytest.raises(ValueError, match=r"\[B, T\]"):
        policy_gradient(table1, table1)
