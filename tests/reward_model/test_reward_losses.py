"""Loss of a reward model against formulas, and its gradient against transformers' own forward."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from comparisons import comparison, comparisons, padded_states, policy, random_reward_model
from torch import Tensor

from sixfold.batch import Batch, collate
from sixfold.errors import UserError
from sixfold.model.scalar_head import scalar_head
from sixfold.recipe.schema import RewardModelConfig, TrainerConfig
from sixfold.reward_model.losses import binary_cross_entropy, bradley_terry, centring
from sixfold.reward_model.model import scalar_root
from sixfold.reward_model.objective import RewardLoss
from sixfold.reward_model.rows import Head, scored_groups
from sixfold.trainer.logprobs import Scoring
from sixfold.trainer.spikes import NormLevel
from sixfold.trainer.trainer import Trainer
from sixfold.types import Group


def test_losses_are_their_formulas() -> None:
    chosen, rejected = torch.tensor([2.0, -1.0]), torch.tensor([1.0, 2.0])
    expected = [-math.log(1 / (1 + math.exp(-d))) for d in (1.0 - 0.5, -3.0 - 0.5)]
    assert bradley_terry(chosen, rejected, 0.5).tolist() == pytest.approx(expected)
    assert centring(chosen, rejected).tolist() == [9.0, 1.0]
    scores, labels = torch.tensor([0.7, -2.0]), torch.tensor([0.25, 1.0])
    p = [1 / (1 + math.exp(-r)) for r in (0.7, -2.0)]
    entropy = [-(0.25 * math.log(p[0]) + 0.75 * math.log(1 - p[0])), -math.log(p[1])]
    assert binary_cross_entropy(scores, labels).tolist() == pytest.approx(entropy)


def test_a_constant_changes_neither_loss_nor_gradient_and_the_gradient_is_a_probability() -> None:
    chosen = torch.tensor([0.3, -2.0, 40.0, -400.0], dtype=torch.float64, requires_grad=True)
    rejected = torch.tensor([1.0, -2.5, -40.0, 400.0], dtype=torch.float64)
    (gradient,) = torch.autograd.grad(bradley_terry(chosen, rejected).sum(), chosen)
    assert torch.allclose(-gradient, torch.sigmoid(rejected - chosen.detach()))
    shifted = bradley_terry(chosen + 8.0, rejected + 8.0)
    assert torch.allclose(shifted, bradley_terry(chosen, rejected))
    assert shifted.isfinite().all()


def groups_of(loss: str) -> list[Group]:
    if loss == "bradley_terry":
        return comparisons()
    labelled = [([3, 4], 1.0), ([5] * 9, 0.0), ([6, 7, 8], 0.25)]
    return [comparison(f"u{i}", [9, 2 + i], [one]) for i, one in enumerate(labelled)]


def expected_loss(model: Any, groups: list[Group], config: RewardModelConfig) -> Tensor:
    """The mean over comparisons of the mean over their pairs, in plain loops."""
    head = scalar_head(model)

    def score(ids: list[int], prompt: int) -> Tensor:
        states = padded_states(model, ids)
        used = states[-1] if config.head == "last" else states[prompt:].mean(0)
        return head(used)[0]

    found = []
    for group in groups:
        rows = [
            (score(t.tokens, t.prompt_length), float(t.reward.value or 0.0))
            for t in group.trajectories
            if t.reward
        ]
        if config.loss == "bce":
            found += [
                -(y * torch.sigmoid(r).log() + (1 - y) * torch.sigmoid(-r).log()) for r, y in rows
            ]
            continue
        pairs = [(a, b, x - y) for a, x in rows for b, y in rows if x > y]
        each = [
            -torch.sigmoid(a - b - margin * config.margin).log() + config.centring * (a + b) ** 2
            for a, b, margin in pairs
        ]
        found.append(torch.stack(each).mean())
    return torch.stack(found).mean()


def text_loss(model: Any, language: Any, groups: list[Group], config: RewardModelConfig) -> Tensor:
    """Cross-entropy of the best completions of each prompt, or of those that are labelled right."""
    found = []
    for group in groups:
        grades = [float(t.reward.value or 0.0) for t in group.trajectories if t.reward]
        for t, grade in zip(group.trajectories, grades, strict=True):
            best = grade == max(grades) > min(grades)
            if grade > 0.5 if config.loss == "bce" else best:
                logp = language.lm_head(padded_states(model, t.tokens)).log_softmax(-1)
                found += [-logp[i - 1, t.tokens[i]] for i in range(t.prompt_length, len(t.tokens))]
    return torch.stack(found).mean()


CASES: list[dict[str, Any]] = [
    {},
    {"margin": True, "centring": 0.3},
    {"head": "mean"},
    {"loss": "bce"},
    {"lm_weight": 0.3, "margin": True},
    {"lm_weight": 2.0, "head": "mean"},
    {"lm_weight": 0.3, "loss": "bce"},
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("budget", [16, 20, 4096])
def test_loss_and_gradient_are_those_of_transformers_for_every_split(
    case: dict[str, Any], budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = RewardModelConfig(**case)
    head: Head = config.head
    groups = groups_of(config.loss)
    model = random_reward_model(head=head)
    other = random_reward_model(head=head)
    language = policy().model.requires_grad_(False)
    expected = expected_loss(other, groups, config)
    if config.lm_weight:
        text = text_loss(other, language, groups, config)
        expected = expected + config.lm_weight * text
    expected.backward()
    settings = TrainerConfig(max_tokens_per_microbatch=budget)
    root = scalar_root(model, language if config.lm_weight else None)
    trainer = Trainer(root, settings, Scoring(chunk=3), 1)
    trainer.level = NormLevel(30, -20.0, 0.01)  # so the norm is reported as a spike
    found: dict[str, Tensor] = {}

    def keep(*_: Any) -> bool:
        found.update({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
        return False

    monkeypatch.setattr(trainer, "_step", keep)
    loss = RewardLoss(config)
    batch = loss.prepare(collate(scored_groups(groups, head)))
    learned = trainer.learn(batch, loss.compute_loss)
    assert learned.metrics["train/loss"] == pytest.approx(float(expected.detach()), rel=1e-5)
    if config.lm_weight:
        text_found = learned.metrics["reward_model/lm_loss"]
        assert text_found == pytest.approx(float(text.detach()), rel=1e-5)
    assert len(trainer.spikes) == 1
    assert (learned.microbatches == 1) == (budget == 4096)
    for name, p in other.named_parameters():
        assert p.grad is not None
        largest = float(p.grad.abs().max())
        assert torch.allclose(found[name], p.grad, rtol=1e-4, atol=1e-5 * largest), name


def test_a_label_that_is_no_probability_is_refused() -> None:
    batch: Batch = collate(scored_groups([comparison("x", [3], [([4], 2.5)])], "last"))
    with pytest.raises(UserError, match=r"reward_model\.loss = 'bce' .* 2\.5\. Use loss = 'brad"):
        RewardLoss(RewardModelConfig(loss="bce")).prepare(batch)


def test_comparisons_without_a_pair_have_no_weight() -> None:
    tie = comparison("tie", [3], [([4], 1.0), ([5], 1.0)])
    batch = collate(scored_groups([*comparisons(2), tie], "last"))
    weights = RewardLoss(RewardModelConfig()).prepare(batch).weights
    assert weights is not None and not weights[batch.group == 2].any()
    assert set(weights[batch.mask & (batch.group < 2)[:, None]].tolist()) == {0.5}
