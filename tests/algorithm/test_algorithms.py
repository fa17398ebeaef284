"""Whole algorithms on a batch: GRPO and REINFORCE as the papers have them, and what junk, order and
padding must not change.
"""

from __future__ import annotations

import json
import math
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from golden import AGGREGATIONS as OURS
from golden import CASES, batch_of, close, spread, table
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sixfold.algorithm import method, parts
from sixfold.algorithm.aggregation import AGGREGATIONS
from sixfold.algorithm.base import degenerate_fraction
from sixfold.algorithm.composed import Composed, make_algorithm
from sixfold.algorithm.method import ADVANTAGES, LOSSES
from sixfold.algorithm.off_policy import CORRECTIONS
from sixfold.algorithm.parts import old_policy
from sixfold.algorithm.zoo import ZOO
from sixfold.batch import Batch, final_rewards, last_sampled

torch.set_num_threads(1)
NAN = float("nan")


def _make(name: str, **changes: object) -> Composed:
    return Composed(replace(ZOO[name], **changes), horizon=5)  # type: ignore[arg-type]


def _grpo(**changes: object) -> Composed:
    return _make("grpo", **changes)


def _random_batch(
    seed: int, rows: int = 6, width: int = 7, rewards: list[float] | None = None
) -> tuple[Batch, Tensor]:
    """A batch of groups of 3 with ragged masks, and the log-probs of a policy that has moved."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, width, (rows,), generator=g)
    mask = (torch.arange(width) >= 1) & (torch.arange(width) <= lengths[:, None])
    old = (-3 * torch.rand(rows, width, generator=g, dtype=torch.float64)) * mask
    logp, ref = ((old + torch.randn(rows, width, generator=g) * 0.3) * mask for _ in range(2))
    scores = rewards or torch.rand(rows, generator=g).tolist()
    # Double: in float32 the z-score of a group of nearly equal rewards is rounding, and would
    # differ by row order.
    batch = batch_of(
        mask,
        old,
        torch.arange(rows) // 3,
        rewards=final_rewards(scores, mask).double(),
        ref_logp=ref,
    )
    tables = {
        "prox_logp": old + 0.1,
        "values": 0.5 + 0.1 * ref,
        "entropy": ref.abs(),
        "step_ends": last_sampled(mask),
        "parts": torch.rand(rows, 2, generator=g, dtype=torch.float64),
        "greedy": (torch.arange(rows) // 3) * 0.5,
    }
    return (
        replace(batch, **tables, part_names=("one", "two")).with_(
            source=torch.arange(rows) % 2, truncated=lengths >= width - 1
        ),
        logp,
    )


def _is_table(value: object, batch: Batch) -> bool:
    """True for a field [B, T]."""
    return isinstance(value, Tensor) and value.shape == batch.mask.shape


def _loss_and_gradient(algorithm: Composed, batch: Batch, logp: Tensor) -> tuple[Tensor, Tensor]:
    """Loss of the whole step, and its gradient at the scored tokens."""
    algorithm = deepcopy(algorithm)  # what it has steered so far must not reach the next call
    logp = logp.clone().requires_grad_()
    loss = algorithm.compute_loss(algorithm.prepare(batch), logp).loss
    loss.backward()
    assert logp.grad is not None
    return loss.detach(), torch.where(batch.mask, logp.grad, 0.0)


ALL = [
    *(_make(name) for name in ZOO),
    *(_grpo(correction=rule, correction_low=0.7, correction_high=1.3) for rule in CORRECTIONS),
    *(_grpo(entropy_rule=rule) for rule in ("kl-cov", "top-entropy")),
    *(_make("dr_grpo", whiten=how, entropy_bonus=0.01) for how in ("all", "source")),
    *(_make("dr_grpo", length_penalty=how) for how in ("kimi", "cosine", "stop-properly")),
    *(_grpo(advantage=name) for name in ADVANTAGES if name not in ("pass_at_k", "vtrace")),
    *(_make("gspo", loss=name, clip_low=0.1, clip_high=0.1) for name in LOSSES),
    _make("ppo", advantage="vtrace", beta=0.1),
    _make("dapo", dual_clip=3.0, beta=0.1, kl="k3-unbiased"),
    _grpo(correction="negative-sequence", correction_high=0.05),
    _grpo(beta=0.1),
    _grpo(beta=0.1, kl="k1", kl_in="reward"),
    _grpo(aggregation="prompt", beta=0.1, kl="k2"),
    _make("reinforce", advantage="group_mean"),
    _make("reinforce", beta=0.1),
]


def _label(algorithm: Composed) -> str:
    """The row's name and what was changed of it."""
    changed = {
        k: v
        for k, v in vars(algorithm.method).items()
        if v != getattr(ZOO[algorithm.method.name], k)
    }
    return "-".join([algorithm.method.name, *(f"{k}={v}" for k, v in changed.items())])


@pytest.mark.parametrize("theirs", sorted(OURS))
def test_golden_grpo_with_k3(theirs: str) -> None:
    case = "grpo_full_with_k3"
    mask, expected = table(case, "mask"), CASES[case]["expected"]
    algorithm = _grpo(beta=CASES[case]["params"]["beta"], aggregation=OURS[theirs])
    advantages = spread(table(case, "advantages"), mask)
    batch = batch_of(
        mask, table(case, "old_logp"), ref_logp=table(case, "ref_logp"), advantages=advantages
    )
    batch = batch.with_(weights=AGGREGATIONS[OURS[theirs]](mask, batch.group, 5))
    logp = table(case, "logp").requires_grad_()
    output = algorithm.compute_loss(batch, logp)
    output.loss.backward()
    close(output.loss, torch.tensor(expected[f"loss_{theirs}"]))
    close(output.sums["train/loss"], output.loss.detach())
    assert logp.grad is not None
    if f"grad_logp_{theirs}" in expected:
        close(logp.grad, table(case, f"grad_logp_{theirs}", "expected"))


def test_grpo_with_ratio_one_differs_from_reinforce_only_in_the_advantage() -> None:
    """GRPO with REINFORCE's weights, on policy: gradient = REINFORCE's divided by the
    group's std.
    """
    batch, _ = _random_batch(0, rows=3)
    _, grpo = _loss_and_gradient(_grpo(aggregation="sequence-sum"), batch, batch.old_logp)
    _, reinforce = _loss_and_gradient(
        _make("reinforce", advantage="group_mean"), batch, batch.old_logp
    )
    std = batch.scores.std(correction=0) + 1e-6
    torch.testing.assert_close(grpo, reinforce / std, atol=1e-6, rtol=1e-5)


def test_reinforce_is_the_score_function() -> None:
    """-(1 / K) sum_i A_i sum_t log pi, written out over a softmax policy, gives grad = mean of A_i
    (pi - onehot).
    """
    logits = torch.tensor([0.3, -0.2, 0.9], dtype=torch.float64, requires_grad=True)
    actions, rewards = torch.tensor([0, 2, 2, 1]), torch.tensor([1.0, 0.0, 0.5, 0.25])
    mask = torch.tensor([[False, True]] * 4)
    logp = torch.stack(
        [torch.zeros(4, dtype=torch.float64), logits.log_softmax(-1)[actions]], dim=1
    )
    batch = batch_of(mask, logp.detach(), rewards=final_rewards(rewards.tolist(), mask))
    algorithm = _make("reinforce", advantage="group_mean")
    algorithm.compute_loss(algorithm.prepare(batch), logp).loss.backward()
    advantage = rewards - rewards.mean()
    onehot = torch.nn.functional.one_hot(actions, 3)
    assert logits.grad is not None
    close(logits.grad, (advantage[:, None] * (logits.detach().softmax(-1) - onehot)).mean(0))


@pytest.mark.mostly_slow(4)
@settings(max_examples=5, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 4), st.sampled_from([0.0, 99.0, NAN]))
@pytest.mark.parametrize("algorithm", ALL, ids=_label)
def test_padding_and_its_content_change_nothing(
    algorithm: Composed, seed: int, more: int, junk: float
) -> None:
    batch, logp = _random_batch(seed)
    loss, gradient = _loss_and_gradient(algorithm, batch, logp)

    def padded(t: Tensor, fill: float) -> Tensor:
        return torch.nn.functional.pad(torch.where(batch.mask, t, fill), (0, more), value=fill)

    tables = {name: t for name, t in vars(batch).items() if _is_table(t, batch)}
    kept_clean = {
        name: torch.nn.functional.pad(t, (0, more))
        for name, t in tables.items()
        if name == "rewards" or not t.is_floating_point()
    }
    wide = replace(
        batch,
        **{name: padded(t, junk) for name, t in tables.items() if name not in kept_clean},
        **kept_clean,
    )
    wide_loss, wide_gradient = _loss_and_gradient(algorithm, wide, padded(logp, junk))
    torch.testing.assert_close(wide_loss, loss, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(
        wide_gradient[:, : batch.mask.shape[1]], gradient, atol=1e-6, rtol=1e-5
    )


@pytest.mark.mostly_slow(5)
@settings(max_examples=5, deadline=None)
@given(st.integers(0, 10**6))
@pytest.mark.parametrize("algorithm", ALL, ids=_label)
def test_row_order_changes_nothing(algorithm: Composed, seed: int) -> None:
    batch, logp = _random_batch(seed)
    order = torch.randperm(6, generator=torch.Generator().manual_seed(seed))
    loss, gradient = _loss_and_gradient(algorithm, batch, logp)
    moved_loss, moved = _loss_and_gradient(algorithm, batch.rows(order), logp[order])
    torch.testing.assert_close(moved_loss, loss, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(moved, gradient[order], atol=1e-6, rtol=1e-5)


@pytest.mark.mostly_slow(7)
@settings(max_examples=5, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 5))
@pytest.mark.parametrize("algorithm", ALL, ids=_label)
def test_any_split_of_the_rows_sums_to_the_whole(algorithm: Composed, seed: int, cut: int) -> None:
    batch, logp = _random_batch(seed)
    filled = algorithm.prepare(batch)
    whole = algorithm.compute_loss(filled, logp)
    parts = [
        algorithm.compute_loss(filled.rows(rows), logp[rows])
        for rows in (torch.arange(cut), torch.arange(cut, 6))
    ]
    torch.testing.assert_close(sum(p.loss for p in parts), whole.loss, atol=1e-6, rtol=1e-5)
    for name, value in whole.sums.items():
        torch.testing.assert_close(sum(p.sums[name] for p in parts), value, atol=1e-6, rtol=1e-5)


@pytest.mark.mostly_slow(23)
@pytest.mark.parametrize("algorithm", ALL, ids=_label)
def test_a_row_without_a_sampled_token_counts_nothing(algorithm: Composed) -> None:
    """Two prompts alone, in a group of their own: neither in the numerator nor in a denominator.
    (Their rewards of 0 do count in statistics of the whole batch's rewards, as they should; there
    they are unknown.)"""
    batch, logp = _random_batch(3)
    loss, _ = _loss_and_gradient(algorithm, batch, logp)
    more = {
        name: torch.cat([t, torch.zeros_like(t[:2])])
        for name, t in vars(batch).items()
        if isinstance(t, Tensor)
    }
    more["group"][-2:] = 2
    if algorithm.method.whiten != "none" or algorithm.method.advantage in (
        "batch_std",
        "gpg",
        "normalise_then_sum",
    ):
        more["rewards"][-2:, 0] = NAN
    grown_loss, _ = _loss_and_gradient(
        algorithm, replace(batch, **more), torch.cat([logp, torch.zeros(2, 7)])
    )
    torch.testing.assert_close(grown_loss, loss, atol=1e-7, rtol=1e-6)


def test_rows_that_cannot_move_the_loss_weigh_nothing_and_the_rest_as_before() -> None:
    """Group 0 is degenerate, row 4's check failed: weights 0 there; elsewhere the step's own
    denominators, so the gradient stays.
    """
    batch, logp = _random_batch(1, rewards=[1.0, 1.0, 1.0, 1.0, NAN, 0.0])
    filled = _grpo().prepare(batch)
    full = AGGREGATIONS["sequence"](batch.mask, batch.group, 5)
    assert filled.weights is not None and filled.advantages is not None
    assert filled.weights.any(-1).tolist() == [False, False, False, True, False, True]
    torch.testing.assert_close(filled.weights[[3, 5]], full[[3, 5]].double(), rtol=0, atol=0)
    assert filled.advantages[3, batch.mask[3]].tolist() == pytest.approx(
        [1.0] * int(batch.mask[3].sum()), abs=1e-5
    )
    a = logp.clone().requires_grad_()
    _grpo().compute_loss(filled, a).loss.backward()
    b = logp.clone().requires_grad_()
    _grpo().compute_loss(filled.with_(weights=full), b).loss.backward()
    assert a.grad is not None and b.grad is not None
    torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=0)


def test_with_a_kl_in_the_loss_degenerate_groups_still_weigh_and_failed_checks_do_not() -> None:
    batch, logp = _random_batch(1, rewards=[1.0, 1.0, 1.0, NAN, 0.0, 0.0])
    filled = _grpo(beta=0.5).prepare(batch)
    assert filled.weights is not None
    assert filled.weights.any(-1).tolist() == [True, True, True, False, True, True]
    output = _grpo(beta=0.5).compute_loss(filled, logp)
    assert float(output.sums["train/pg_loss"]) == 0.0 and float(output.loss) > 0.0


def test_kl_in_the_reward_by_hand() -> None:
    """r_i - beta sum_t (old - ref), then the group's z-score; the loss has no KL term but the KL is
    logged.
    """
    batch, logp = _random_batch(5)
    algorithm = _grpo(beta=0.25, kl="k1", kl_in="reward")
    assert batch.ref_logp is not None
    shaped = batch.scores - 0.25 * ((batch.old_logp - batch.ref_logp) * batch.mask).sum(-1)
    expected = torch.cat([(g - g.mean()) / (g.std(correction=0) + 1e-6) for g in shaped.split(3)])
    filled = algorithm.prepare(batch)
    assert filled.advantages is not None
    torch.testing.assert_close(
        filled.advantages, expected[:, None] * batch.mask, atol=1e-5, rtol=1e-5
    )
    output = algorithm.compute_loss(filled, logp)
    torch.testing.assert_close(output.loss, output.sums["train/pg_loss"])
    torch.testing.assert_close(output.means["train/kl"], logp - batch.ref_logp)


def test_kl_in_the_loss_adds_beta_times_the_weighted_estimate() -> None:
    batch, logp = _random_batch(5)
    algorithm = _grpo(beta=0.25, kl="k2")
    filled = algorithm.prepare(batch)
    output = algorithm.compute_loss(filled, logp)
    assert filled.weights is not None and batch.ref_logp is not None
    expected = 0.25 * (filled.weights * (logp - batch.ref_logp) ** 2 / 2).sum()
    torch.testing.assert_close(
        output.loss - output.sums["train/pg_loss"], expected, atol=1e-7, rtol=1e-5
    )


def test_beta_zero_needs_no_reference() -> None:
    batch, logp = _random_batch(5)
    bare = replace(batch, ref_logp=None)
    for algorithm in (_grpo(), _make("reinforce", advantage="group_mean")):
        assert not algorithm.needs_reference
        output = algorithm.compute_loss(algorithm.prepare(bare), logp)
        assert "train/kl" not in output.means and bool(output.loss.isfinite())
    assert _grpo(beta=0.1).needs_reference
    with pytest.raises(ValueError, match="ref_logp"):
        _grpo(beta=0.1).compute_loss(_grpo().prepare(bare), logp)


def test_loss_before_advantages_is_refused() -> None:
    batch, logp = _random_batch(5)
    with pytest.raises(ValueError, match="weights is not filled in"):
        _grpo().compute_loss(batch, logp)


def test_degenerate_fraction_counts_groups() -> None:
    batch, _ = _random_batch(1, rewards=[1.0, 1.0, NAN, 1.0, 0.0, 0.0])
    assert degenerate_fraction(batch) == 0.5


def test_every_row_is_named_after_itself_and_patches_a_row_that_is_there() -> None:
    for name, row in ZOO.items():
        assert row.name == name and (row.patches in ZOO or name == "reinforce")
        assert make_algorithm(row, 8) == Composed(row, 8)


def test_names_stand_for_functions_and_functions_for_names() -> None:
    """The torch-free tables that the command line reads, against those that hold the functions."""
    assert set(method.ADVANTAGES) == set(parts.ADVANTAGES) | set(parts.CRITICS)
    assert {name for name, kind in method.ADVANTAGES.items() if kind.needs == "critic"} == set(
        parts.CRITICS
    )
    assert set(method.LOSSES) == set(parts.LOSSES)
    assert set(method.CORRECTION_BANDS) == set(CORRECTIONS) | {"none", "negative-sequence"}


def test_a_patch_is_the_lines_that_the_docstring_says() -> None:
    """Choices that each row changes of its predecessor. Changing a default changes every run that
    names the algorithm: do it on purpose.
    """
    changed = {
        name: {
            k: v
            for k, v in vars(row).items()
            if v != getattr(ZOO[row.patches], k) and k not in ("name", "patches", "paper")
        }
        for name, row in ZOO.items()
        if row.patches
    }
    clip = {"clip_low": 0.2, "clip_high": 0.2}
    assert changed == {
        "ppo": {
            "advantage": "gae",
            "loss": "clipped_surrogate",
            "aggregation": "token",
            "epochs": 2,
            **clip,
        },
        "grpo": {
            "advantage": "group_zscore",
            "aggregation": "sequence",
            "kl": "k3",
            "kl_in": "loss",
            "epochs": 1,
        },
        "rloo": {"advantage": "leave_one_out"},
        "dapo": {
            "clip_high": 0.28,
            "dynamic_sampling": 4,
            "aggregation": "token",
            "overlong_buffer": 0.2,
        },
        "dr_grpo": {"advantage": "group_mean", "aggregation": "constant"},
        "gspo": {"loss": "sequence_surrogate", "clip_low": 3e-4, "clip_high": 4e-4},
        "gspo_token": {"loss": "sequence_token_surrogate"},
        "cispo": {"loss": "clipped_weight", "clip_low": None, "clip_high": 4.0},
        "reinforce_pp": {"advantage": "whitened_return", "epochs": 1},
        "reinforce_pp_baseline": {"advantage": "whitened_group_mean", "kl": "k2", "kl_in": "loss"},
        "sapo": {
            "loss": "soft_gate",
            "clip_low": None,
            "clip_high": None,
            "tau": 1.0,
            "tau_negative": 1.05,
        },
        "gmpo": {"loss": "geometric_surrogate", "clip_low": 0.4, "clip_high": 0.4},
        "opo": {"advantage": "length_weighted"},
        "maxrl": {"advantage": "maxrl"},
        "kimi": {
            "advantage": "group_mean",
            "loss": "mirror_descent",
            "aggregation": "sequence",
            "tau": 0.1,
        },
        "lite_ppo": {"advantage": "batch_std", "aggregation": "token"},
        "gdpo": {"advantage": "normalise_then_sum"},
        "remax": {"advantage": "greedy_baseline"},
        "opd": {
            "advantage": "teacher",
            "loss": "clipped_surrogate",
            "aggregation": "token",
            **clip,
        },
    }
    assert (ZOO["reinforce"].advantage, ZOO["reinforce"].aggregation, ZOO["reinforce"].loss) == (
        "no_baseline",
        "sequence-sum",
        "policy_gradient",
    )


def test_dapo_with_its_four_switches_off_is_grpo() -> None:
    """Bit for bit, and as a row but for its name: the loop samples as GRPO's does too."""
    off = replace(
        ZOO["dapo"], clip_high=0.2, dynamic_sampling=0, aggregation="sequence", overlong_buffer=0.0
    )
    assert replace(off, name="grpo", patches="ppo", paper=ZOO["grpo"].paper) == ZOO["grpo"]
    batch, logp = _random_batch(8)
    for ours, theirs in zip(
        _loss_and_gradient(Composed(off, 5), batch, logp),
        _loss_and_gradient(_grpo(), batch, logp),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.parametrize(
    "switch", [{"clip_high": 0.28}, {"aggregation": "token"}, {"overlong_buffer": 0.4}]
)
def test_each_switch_of_dapo_changes_something_by_itself(switch: dict[str, object]) -> None:
    batch, _ = _random_batch(8)
    logp = batch.old_logp + math.log(1.25)  # between the symmetric clip and clip-higher
    _, grpo = _loss_and_gradient(_grpo(), batch, logp)
    _, patched = _loss_and_gradient(_grpo(**switch), batch, logp)
    assert not torch.allclose(grpo, patched)


def _only_the_group_decides(m: method.Method) -> bool:
    """The advantage is taken within a group, and neither the rewards' shaping nor the loss has
    anything else in it.
    """
    shaped = m.length_penalty != "none" or m.overlong_buffer or (m.beta and m.kl_in == "reward")
    return m.group_baseline and not (m.regularised or shaped)


@pytest.mark.parametrize(
    "algorithm", [a for a in ALL if _only_the_group_decides(a.method)], ids=_label
)
def test_a_group_of_equal_rewards_gives_exactly_zero(algorithm: Composed) -> None:
    batch, _ = _random_batch(2, rewards=[0.3] * 3 + [0.7] * 3)
    batch = replace(batch, parts=batch.scores[:, None], part_names=("one",))
    loss, gradient = _loss_and_gradient(algorithm, batch, old_policy(batch, algorithm.method))
    assert float(loss) == 0.0 and not gradient.any()


@pytest.mark.parametrize("name", [n for n in ZOO if not ZOO[n].needs_teacher])
def test_on_policy_every_loss_has_reinforces_gradient_for_its_advantage(name: str) -> None:
    """Ratio 1: -weight * A at every token (times 2 tau for the mirror step)."""
    batch, _ = _random_batch(4)
    algorithm = _make(name)
    filled = algorithm.prepare(batch)
    _, gradient = _loss_and_gradient(algorithm, batch, old_policy(batch, algorithm.method))
    assert filled.weights is not None and filled.advantages is not None
    expected = -filled.weights * filled.advantages
    if (
        name == "kimi"
        # each token carries its row's squared residual: |o| weights of 1 / |o| add up to 1
    ):
        expected = 2 * ZOO[name].tau * expected * batch.mask.sum(-1, keepdim=True)  # type: ignore[operator]
    torch.testing.assert_close(
        gradient, torch.where(batch.mask, expected, 0.0), atol=1e-7, rtol=1e-6
    )


def test_mini_batches_hold_whole_groups_and_have_denominators_of_their_own() -> None:
    batch, _ = _random_batch(6, rows=9)
    filled = _grpo(minibatches=2).prepare(batch)
    assert filled.minibatch is not None and filled.weights is not None
    assert filled.minibatch.tolist() == [0] * 6 + [1] * 3
    for m in (0, 1):
        assert float(filled.weights[filled.minibatch == m].sum()) == pytest.approx(1.0)
    few = _grpo(minibatches=8).prepare(batch)
    assert few.minibatch is not None and few.minibatch.unique().tolist() == [0, 1, 2]


def test_adapted_coefficients_survive_a_checkpoint() -> None:
    """beta, the entropy bonus and the reward statistics: a restored algorithm gives the same next
    step, a fresh one does not.
    """
    changes = dict(
        beta=0.1, kl_target=0.01, entropy_target=5.0, whiten="all", kl_in="reward", kl="k1"
    )
    ran, fresh, restored = (_make("reinforce", **changes) for _ in range(3))
    for seed in range(3):
        ran.prepare(_random_batch(seed)[0])
    restored.steering.load(json.loads(json.dumps(ran.steering.state())))
    batch, logp = _random_batch(9)
    a, b, c = (_loss_and_gradient(x, batch, logp)[1] for x in (ran, restored, fresh))
    torch.testing.assert_close(a, b, rtol=0, atol=0)
    assert not torch.allclose(a, c)
    assert ran.steering.beta != 0.1 and ran.steering.state()["entropy_bonus"] == pytest.approx(
        0.003
    )


def test_the_critic_trains_on_every_scored_token_alike_and_its_loss_is_the_clipped_square() -> None:
    batch, _ = _random_batch(3, rewards=[1.0, 0.0, NAN, 1.0, 1.0, 0.0])
    algorithm = _make("ppo", aggregation="sequence")
    filled = algorithm.prepare(batch)
    valued = algorithm.value_batch(filled)
    known = batch.mask & batch.scores.isfinite()[:, None]
    assert valued.weights is not None and filled.returns is not None and batch.values is not None
    torch.testing.assert_close(valued.weights, known / known.sum().double())
    values = batch.values + 0.05
    expected = 0.5 * ((values - filled.returns).square() * known).sum() / known.sum()
    larger = torch.maximum(
        (values - filled.returns).square(),
        (values.clamp(batch.values - 0.2, batch.values + 0.2) - filled.returns).square(),
    )
    assert torch.equal(larger, (values - filled.returns).square()), (
        "within the clip the square is the plain one"
    )
    torch.testing.assert_close(algorithm.compute_value_loss(valued, values).loss, expected)
