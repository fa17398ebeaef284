"""Whole algorithms on a batch: GRPO and REINFORCE as the papers have them, and what junk, order and padding must not change."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from golden import AGGREGATIONS as OURS
from golden import CASES, batch_of, close, spread, table
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sixfold.algorithm.aggregation import AGGREGATIONS
from sixfold.algorithm.base import Algorithm, degenerate_fraction
from sixfold.algorithm.grpo import Grpo
from sixfold.algorithm.reinforce import Reinforce
from sixfold.algorithm.table import ALGORITHMS, AlgorithmDefaults
from sixfold.algorithm.zoo import ZOO, make_algorithm
from sixfold.batch import Batch, final_rewards

torch.set_num_threads(1)
NAN = float("nan")


def _grpo(**changes: object) -> Grpo:
    return Grpo(replace(ALGORITHMS["grpo"], **changes), horizon=5)  # type: ignore[arg-type]


def _random_batch(seed: int, rows: int = 6, width: int = 7, rewards: list[float] | None = None) -> tuple[Batch, Tensor]:
    """A batch of groups of 3 with ragged masks, and the log-probs of a policy that has moved."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, width, (rows,), generator=g)
    mask = (torch.arange(width) >= 1) & (torch.arange(width) <= lengths[:, None])
    old = (-3 * torch.rand(rows, width, generator=g, dtype=torch.float64)) * mask
    logp, ref = ((old + torch.randn(rows, width, generator=g) * 0.3) * mask for _ in range(2))
    scores = rewards or torch.rand(rows, generator=g).tolist()
    # Double: in float32 the z-score of a group of nearly equal rewards is rounding, and would differ by row order.
    return batch_of(mask, old, torch.arange(rows) // 3, rewards=final_rewards(scores, mask).double(), ref_logp=ref), logp


def _loss_and_gradient(algorithm: Algorithm, batch: Batch, logp: Tensor) -> tuple[Tensor, Tensor]:
    """Loss of the whole step, and its gradient at the scored tokens."""
    logp = logp.clone().requires_grad_()
    loss = algorithm.compute_loss(algorithm.compute_advantages(batch), logp).loss
    loss.backward()
    assert logp.grad is not None
    return loss.detach(), torch.where(batch.mask, logp.grad, 0.0)


ALL = [
    _grpo(),
    _grpo(beta=0.1),
    _grpo(beta=0.1, kl="k1", kl_in="reward"),
    _grpo(aggregation="prompt", beta=0.1, kl="k2"),
    Reinforce(ALGORITHMS["reinforce"], 5),
    Reinforce(replace(ALGORITHMS["reinforce"], beta=0.1), 5),
]


@pytest.mark.parametrize("theirs", sorted(OURS))
def test_golden_grpo_with_k3(theirs: str) -> None:
    case = "grpo_full_with_k3"
    mask, expected = table(case, "mask"), CASES[case]["expected"]
    algorithm = _grpo(beta=CASES[case]["params"]["beta"], aggregation=OURS[theirs])
    advantages = spread(table(case, "advantages"), mask)
    batch = batch_of(mask, table(case, "old_logp"), ref_logp=table(case, "ref_logp"), advantages=advantages)
    batch = batch.with_(weights=AGGREGATIONS[OURS[theirs]](mask, batch.group, 5))
    logp = table(case, "logp").requires_grad_()
    output = algorithm.compute_loss(batch, logp)
    output.loss.backward()
    close(output.loss, torch.tensor(expected[f"loss_{theirs}"]))
    close(output.sums["train/loss"], output.loss.detach())
    assert logp.grad is not None
    if f"grad_logp_{theirs}" in expected:
        close(logp.grad, table(case, f"grad_logp_{theirs}", "expected"))


def test_the_policy_gradient_of_grpo_and_reinforce_with_ratio_one_differ_only_in_the_advantage() -> None:
    """GRPO with REINFORCE's weights, on policy: gradient = REINFORCE's divided by the group's std."""
    batch, _ = _random_batch(0, rows=3)
    _, grpo = _loss_and_gradient(_grpo(aggregation="sequence-sum"), batch, batch.old_logp)
    _, reinforce = _loss_and_gradient(Reinforce(ALGORITHMS["reinforce"], 5), batch, batch.old_logp)
    std = batch.scores.std(correction=0) + 1e-6
    torch.testing.assert_close(grpo, reinforce / std, atol=1e-6, rtol=1e-5)


def test_reinforce_is_the_score_function() -> None:
    """-(1 / K) sum_i A_i sum_t log pi, written out over a softmax policy, gives grad = mean of A_i (pi - onehot)."""
    logits = torch.tensor([0.3, -0.2, 0.9], dtype=torch.float64, requires_grad=True)
    actions, rewards = torch.tensor([0, 2, 2, 1]), torch.tensor([1.0, 0.0, 0.5, 0.25])
    mask = torch.tensor([[False, True]] * 4)
    logp = torch.stack([torch.zeros(4, dtype=torch.float64), logits.log_softmax(-1)[actions]], dim=1)
    batch = batch_of(mask, logp.detach(), rewards=final_rewards(rewards.tolist(), mask))
    algorithm = Reinforce(ALGORITHMS["reinforce"], 5)
    algorithm.compute_loss(algorithm.compute_advantages(batch), logp).loss.backward()
    advantage = rewards - rewards.mean()
    onehot = torch.nn.functional.one_hot(actions, 3)
    assert logits.grad is not None
    close(logits.grad, (advantage[:, None] * (logits.detach().softmax(-1) - onehot)).mean(0))


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 4), st.sampled_from([0.0, 99.0, NAN]))
@pytest.mark.parametrize("algorithm", ALL)
def test_padding_and_what_lies_in_it_change_nothing(algorithm: Algorithm, seed: int, more: int, junk: float) -> None:
    batch, logp = _random_batch(seed)
    loss, gradient = _loss_and_gradient(algorithm, batch, logp)

    def padded(t: Tensor) -> Tensor:
        return torch.nn.functional.pad(torch.where(batch.mask, t, junk), (0, more), value=junk)

    mask = torch.nn.functional.pad(batch.mask, (0, more))
    wide = batch_of(
        mask,
        padded(batch.old_logp),
        batch.group,
        rewards=torch.nn.functional.pad(batch.rewards, (0, more)),
        ref_logp=padded(batch.ref_logp),  # type: ignore[arg-type]
    )
    wide_loss, wide_gradient = _loss_and_gradient(algorithm, wide, padded(logp))
    torch.testing.assert_close(wide_loss, loss, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(wide_gradient[:, : batch.mask.shape[1]], gradient, atol=1e-6, rtol=1e-5)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6))
@pytest.mark.parametrize("algorithm", ALL)
def test_row_order_changes_nothing(algorithm: Algorithm, seed: int) -> None:
    batch, logp = _random_batch(seed)
    order = torch.randperm(6, generator=torch.Generator().manual_seed(seed))
    loss, gradient = _loss_and_gradient(algorithm, batch, logp)
    moved_loss, moved = _loss_and_gradient(algorithm, batch.rows(order), logp[order])
    torch.testing.assert_close(moved_loss, loss, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(moved, gradient[order], atol=1e-6, rtol=1e-5)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 5))
@pytest.mark.parametrize("algorithm", ALL)
def test_any_split_of_the_rows_sums_to_the_whole(algorithm: Algorithm, seed: int, cut: int) -> None:
    batch, logp = _random_batch(seed)
    filled = algorithm.compute_advantages(batch)
    whole = algorithm.compute_loss(filled, logp)
    parts = [algorithm.compute_loss(filled.rows(rows), logp[rows]) for rows in (torch.arange(cut), torch.arange(cut, 6))]
    torch.testing.assert_close(sum(p.loss for p in parts), whole.loss, atol=1e-6, rtol=1e-5)
    for name, value in whole.sums.items():
        torch.testing.assert_close(sum(p.sums[name] for p in parts), value, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("algorithm", ALL)
def test_a_row_without_a_sampled_token_counts_nothing(algorithm: Algorithm) -> None:
    """The prompt alone, in a group of its own: neither in the numerator nor in a denominator."""
    batch, logp = _random_batch(3)
    loss, _ = _loss_and_gradient(algorithm, batch, logp)
    more = {name: torch.cat([t, torch.zeros_like(t[:1])]) for name, t in vars(batch).items() if t is not None}
    more["group"][-1] = 2
    grown_loss, _ = _loss_and_gradient(algorithm, Batch(**more), torch.cat([logp, torch.zeros(1, 7)]))
    torch.testing.assert_close(grown_loss, loss, atol=1e-7, rtol=1e-6)


def test_rows_that_cannot_move_the_loss_weigh_nothing_and_the_rest_as_before() -> None:
    """Group 0 is degenerate, row 4's check failed: weights 0 there; elsewhere the step's own denominators, so the gradient stays."""
    batch, logp = _random_batch(1, rewards=[1.0, 1.0, 1.0, 1.0, NAN, 0.0])
    filled = _grpo().compute_advantages(batch)
    full = AGGREGATIONS["sequence"](batch.mask, batch.group, 5)
    assert filled.weights is not None and filled.advantages is not None
    assert filled.weights.any(-1).tolist() == [False, False, False, True, False, True]
    torch.testing.assert_close(filled.weights[[3, 5]], full[[3, 5]], rtol=0, atol=0)
    assert filled.advantages[3, batch.mask[3]].tolist() == pytest.approx([1.0] * int(batch.mask[3].sum()), abs=1e-5)
    a = logp.clone().requires_grad_()
    _grpo().compute_loss(filled, a).loss.backward()
    b = logp.clone().requires_grad_()
    _grpo().compute_loss(filled.with_(weights=full), b).loss.backward()
    assert a.grad is not None and b.grad is not None
    torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=0)


def test_with_a_kl_in_the_loss_degenerate_groups_still_weigh_and_failed_checks_do_not() -> None:
    batch, logp = _random_batch(1, rewards=[1.0, 1.0, 1.0, NAN, 0.0, 0.0])
    filled = _grpo(beta=0.5).compute_advantages(batch)
    assert filled.weights is not None
    assert filled.weights.any(-1).tolist() == [True, True, True, False, True, True]
    output = _grpo(beta=0.5).compute_loss(filled, logp)
    assert float(output.sums["train/pg_loss"]) == 0.0 and float(output.loss) > 0.0


def test_kl_in_the_reward_by_hand() -> None:
    """r_i - beta sum_t (old - ref), then the group's z-score; the loss has no KL term but the KL is logged."""
    batch, logp = _random_batch(5)
    algorithm = _grpo(beta=0.25, kl="k1", kl_in="reward")
    assert batch.ref_logp is not None
    shaped = batch.scores - 0.25 * ((batch.old_logp - batch.ref_logp) * batch.mask).sum(-1)
    expected = torch.cat([(g - g.mean()) / (g.std(correction=0) + 1e-6) for g in shaped.split(3)])
    filled = algorithm.compute_advantages(batch)
    assert filled.advantages is not None
    torch.testing.assert_close(filled.advantages, expected[:, None] * batch.mask, atol=1e-5, rtol=1e-5)
    output = algorithm.compute_loss(filled, logp)
    torch.testing.assert_close(output.loss, output.sums["train/pg_loss"])
    torch.testing.assert_close(output.means["train/kl"], logp - batch.ref_logp)


def test_kl_in_the_loss_adds_beta_times_the_weighted_estimate() -> None:
    batch, logp = _random_batch(5)
    algorithm = _grpo(beta=0.25, kl="k2")
    filled = algorithm.compute_advantages(batch)
    output = algorithm.compute_loss(filled, logp)
    assert filled.weights is not None and batch.ref_logp is not None
    expected = 0.25 * (filled.weights * (logp - batch.ref_logp) ** 2 / 2).sum()
    torch.testing.assert_close(output.loss - output.sums["train/pg_loss"], expected, atol=1e-7, rtol=1e-5)


def test_beta_zero_needs_no_reference() -> None:
    batch, logp = _random_batch(5)
    bare = replace(batch, ref_logp=None)
    for algorithm in (_grpo(), Reinforce(ALGORITHMS["reinforce"], 5)):
        assert not algorithm.needs_reference
        output = algorithm.compute_loss(algorithm.compute_advantages(bare), logp)
        assert "train/kl" not in output.means and bool(output.loss.isfinite())
    assert _grpo(beta=0.1).needs_reference
    with pytest.raises(ValueError, match="ref_logp"):
        _grpo(beta=0.1).compute_loss(_grpo().compute_advantages(bare), logp)


def test_loss_before_advantages_is_refused() -> None:
    batch, logp = _random_batch(5)
    with pytest.raises(ValueError, match="advantages"):
        _grpo().compute_loss(batch, logp)


def test_degenerate_fraction_counts_groups() -> None:
    batch, _ = _random_batch(1, rewards=[1.0, 1.0, NAN, 1.0, 0.0, 0.0])
    assert degenerate_fraction(batch) == 0.5


def test_zoo_and_table_name_the_same_algorithms_and_build() -> None:
    assert set(ZOO) == set(ALGORITHMS)
    for name, row in ALGORITHMS.items():
        assert row.name == name
        algorithm = make_algorithm(row, 8)
        assert type(algorithm) is ZOO[name] and algorithm == ZOO[name](row, 8)


def test_defaults_are_the_vetted_ones() -> None:
    """Changing a default changes every run that names the algorithm: do it on purpose."""
    assert ALGORITHMS["grpo"] == AlgorithmDefaults("grpo", True, 0.2, 0.2, 0.0, "k3", "loss", "sequence", "arXiv:2402.03300")
    assert ALGORITHMS["reinforce"].kl == "k1" and ALGORITHMS["reinforce"].kl_in == "reward"
    assert ALGORITHMS["reinforce"].aggregation == "sequence-sum" and ALGORITHMS["reinforce"].clip_low is None
