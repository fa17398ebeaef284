"""Rewards of steps by a process reward model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from comparisons import saved
from tests.reward_model.test_step_loss import random_step_model
from tests.reward_model.test_step_models import PROMPT, TEXTS, own

from sixfold.environment.grade import Grade
from sixfold.errors import UserError
from sixfold.recipe.schema import ProcessScoringConfig, RewardScoringConfig
from sixfold.reward_model.step_reward import credits, process_reward
from sixfold.types import Task

CPU = RewardScoringConfig(device="cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(random_step_model(), own(), tmp_path_factory.mktemp("prm"))


def graded(
    folder: Path, ids: Any = None, texts: Sequence[str] = TEXTS, **settings: Any
) -> list[Grade]:
    reward = process_reward([str(folder)], ProcessScoringConfig(**settings), CPU)
    renderer = reward._scorer.renderer
    prompt = renderer.encode(Task("t", PROMPT))
    count = len(texts)
    return reward(
        [PROMPT] * count,
        texts,
        ids or [[*renderer.plain(text), *renderer.turn_end_tokens] for text in texts],
        [prompt] * count,
        [renderer.shown(prompt)] * count,
        ["stop"] * count,
    )


def test_sampled_tokens_and_texts_have_the_same_steps(folder: Path) -> None:
    reward = process_reward([str(folder)], ProcessScoringConfig(), CPU)
    ends = [reward._scorer.steps.ends(text) for text in TEXTS]
    scores = reward._scorer.score(Task("t", PROMPT), TEXTS, ends)
    unknown = [[99_999]] * len(TEXTS)  # ids of another tokenizer: the texts are read
    for grades in (graded(folder), graded(folder, unknown)):
        for grade, at, right in zip(grades, ends, scores, strict=True):
            assert grade.value == 0.0 and [end for end, _ in grade.steps] == at
            assert [score for _, score in grade.steps] == pytest.approx(right, abs=1e-5)
            assert grade.metrics["steps"] == len(at)
            assert grade.metrics["min"] == pytest.approx(min(right), abs=1e-5)
            assert grade.metrics["last"] == pytest.approx(right[-1], abs=1e-5)


@pytest.mark.parametrize("ids", [None, [[99_999]] * (len(TEXTS) + 1)])
def test_a_completion_beyond_the_context_costs_only_itself(folder: Path, ids: Any) -> None:
    expected = graded(folder, ids and ids[1:])
    first, *found = graded(folder, ids, ["1+1=2\n" * 200, *TEXTS])
    assert first.value is None and "context" in first.detail
    for grade, right in zip(found, expected, strict=True):
        assert [end for end, _ in grade.steps] == [end for end, _ in right.steps]
        for (_, score), (_, same) in zip(grade.steps, right.steps, strict=True):
            assert score == pytest.approx(same, abs=1e-5)


def test_other_ways_to_end_steps_and_to_give_credit(folder: Path) -> None:
    (whole, *_) = graded(folder, ends="token:d", credit="gain")
    assert [end for end, _ in whole.steps] == [len(TEXTS[0])]
    gains = graded(folder, credit="gain")
    for gain, plain in zip(gains, graded(folder), strict=True):
        assert sum(r for _, r in gain.steps) == pytest.approx(plain.steps[-1][1])


def test_credit_of_the_minimum_is_pures() -> None:
    scores = [0.9, 0.2, 0.7]
    for temperature in (0.1, 1.0):
        weights = [math.exp(-score / temperature) for score in scores]
        expected = [w * score / sum(weights) for w, score in zip(weights, scores, strict=True)]
        assert credits(scores, "min", temperature) == pytest.approx(expected)
    assert credits(scores, "min", 1e-6) == pytest.approx([0.0, 0.2, 0.0])
    assert credits(scores, "gain", 1.0) == pytest.approx([0.9, -0.7, 0.5])
    assert credits(scores, "score", 1.0) == scores
    assert credits([], "min", 0.1) == []


def test_names_that_are_no_process_reward_model(folder: Path) -> None:
    for paths, message in (
        ([str(folder)] * 3, "form no ensemble"),
        ([str(folder)] * 2, "belongs into environment.rewards"),
        (["stage:x"], "no stage before it"),
        ([" "], "Write prm:FOLDER"),
        (["http://localhost:1"], "the address of a server"),
        (["/nowhere"], r"environment\.rewards = '/nowhere': cannot be loaded"),
    ):
        with pytest.raises(UserError, match=message):
            process_reward(paths, ProcessScoringConfig(), CPU)
