"""Loss of a process reward model against transformers' own forward, and figures of its report."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from comparisons import padded_states, policy
from torch import Tensor

from sixfold.batch import collate
from sixfold.model.scalar_head import scalar_head
from sixfold.recipe.schema import TrainerConfig
from sixfold.reward_model.step_model import step_model_of, step_root
from sixfold.reward_model.step_objective import StepLoss
from sixfold.reward_model.step_quality import UNLABELLED, step_quality
from sixfold.reward_model.step_rows import step_row
from sixfold.trainer.logprobs import Scoring
from sixfold.trainer.trainer import Trainer
from sixfold.types import Group, Task

SOLUTIONS: list[tuple[list[int], list[int], dict[int, float]]] = [
    ([3, 4], [5, 6, 7, 8], {1: 1.0, 3: 0.0}),
    ([9], [5, 6, 7, 8, 9, 10], {0: 0.25, 1: 1.0, 2: UNLABELLED, 5: 0.0}),
    ([3, 4, 5, 6], [11] * 9, {0: 0.75}),
]
"""The third has no step that is labelled wrong."""


def random_step_model(name: str = "qwen3") -> Any:
    own = policy(name)
    model = step_model_of(own, own.model, "newline")
    torch.manual_seed(1)
    for p in scalar_head(model).parameters():
        torch.nn.init.normal_(p, std=0.5)
    return model


def groups() -> list[Group]:
    return [
        Group(Task(f"t{n}", ""), [step_row(f"t{n}", 0, *solution)])
        for n, solution in enumerate(SOLUTIONS)
    ]


def expected_loss(model: Any) -> Tensor:
    """The mean over solutions of the mean over labelled steps, in plain loops."""
    found = []
    for prompt, ids, labels in SOLUTIONS:
        logits = scalar_head(model)(padded_states(model, prompt + ids))
        each = []
        for at, y in labels.items():
            p = logits[len(prompt) + at].softmax(-1)[1]
            if y != UNLABELLED:
                each.append(-(y * p.log() + (1 - y) * (1 - p).log()))
        found.append(torch.stack(each).mean())
    return torch.stack(found).mean()


def text_loss(model: Any, language: Any) -> Tensor:
    """The mean over solutions of the mean cross-entropy of the tokens of the right ones."""
    prompt, ids, _ = SOLUTIONS[2]
    logp = language.lm_head(padded_states(model, prompt + ids)).log_softmax(-1)
    each = [-logp[len(prompt) + at - 1, token] for at, token in enumerate(ids)]
    return torch.stack(each).mean() / len(SOLUTIONS)


@pytest.mark.parametrize("lm_weight", [0.0, 0.7])
@pytest.mark.parametrize("budget", [16, 20, 4096])
def test_loss_and_gradient_are_those_of_transformers_for_every_split(
    budget: int, lm_weight: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, other = random_step_model(), random_step_model()
    language = policy().model.requires_grad_(False) if lm_weight else None
    text = text_loss(other, language) if language else torch.tensor(0.0)
    expected = expected_loss(other) + lm_weight * text
    expected.backward()
    settings = TrainerConfig(max_tokens_per_microbatch=budget)
    trainer = Trainer(step_root(model, language), settings, Scoring(), 1)
    found: dict[str, Tensor] = {}

    def keep(*_: Any) -> bool:
        found.update({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
        return False

    monkeypatch.setattr(trainer, "_step", keep)
    loss = StepLoss(lm_weight)
    learned = trainer.learn(loss.prepare(collate(groups())), loss.compute_loss)
    assert learned.metrics["train/loss"] == pytest.approx(float(expected), rel=1e-5)
    if lm_weight:
        assert learned.metrics["prm/lm_loss"] == pytest.approx(float(text), rel=1e-5)
    assert (learned.microbatches == 1) == (budget == 4096)
    for name, p in other.named_parameters():
        assert p.grad is not None
        largest = float(p.grad.abs().max())
        assert torch.allclose(found[name], p.grad, rtol=1e-4, atol=1e-5 * largest), name


def test_a_new_model_says_one_half_and_half_of_its_steps_are_right() -> None:
    own = policy()
    loss = StepLoss()
    batch = loss.prepare(collate(groups()))
    out = loss.compute_loss(batch, torch.zeros(batch.tokens.shape))
    assert float(out.loss) == pytest.approx(math.log(2))
    # Scores of 0.5 count as right: 1 of 2 steps, 1 of 3, 1 of 1.
    assert float(out.sums["prm/accuracy"]) == pytest.approx((1 / 2 + 1 / 3 + 1) / 3)
    assert not any(p.any() for p in scalar_head(step_model_of(own, own.model, "x")).parameters())


def slow_quality(scores: list[list[float]], labels: list[list[float]]) -> dict[str, float]:
    """ProcessBench's evaluation and the calibration, in plain loops."""
    right, found, gaps = [], {True: [], False: []}, [0.0] * 10
    for solution, truth in zip(scores, labels, strict=True):
        for score, label in zip(solution, truth, strict=True):
            if label != UNLABELLED:
                right.append((score >= 0.5) == (label >= 0.5))
                gaps[min(int(score * 10), 9)] += score - label
        first = next((k for k, label in enumerate(truth) if label < 0.5), -1)
        if first >= 0 and truth[first] == UNLABELLED:
            continue
        said = next((k for k, score in enumerate(solution) if score < 0.5), -1)
        found[first >= 0].append(said == first)
    error, whole = (sum(found[wrong]) / len(found[wrong]) for wrong in (True, False))
    return {
        "accuracy": sum(right) / len(right),
        "calibration_error": sum(map(abs, gaps)) / len(right),
        "error_found": error,
        "all_right": whole,
        "first_error_f1": 2 * error * whole / (error + whole),
    }


def test_figures_are_those_of_processbench() -> None:
    draw = random.Random(3)
    scores, labels = [], []
    for _ in range(200):
        count = draw.randrange(1, 5)
        truth = [draw.choice([1.0, 1.0, 0.0, 0.6, UNLABELLED]) for _ in range(count)]
        labels.append(truth)
        scores.append([draw.random() if draw.random() < 0.4 else abs(t) * 0.9 for t in truth])
    found = step_quality([torch.tensor(s, dtype=torch.float64) for s in scores], [
        torch.tensor(t, dtype=torch.float64) for t in labels
    ])  # fmt: skip
    assert vars(found) == pytest.approx(slow_quality(scores, labels))


def test_without_solutions_of_a_sort_their_figures_are_unknown() -> None:
    right = step_quality([torch.tensor([0.9, 0.8])], [torch.tensor([1.0, 1.0])])
    assert right.all_right == 1.0 and math.isnan(right.error_found)
    assert math.isnan(right.first_error_f1)
    missed = step_quality([torch.tensor([0.9]), torch.tensor([0.1])], [
        torch.tensor([0.0]), torch.tensor([1.0])
    ])  # fmt: skip
    assert missed.first_error_f1 == 0.0 and missed.accuracy == 0.0
