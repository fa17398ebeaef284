"""Whole rows of the zoo and what can be laid over them: published losses, where rewards and the KL
land, and what the entropy rules hold back.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from golden import AGGREGATIONS as OURS
from golden import ALGORITHM_CASES as CASES
from golden import batch_of, close, spread
from torch import Tensor

from sixfold.algorithm.composed import Composed
from sixfold.algorithm.entropy import covariance
from sixfold.algorithm.zoo import ZOO
from sixfold.batch import Batch, collate, filled, final_rewards
from sixfold.types import Group, Reward, Task, Trajectory

torch.set_num_threads(1)
NAN = float("nan")


def make(name: str, horizon: int = 5, **changes: Any) -> Composed:
    return Composed(replace(ZOO[name], **changes), horizon)


def weighted(algorithm: Composed, batch: Batch, advantages: Tensor) -> Batch:
    """The batch that `algorithm` makes, with advantages that the test gives: those of its rewards
    are put aside.
    """
    return algorithm.prepare(batch).with_(advantages=advantages)


def gradient(algorithm: Composed, batch: Batch, logp: Tensor) -> tuple[Tensor, Tensor]:
    """(loss, its gradient at logp) of a batch that has its advantages."""
    logp = logp.detach().clone().requires_grad_()
    loss = algorithm.compute_loss(batch, logp).loss
    loss.backward()
    assert logp.grad is not None
    return loss.detach(), logp.grad


# --- published losses

RULES: dict[str, dict[str, Any]] = {
    "tis_token": {"correction": "truncated", "correction_high": "C"},
    "tis_sequence": {"correction": "truncated-sequence", "correction_high": "C"},
    "icepop_token_mask": {
        "correction": "masked",
        "correction_low": "alpha",
        "correction_high": "beta",
    },
    "mis_sequence_mask": {
        "correction": "masked-sequence",
        "correction_low": "Cmin",
        "correction_high": "Cmax",
    },
    "geo_sequence_mask": {
        "correction": "geometric",
        "correction_low": "lo",
        "correction_high": "hi",
    },
    "decoupled_ppo": {"correction": "decoupled"},
    "bypass_ppo": {},
}
"""Case -> the settings that give it; a name of the case's params stands for its value."""


def inputs(case: str) -> dict[str, Tensor]:
    return {
        name: torch.tensor(value, dtype=torch.float64)
        for name, value in CASES[case]["inputs"].items()
    }


@pytest.mark.parametrize("theirs", OURS)
@pytest.mark.parametrize("case", RULES)
def test_published_off_policy_losses(case: str, theirs: str) -> None:
    """The file's old_logp is the trainer's when the step began, rollout_logp the sampler's. Bypass
    has only the second.
    """
    i, params, expected = inputs(case), CASES[case]["params"], CASES[case]["expected"]
    mask = i["mask"].bool()
    changes = {key: params.get(value, value) for key, value in RULES[case].items()}
    algorithm = make(
        "grpo", aggregation=OURS[theirs], clip_low=params["eps"], clip_high=params["eps"], **changes
    )
    batch = batch_of(mask, i["rollout_logp"], rewards=final_rewards([1.0, 0.0, 0.0, 1.0], mask))
    if changes:
        batch = batch.with_(prox_logp=i["old_logp"])
    filled_in = weighted(algorithm, batch, spread(i["advantages"], mask))
    loss, grad = gradient(algorithm, filled_in, i["logp"])
    close(loss, torch.tensor(expected[f"loss_{theirs}"]))
    if f"grad_logp_{theirs}" in expected:
        close(grad, torch.tensor(expected[f"grad_logp_{theirs}"]))


@pytest.mark.parametrize("theirs", OURS)
def test_published_unbiased_kl(theirs: str) -> None:
    i, params, expected = (
        inputs("grpo_unbiased_kl_v32"),
        CASES["grpo_unbiased_kl_v32"]["params"],
        CASES["grpo_unbiased_kl_v32"]["expected"],
    )
    mask = i["mask"].bool()
    eps = params["eps"]
    algorithm = make(
        "grpo",
        beta=params["beta"],
        kl="k3-unbiased",
        aggregation=OURS[theirs],
        clip_low=eps,
        clip_high=eps,
    )
    batch = batch_of(
        mask,
        i["old_logp"],
        ref_logp=i["ref_logp"],
        rewards=final_rewards([1.0, 0.0, 0.0, 1.0], mask),
    )
    loss, grad = gradient(
        algorithm, weighted(algorithm, batch, spread(i["advantages"], mask)), i["logp"]
    )
    close(loss, torch.tensor(expected[f"loss_{theirs}"]))
    if f"grad_logp_{theirs}" in expected:
        close(grad, torch.tensor(expected[f"grad_logp_{theirs}"]))


def test_published_sequence_mask_as_part_of_a_loss() -> None:
    """The dropped rows (those of A < 0 that the policy has left) lose their gradient and stay in
    the denominators; the others keep theirs.

    The file measures the distance from rollout_logp to old_logp, so the policy is put at old_logp.
    """
    case = CASES["offpolicy_sequence_mask"]
    i = inputs("offpolicy_sequence_mask")
    mask, advantages = i["mask"].bool(), spread(i["advantages"], i["mask"].bool())
    batch = batch_of(mask, i["rollout_logp"], rewards=final_rewards([1.0, 0.0, 0.0, 1.0], mask))
    masked, plain = (
        make("grpo", correction="negative-sequence", correction_high=case["params"]["delta"]),
        make("grpo"),
    )
    _, grad = gradient(masked, weighted(masked, batch, advantages), i["old_logp"])
    _, whole = gradient(plain, weighted(plain, batch, advantages), i["old_logp"])
    keep = torch.tensor(case["expected"]["keep"])
    assert not keep.all() and whole[~keep].any()
    close(grad, torch.where(keep[:, None], whole, 0.0))


def test_decoupled_is_ppo_where_the_sampler_is_the_proximal_policy() -> None:
    batch, logp = ragged()
    same = batch.with_(prox_logp=batch.old_logp)
    decoupled, plain = make("ppo", correction="decoupled"), make("ppo")
    ours, theirs = (
        gradient(decoupled, decoupled.prepare(same), logp),
        gradient(plain, plain.prepare(batch), logp),
    )
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    stale = batch.with_(prox_logp=batch.old_logp + 0.3)
    assert not torch.allclose(gradient(decoupled, decoupled.prepare(stale), logp)[1], theirs[1])


# --- where rewards land


def ragged(
    seed: int = 0, rows: int = 8, width: int = 7, scores: list[float] | None = None
) -> tuple[Batch, Tensor]:
    """Groups of four rows, 1 to width - 1 tokens each, every field filled in, in float64; and the
    log-probs of a policy that has moved.
    """
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, width, (rows,), generator=g)
    mask = (torch.arange(width) >= 1) & (torch.arange(width) <= lengths[:, None])
    old, move, values = (
        torch.randn(rows, width, generator=g, dtype=torch.float64) for _ in range(3)
    )
    old = (-old.abs() - 0.1) * mask
    rewards = final_rewards(scores or torch.rand(rows, generator=g).tolist(), mask).double()
    batch = batch_of(
        mask,
        old,
        torch.arange(rows) // 4,
        rewards=rewards,
        values=values * mask,
        ref_logp=(old - 0.3 * move) * mask,
    )
    batch = batch.with_(
        prox_logp=old,
        entropy=move.abs(),
        source=torch.arange(rows) % 2,
        truncated=lengths >= width - 2,
        parts=torch.stack([rewards.sum(-1), move[:, 0]], -1),
        greedy=(torch.arange(rows) // 4) * 0.25,
    )
    batch = replace(batch, part_names=("one", "two"))
    return batch.with_(lengths=lengths + 1), old + 0.2 * move


def one_row(rewards: list[float], values: list[float], mask: list[int] | None = None) -> Batch:
    """Two rows: the one given after a prompt token, and one that is all zeros, so that whitening
    has something to centre.
    """
    width = len(rewards) + 1
    table = torch.zeros(2, width, dtype=torch.float64)
    table[0, 1:] = torch.tensor(rewards)
    valued = torch.zeros_like(table)
    valued[0, 1:] = torch.tensor(values)
    sampled = torch.ones(2, width, dtype=torch.bool)
    sampled[:, 0] = False
    sampled[0, 1:] = torch.tensor(mask or [1] * len(rewards)).bool()
    return batch_of(sampled, torch.zeros_like(table), rewards=table, values=valued)


def standardised(values: list[float]) -> list[float]:
    mean = sum(values) / len(values)
    std = math.sqrt(sum((v - mean) ** 2 for v in values) / len(values))
    return [(v - mean) / std for v in values]


def test_a_kl_in_the_reward_lands_on_every_token() -> None:
    """By hand: beta = 0.5, gamma = lam = 1, score 1 on the third token, KLs of 0.2, -0.4, 0.6
    on the three, values of 0.3, 0.1, 0.2.
    """
    batch = one_row([0.0, 0.0, 1.0], [0.3, 0.1, 0.2])
    old, ref = torch.zeros(2, 4, dtype=torch.float64), torch.zeros(2, 4, dtype=torch.float64)
    old[0, 1:], ref[0, 1:] = torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([-1.2, -1.6, -1.1])
    algorithm = make("ppo", beta=0.5, kl="k1", kl_in="reward", gamma=1.0, lam=1.0)
    made = algorithm.prepare(replace(batch, old_logp=old, ref_logp=ref))
    per_token = [-0.5 * 0.2, 0.5 * 0.4, 1.0 - 0.5 * 0.6]
    returns = [
        sum(per_token[t:]) for t in range(3)
    ]  # 0.8, 0.9, 0.7; with the KL on the last token alone they would be equal
    assert filled(made.returns, "returns")[0, 1:].tolist() == pytest.approx(returns)
    advantages = [r - v for r, v in zip(returns, [0.3, 0.1, 0.2], strict=True)]
    assert filled(made.advantages, "advantages")[0, 1:].tolist() == pytest.approx(
        standardised([*advantages, 0.0, 0.0, 0.0])[:3]
    )


def test_gae_of_process_rewards_by_hand() -> None:
    """With lam = 0.5, gamma = 1 and an observation token that is skipped: delta = r + V' - V,
    A = delta + 0.5 A'.
    """
    batch = one_row([0.25, 9.0, 0.0, 1.0], [0.5, 7.0, 0.25, 0.75], mask=[1, 0, 1, 1])
    batch.rewards[0, 2] = 0.0  # no reward on a token that was not sampled
    made = make("ppo", lam=0.5, gamma=1.0).prepare(batch)
    last = 1.0 - 0.75
    middle = 0.0 + 0.75 - 0.25 + 0.5 * last
    first = 0.25 + 0.25 - 0.5 + 0.5 * middle
    assert filled(made.returns, "returns")[0].tolist() == pytest.approx(
        [0.0, first + 0.5, 0.0, middle + 0.25, last + 0.75]
    )
    got = filled(made.advantages, "advantages")[0]
    assert got.tolist() == pytest.approx(
        [
            0.0,
            *(
                standardised([first, middle, last, 0, 0, 0, 0])[k] if k >= 0 else 0.0
                for k in (0, -1, 1, 2)
            ),
        ]
    )


def trajectory(sample: int, reward: Reward, tokens: int = 4) -> Trajectory:
    return Trajectory.one_turn(
        "t", sample, [1, 1], [1] * tokens, [-1.0] * tokens, [0] * tokens, "stop", reward=reward
    )


def test_process_rewards_from_the_environment_to_the_advantages() -> None:
    """From `Reward.steps` on: the group's five step rewards are standardised together; each
    token gets those that end at it or later.
    """
    rewards = [Reward(1.0, steps=((3, 0.5),)), Reward(0.0, steps=((2, 0.25), (4, -0.75)))]
    batch = collate([Group(Task("t", "?"), [trajectory(k, r) for k, r in enumerate(rewards)])])
    assert batch.rewards.tolist() == [[0, 0, 0, 0.5, 0, 1.0], [0, 0, 0.25, 0, -0.75, 0.0]]
    assert batch.step_ends is not None and batch.step_ends.int().tolist() == [
        [0, 0, 0, 1, 0, 1],
        [0, 0, 1, 0, 1, 1],
    ]
    half, one, quarter, minus, zero = standardised([0.5, 1.0, 0.25, -0.75, 0.0])
    expected = [
        [0, 0, half + one, half + one, one, one],
        [0, 0, quarter + minus + zero, minus + zero, minus + zero, zero],
    ]
    made = make("grpo", advantage="process").prepare(batch)
    for row, hand in zip(filled(made.advantages, "advantages").tolist(), expected, strict=True):
        assert row == pytest.approx(hand, abs=1e-5)
    returns = filled(
        make("ppo", lam=1.0).prepare(batch.with_(values=torch.zeros(2, 6))).returns,
        "returns",
    )
    assert returns.tolist() == [[0, 0, 1.5, 1.5, 1.0, 1.0], [0, 0, -0.5, -0.75, -0.75, 0.0]]


def test_a_shift_by_one_token_is_seen() -> None:
    """A trajectory of one sampled token. Its reward, advantage and gradient are at that token. The
    tokens before and after it have none.
    """
    group = Group(Task("t", "?"), [trajectory(k, Reward(float(k)), tokens=1) for k in range(2)])
    batch = collate([group])
    algorithm = make("dr_grpo")
    made = algorithm.prepare(batch)
    assert filled(made.advantages, "advantages").tolist() == [[0, 0, -0.5], [0, 0, 0.5]]
    _, grad = gradient(algorithm, made, batch.old_logp)
    assert grad[0, 2] > 0 > grad[1, 2] and not grad[:, :2].any()
    for shift in (-1, 1):
        moved = made.with_(advantages=filled(made.advantages, "advantages").roll(shift, dims=1))
        assert not gradient(algorithm, moved, batch.old_logp)[1].any()


# --- what is steered


@pytest.mark.parametrize(("gap", "rises"), [(0.5, True), (0.05, False)])
def test_adaptive_beta_moves_the_kl_towards_its_target(gap: float, rises: bool) -> None:
    """Target 0.1, and samples whose KL is five times that or half: a step moves beta by 0.2 n / 10
    000 of itself, n rows.
    """
    batch, logp = ragged()
    batch = batch.with_(ref_logp=batch.old_logp - gap)
    algorithm = make("grpo", beta=0.1, kl_target=0.1)
    betas = [0.1 * (1 + (0.2 if rises else -0.2) * 8 / 10_000) ** k for k in (1, 2, 3)]
    for beta in betas:
        made = algorithm.prepare(batch)
        output = algorithm.compute_loss(made, logp)
        assert float(output.means["algorithm/beta"][0, 1]) == pytest.approx(beta, rel=1e-9)
        r = (logp - filled(batch.ref_logp, "ref_logp"))[batch.mask]
        weight = filled(made.weights, "weights")[batch.mask]
        assert float(output.loss - output.sums["train/pg_loss"]) == pytest.approx(
            beta * float((weight * ((-r).exp() + r - 1)).sum()), rel=1e-6
        )


def entropies(logits: Tensor) -> Tensor:
    return -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)


@pytest.mark.parametrize("bonus", [0.0, 0.05])
def test_an_entropy_bonus_raises_the_entropy(bonus: float) -> None:
    """A softmax policy with nothing to gain (all rewards equal), trained through compute_loss: the
    bonus alone moves it, up its own gradient.
    """
    logits = torch.tensor([2.0, 0.0, -1.0], dtype=torch.float64, requires_grad=True)
    actions = torch.tensor([0, 0, 0, 1])
    mask = torch.tensor([[False, True]] * 4)
    algorithm = make("dr_grpo", horizon=1, entropy_bonus=bonus)
    before = float(entropies(logits))
    for _ in range(20):
        logp = torch.stack(
            [torch.zeros(4, dtype=torch.float64), logits.log_softmax(-1)[actions]], 1
        )
        entropy = torch.where(mask, entropies(logits), 0.0)
        batch = algorithm.prepare(
            batch_of(mask, logp.detach(), rewards=final_rewards([1.0] * 4, mask), entropy=entropy)
        )
        algorithm.compute_loss(batch, logp).loss.backward()
        assert logits.grad is not None
        if bonus:
            p, h = logits.detach().softmax(-1), entropies(logits.detach())
            torch.testing.assert_close(logits.grad, bonus * p * (p.log() + h))
        with torch.no_grad():
            logits -= 5.0 * logits.grad
        logits.grad = None
    assert float(entropies(logits)) > before + 0.1 if bonus else float(entropies(logits)) == before


# --- the entropy rules


def long_batch() -> tuple[Batch, Tensor]:
    """Forty rows of ten tokens: enough for shares of tokens to be whole numbers."""
    g = torch.Generator().manual_seed(4)
    mask = torch.ones(40, 11, dtype=torch.bool)
    mask[:, 0] = False
    old, entropy = (torch.randn(40, 11, generator=g, dtype=torch.float64) for _ in range(2))
    rewards = final_rewards(torch.rand(40, generator=g).tolist(), mask).double()
    batch = batch_of(mask, -old.abs() * mask, torch.arange(40) // 4, rewards=rewards)
    return batch.with_(prox_logp=batch.old_logp, entropy=entropy.abs()), batch.old_logp + 0.05 * old


def test_top_entropy_trains_the_fifth_of_the_tokens_with_the_highest_entropy() -> None:
    batch, logp = long_batch()
    algorithm, plain = make("dr_grpo", 10, entropy_rule="top-entropy"), make("dr_grpo", 10)
    _, grad = gradient(algorithm, algorithm.prepare(batch), logp)
    _, whole = gradient(plain, plain.prepare(replace(batch, prox_logp=None)), logp)
    entropy = filled(batch.entropy, "entropy")
    kept = batch.mask & (entropy >= entropy[batch.mask].sort().values[-80])
    assert int(kept.sum()) == 80 == 0.2 * int(batch.mask.sum())
    torch.testing.assert_close(grad, torch.where(kept, whole, 0.0), rtol=0, atol=0)
    assert 70 < int((grad != 0).sum()) <= 80


def test_clip_cov_takes_the_gradient_of_the_chosen_tokens_and_of_no_other() -> None:
    """400 tokens, so one is chosen (2e-4 of them is less than one), out of those whose covariance
    is in the paper's band of 1 to 5.
    """
    batch, _ = long_batch()
    batch = batch.with_(old_logp=3 * batch.old_logp, prox_logp=3 * batch.old_logp)
    algorithm, plain = (
        make("rloo", 10, entropy_rule="clip-cov", advantage="group_zscore"),
        make("rloo", 10, advantage="group_zscore"),
    )
    made = algorithm.prepare(batch)
    _, grad = gradient(algorithm, made, filled(batch.prox_logp, "prox_logp"))
    _, whole = gradient(plain, plain.prepare(batch), filled(batch.prox_logp, "prox_logp"))
    cov = covariance(filled(made.advantages, "advantages"), batch.old_logp, batch.mask)
    cut = (grad == 0) & (whole != 0)
    assert int(cut.sum()) == 1 and 1.0 < float(cov[cut]) < 5.0
    torch.testing.assert_close(grad, torch.where(cut, 0.0, whole), rtol=0, atol=0)


def test_kl_cov_penalises_the_tokens_of_largest_covariance_and_no_other() -> None:
    """400 tokens, 2e-3 of them is one: there the loss is -ratio A + |log-ratio|, elsewhere the
    plain one.
    """
    batch, logp = long_batch()
    algorithm, plain = make("dr_grpo", 10, entropy_rule="kl-cov"), make("dr_grpo", 10)
    made = algorithm.prepare(batch)
    advantages, old = filled(made.advantages, "advantages"), filled(batch.prox_logp, "prox_logp")
    cov = covariance(advantages, old, batch.mask)
    chosen = cov == cov.max()
    assert torch.equal(filled(made.marked, "marked"), chosen) and int(chosen.sum()) == 1
    _, grad = gradient(algorithm, made, logp)
    _, whole = gradient(plain, plain.prepare(batch), logp)
    penalised = filled(made.weights, "weights") * (
        (logp - old).sign() - (logp - old).exp() * advantages
    )
    torch.testing.assert_close(grad, torch.where(chosen, penalised, whole))
    assert not torch.allclose(grad, whole)


def test_kl_cov_does_not_train_on_rounding() -> None:
    """If trainer and sampler differ by a millionth of a nat, |gap| has a full gradient with the
    sign of the rounding. The rule must take none.
    """
    batch, _ = long_batch()
    algorithm, plain = make("dr_grpo", 10, entropy_rule="kl-cov"), make("dr_grpo", 10)
    made = algorithm.prepare(batch)
    assert bool(filled(made.marked, "marked").any())
    for gap in (1e-6, -1e-6):
        _, grad = gradient(algorithm, made, batch.old_logp + gap)
        _, whole = gradient(plain, plain.prepare(batch), batch.old_logp + gap)
        torch.testing.assert_close(grad, whole, rtol=1e-5, atol=1e-9)


def test_a_kl_that_is_not_finite_is_not_taken_for_a_failed_check() -> None:
    batch, _ = long_batch()
    where = batch.mask.nonzero()[0]
    ref = torch.where(batch.mask, batch.old_logp, 0.0)
    ref[where[0], where[1]] = NAN
    with pytest.raises(
        ValueError, match="the KL to the reference is not finite on a sampled token"
    ):
        make("rloo", 10, beta=0.1).prepare(batch.with_(ref_logp=ref))


def test_truncation_never_raises_the_reward() -> None:
    """stop-properly: rewards of 1 become 0, rewards of -1 stay -1, and who stopped by himself keeps
    his.
    """
    mask = torch.tensor([[False, True, True]] * 4)
    batch = batch_of(
        mask,
        torch.zeros(4, 3),
        rewards=final_rewards([1.0, -1.0, 1.0, -1.0], mask),
        truncated=torch.tensor([True, True, False, False]),
    )
    made = make("reinforce", length_penalty="stop-properly").prepare(batch)
    assert filled(made.advantages, "advantages")[:, 1].tolist() == [0.0, -1.0, 1.0, -1.0]


def test_a_process_reward_belongs_on_a_sampled_token() -> None:
    for index in (0, 3, -1):
        reward = Reward(1.0, steps=((index, 0.5),))
        t = Trajectory.one_turn("t", 0, [5], [6, 7], [-1.0, -1.0], [0, 0], "stop", reward=reward)
        with pytest.raises(
            ValueError, match=f"is on token {index}, which the policy did not sample"
        ):
            collate([Group(Task("t", "?"), [t])])


# --- rewards reshaped


def test_whitening_per_source_makes_two_scales_alike() -> None:
    """One source pays 0 or 1, the other 0 or 100. Whitened together, the first hardly counts.
    Whitened per source, both have the same weight.
    """
    rows = 16
    mask = torch.tensor([[False, True, True]] * rows)
    source = torch.arange(rows) // 8
    scores = [float(k % 2) * (1.0 if k < 8 else 100.0) for k in range(rows)]
    batch = batch_of(
        mask,
        torch.full((rows, 3), -1.0) * mask,
        torch.arange(rows) // 4,
        rewards=final_rewards(scores, mask),
        source=source,
    )
    sizes = {}
    for how in ("none", "all", "source"):
        advantages = filled(make("dr_grpo", whiten=how).prepare(batch).advantages, "advantages")[
            :, 1
        ].abs()
        sizes[how] = float(advantages[source == 1].mean() / advantages[source == 0].mean())
    assert sizes == pytest.approx({"none": 100.0, "all": 100.0, "source": 1.0}, rel=1e-4)


@pytest.mark.parametrize("only", [False, True])
def test_overlong_penalty_applies_to_long_completions_only(only: bool) -> None:
    """Limit 10, buffer 5: six tokens cost 0.2, ten cost 1. Rows 1 and 2 have ten; only row 2 was
    cut off.
    """
    lengths = torch.tensor([6, 10, 10, 3])
    mask = (torch.arange(12) >= 2) & (torch.arange(12) < 2 + lengths[:, None])
    batch = batch_of(
        mask,
        -1.0 * mask,
        rewards=final_rewards([1.0] * 4, mask),
        truncated=torch.tensor([False, False, True, False]),
    )
    batch = batch.with_(lengths=lengths + 2, prompt_lengths=torch.full((4,), 2))
    algorithm = make("dr_grpo", 10, overlong_buffer=0.5, overlong_truncated_only=only)
    penalties = [0.0, 0.0, -1.0, 0.0] if only else [-0.2, -1.0, -1.0, 0.0]
    expected = [p - sum(penalties) / 4 for p in penalties]
    advantages = filled(algorithm.prepare(batch).advantages, "advantages")
    assert advantages[:, 2].tolist() == pytest.approx(expected)


def test_the_weights_of_rewards_by_name() -> None:
    """GDPO by hand: rewards a and b of two answers are (1, 0) and (0, 10), with weights 3 and 1.
    The z-scores are +-1, the sums +-2, and +-1 over the batch; with weights 1 and 3 they turn.
    """
    for weights, expected in (({"a": 3.0}, 1.0), ({"a": 1.0, "b": 3.0}, -1.0)):
        groups = [Group(Task("t", ""), [_answer(1.0, 0.0), _answer(0.0, 10.0)])]
        algorithm = make("gdpo")
        algorithm.part_weights = weights
        advantages = filled(algorithm.prepare(collate(groups)).advantages, "advantages")
        assert advantages[:, 1].tolist() == pytest.approx([expected, -expected], abs=1e-5)


def _answer(a: float, b: float) -> Trajectory:
    """One sampled token with the named rewards a and b."""
    reward = Reward(a + b, {"b": b, "a": a})
    return Trajectory.one_turn("t", 0, [1], [2], [-1.0], [0], "stop", reward=reward)


# --- failed checks

OPTIONS: list[dict[str, Any]] = [
    {},
    {"whiten": "source"},
    {"length_penalty": "kimi"},
    {"length_penalty": "cosine"},
    {"overlong_buffer": 0.4},
    {"beta": 0.1, "kl": "k1", "kl_in": "reward"},
    {"entropy_bonus": 0.1},
    {"advantage": "process"},
]


@pytest.mark.mostly_slow(13)
@pytest.mark.parametrize("name", [name for name in ZOO if not ZOO[name].needs_teacher])
@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_a_failed_check_trains_nothing(name: str, beta: float) -> None:
    """Row 2's reward is unknown, and all of the second group's: no gradient there, finite
    elsewhere, and the critic learns nothing of them.
    """
    scores = [1.0, 0.0, NAN, 0.5, NAN, NAN, NAN, NAN]
    batch, _ = ragged(3, scores=scores)
    logp = (
        batch.old_logp
    )  # on policy: the narrow clip of GSPO would take every gradient of a policy that has moved
    kl: dict[str, Any] = {"kl": "k2", "kl_in": "loss"} if beta else {}
    algorithm = make(name, beta=beta, minibatches=2, **kl)
    made = algorithm.prepare(batch)
    loss, grad = gradient(algorithm, made, logp)
    failed = torch.tensor(scores).isnan()
    assert (
        bool(loss.isfinite())
        and bool(grad.isfinite().all())
        and not grad[failed].any()
        and grad[~failed].any()
    )
    assert not filled(made.advantages, "advantages")[failed].any()
    if algorithm.method.needs_critic:
        values = filled(batch.values, "values").clone().requires_grad_()
        algorithm.compute_value_loss(algorithm.value_batch(made), values).loss.backward()
        assert (
            values.grad is not None and not values.grad[failed].any() and values.grad[~failed].any()
        )


@pytest.mark.parametrize("option", OPTIONS, ids=str)
def test_a_failed_check_leaves_the_other_rows_as_they_were(option: dict[str, Any]) -> None:
    """Text and length of the failed row change no other row's advantage."""
    scores = [1.0, 0.0, NAN, 0.5, 1.0, 0.0, 1.0, 1.0]
    made = []
    for tokens in (1, 6):
        batch, _ = ragged(3, scores=[0.0] * 8)
        mask = batch.mask.clone()
        mask[2] = (torch.arange(7) >= 1) & (torch.arange(7) <= tokens)
        changed = batch_of(
            mask,
            batch.old_logp,
            batch.group,
            rewards=final_rewards(scores, mask).double(),
            ref_logp=batch.ref_logp,
        )
        changed = changed.with_(
            lengths=mask.sum(-1) + 1,
            source=filled(batch.source, "source"),
            step_ends=final_rewards(torch.ones(8), mask).bool(),
        )
        made.append(filled(make("dr_grpo", 6, **option).prepare(changed).advantages, "advantages"))
    others = torch.arange(8) != 2
    torch.testing.assert_close(made[0][others], made[1][others])
