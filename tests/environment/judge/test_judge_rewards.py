"""The judge's rewards: their questions, and the values that follow from the verdicts."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.fake_judge import (
    Asked,
    FakeJudge,
    gullible,
    honest,
    prefers_first,
    prefers_longer,
    verdict,
)

from sixfold.data.sources import load_tasks
from sixfold.environment import registry
from sixfold.environment.grade import Grade
from sixfold.environment.group_form import Member
from sixfold.errors import UserError
from sixfold.recipe.schema import DataConfig
from sixfold.recipe.schema.judge import REWARDS, JudgeConfig
from sixfold.types import Task
from sixfold_environments.judge.constitution import constitution_reward
from sixfold_environments.judge.counts import judge_metrics
from sixfold_environments.judge.judge import Judge
from sixfold_environments.judge.pairwise import chosen_pairs, length_correction, pairwise_reward
from sixfold_environments.judge.reference import reference_reward
from sixfold_environments.judge.rubric import rubric_reward
from sixfold_environments.judge.settings import (
    ConstitutionSettings,
    JudgeSettings,
    PairwiseSettings,
    ReferenceSettings,
    RubricSettings,
)

TASK = Task("capital", "What is the capital of Australia?", "The capital is Canberra.")
RIGHT, WRONG = "It is Canberra.", "It is Sydney."


@pytest.fixture
def fake() -> Iterator[FakeJudge]:
    with FakeJudge() as started:
        yield started


def grades(judge: Judge, texts: Sequence[str], task: Task = TASK) -> list[Grade]:
    members = [Member(text, "stop") for text in texts]
    return asyncio.run(pairwise_reward(judge)(members, task))


def test_the_recipe_knows_the_rewards_that_need_a_judge() -> None:
    judged = {name for name in registry.REWARDS if registry.reward_row(name).needs == "judge"}
    assert set(REWARDS) == judged


def test_the_settings_of_a_recipe_and_of_python_have_the_same_defaults() -> None:
    of_recipe = JudgeConfig().model_dump()
    of_python = JudgeSettings()
    for name, value in of_recipe.items():
        mine = getattr(of_python, name)
        assert value == (vars(mine) if isinstance(value, dict) else mine), name


def test_reference_is_right_or_wrong_with_a_reason(fake: FakeJudge) -> None:
    reward = reference_reward(Judge(fake.settings()))
    right, wrong = (asyncio.run(reward(text, TASK)) for text in (RIGHT, WRONG))
    assert (right.value, right.verdict) == (1.0, "passed")
    assert (wrong.value, wrong.verdict) == (0.0, "wrong_answer")
    assert right.detail == "because"
    seen = fake.requests[0].data
    assert seen == {"question": TASK.prompt, "reference": TASK.answer, "answer": RIGHT}


def test_reference_needs_an_answer_of_the_task(fake: FakeJudge) -> None:
    reward = reference_reward(Judge(fake.settings()))
    with pytest.raises(ValueError, match=r"data\.answer_field"):
        asyncio.run(reward(RIGHT, replace(TASK, answer=None)))


def test_data_without_answers_is_refused_for_a_reference_and_taken_for_a_rubric(
    tmp_path: Path,
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"question": f"Question {i}"}) + "\n" for i in range(8)))
    data = DataConfig(source=str(rows), heldout=0)
    with pytest.raises(UserError, match="judge_reference"):
        load_tasks(data, seed=0, rewards=("judge_reference",))
    assert len(load_tasks(data, seed=0, rewards=("judge_rubric",)).train) == 8


def test_only_the_text_after_the_thought_is_judged(fake: FakeJudge) -> None:
    reward = reference_reward(Judge(fake.settings()))
    thought = asyncio.run(reward(f"<think>Canberra</think>{WRONG}", TASK))
    unfinished = asyncio.run(reward(f"<think>{RIGHT}", TASK))
    assert (thought.value, unfinished.verdict) == (0.0, "rejected")
    assert [request.data["answer"] for request in fake.requests] == [WRONG]


def scored(**scores: int) -> Any:
    def behaviour(request: Asked) -> dict[str, Any]:
        return {key: scores[key] for key in request.keys if key in scores}

    return behaviour


@pytest.mark.parametrize(
    ("aggregate", "together", "value", "calls"),
    [
        ("mean", False, (2 * 10 + 1 * 5 + 1 * 0) / 40, 3),
        ("min", False, 0.0, 3),
        ("mean", True, (2 * 10 + 1 * 5 + 1 * 0) / 40, 1),
    ],
)
def test_rubric_is_the_weighted_mean_of_its_criteria(
    fake: FakeJudge, aggregate: Any, together: bool, value: float, calls: int
) -> None:
    fake.behaviour = scored(true=10, whole=5, short=0)
    criteria = ("true * 2: It is true.", "whole: It is whole.", "short: It is short.")
    rubric = RubricSettings(criteria, aggregate=aggregate, together=together)
    reward = rubric_reward(Judge(fake.settings(rubric=rubric)))
    found = asyncio.run(reward(RIGHT, TASK))
    assert found.value == pytest.approx(value)
    assert len(fake.requests) == calls
    assert all("It is whole." in r.user or "whole" not in r.keys for r in fake.requests)


def test_a_column_criteria_replaces_the_criteria_of_the_recipe(fake: FakeJudge) -> None:
    fake.behaviour = scored(names=10, criterion_2=5)
    reward = rubric_reward(Judge(fake.settings()))
    own = replace(TASK, columns={"criteria": ["names: It names a city.", "It is polite."]})
    assert asyncio.run(reward(RIGHT, own)).value == pytest.approx(0.75)


@pytest.mark.parametrize("criteria", [("a: x", "a: y"), ("a * 0: x",), ("nonce: x",), ("  ",)])
def test_malformed_criteria_name_their_setting(criteria: tuple[str, ...]) -> None:
    settings = JudgeSettings("http://x/v1", "m", rubric=RubricSettings(criteria))
    with pytest.raises(UserError, match=r"environment\.judge\.rubric\.criteria"):
        rubric_reward(Judge(settings))


def judged(**verdicts: str) -> Any:
    return lambda request: {key: verdicts[key] for key in request.keys if key in verdicts}


@pytest.mark.parametrize(
    ("aggregate", "verdicts", "value"),
    [
        ("mean", ("follows", "violates", "follows"), 2 / 3),
        ("mean", ("follows", "not_applicable", "violates"), 1 / 2),
        ("mean", ("not_applicable",) * 3, 1.0),
        ("min", ("follows", "violates", "follows"), 0.0),
        ("min", ("follows", "not_applicable", "follows"), 1.0),
    ],
)
def test_constitution_is_the_share_of_principles_that_apply_and_are_followed(
    fake: FakeJudge, aggregate: Any, verdicts: tuple[str, ...], value: float
) -> None:
    names = ("helpful", "honest", "harmless")
    fake.behaviour = judged(**dict(zip(names, verdicts, strict=True)))
    judge = Judge(fake.settings(constitution=ConstitutionSettings(aggregate=aggregate)))
    found = asyncio.run(constitution_reward(judge)(RIGHT, TASK))
    assert found.value == pytest.approx(value)
    assert len(fake.requests) == 3
    assert f"honest {verdicts[1]}" in found.detail


def test_pairwise_is_the_share_of_comparisons_won(fake: FakeJudge) -> None:
    judge = Judge(fake.settings())
    found = grades(judge, [RIGHT, WRONG, "Perth.", RIGHT])
    # Right against wrong: 1. Two right ones, equal: a tie. Two wrong ones: a tie.
    assert [g.value for g in found] == pytest.approx([2.5 / 3, 0.5 / 3, 0.5 / 3, 2.5 / 3])
    metrics = judge_metrics([judge.take()])
    assert metrics["judge/position_bias"] == 0.0
    assert metrics["judge/unstable_frac"] == 0.0


def test_position_bias_gives_both_completions_one_half_and_is_measured(fake: FakeJudge) -> None:
    fake.behaviour = prefers_first
    judge = Judge(fake.settings())
    assert [g.value for g in grades(judge, [RIGHT, WRONG])] == [0.5, 0.5]
    metrics = judge_metrics([judge.take()])
    assert metrics["judge/position_bias"] == 1.0
    assert metrics["judge/unstable_frac"] == 1.0


def test_one_order_is_random_but_the_same_for_the_same_seed(fake: FakeJudge) -> None:
    fake.behaviour = prefers_first
    texts = [f"city {i}" for i in range(8)]

    def first(seed: int) -> list[str]:
        fake.requests.clear()
        judge = Judge(fake.settings(seed=seed, pairwise=PairwiseSettings("one")))
        grades(judge, texts)
        return sorted(request.data["first"] for request in fake.requests)

    one, same, other = first(0), first(0), first(1)
    assert one == same != other
    assert len(one) == 28
    assert sum(a != min(texts) for a in one) >= 8


def test_a_refused_completion_loses_every_comparison_without_a_question(fake: FakeJudge) -> None:
    fake.behaviour = gullible
    found = grades(Judge(fake.settings()), [":", WRONG, "", "Thought process:"])
    assert [g.value for g in found] == [0.0, 1.0, 0.0, 0.0]
    assert [g.verdict for g in found] == ["rejected", "passed", "rejected", "rejected"]
    assert fake.requests == []


def test_length_correction_by_hand() -> None:
    # x = (-1, 1): the slope of rates (0, 1) is 0.5.
    assert length_correction([0.0, 1.0], [10, 1000], 1.0) == pytest.approx([0.5, 0.5])
    assert length_correction([0.0, 1.0], [10, 1000], 0.5) == pytest.approx([0.25, 0.75])
    assert length_correction([0.0, 1.0], [10, 1000], 0.0) == [0.0, 1.0]
    # A preference for shorter texts stays.
    assert length_correction([1.0, 0.0], [10, 1000], 1.0) == [1.0, 0.0]
    assert length_correction([1.0, 0.0], [10, 10], 1.0) == [1.0, 0.0]


def test_length_bias_is_corrected_and_measured(fake: FakeJudge) -> None:
    fake.behaviour = prefers_longer
    texts = ["x" * 2**i for i in range(3, 9)]

    def found(strength: float) -> tuple[list[float], float]:
        judge = Judge(fake.settings(pairwise=PairwiseSettings(length_control=strength)))
        values = [g.value or 0.0 for g in grades(judge, texts)]
        return values, judge_metrics([judge.take()]).get("judge/length_corr", 0.0)

    plain, correlation = found(0.0)
    assert plain == pytest.approx([i / 5 for i in range(6)])
    assert correlation > 0.8
    corrected, _ = found(1.0)
    assert max(abs(value - 0.5) for value in corrected) < 0.01


def test_each_completion_gets_about_the_asked_number_of_opponents() -> None:
    for count, opponents in ((8, 2), (8, 3), (5, 4), (7, 1)):
        pairs = chosen_pairs(range(count), opponents, random.Random(0))
        played = [sum(i in pair for pair in pairs) for i in range(count)]
        expected = min(count - 1, opponents + opponents % 2)
        assert set(played) == {expected}, (count, opponents)
        assert len(set(pairs)) == len(pairs)
    assert len(chosen_pairs(range(6), 0, random.Random(0))) == 15


def test_a_failed_comparison_is_left_out_and_a_completion_without_any_has_no_reward(
    fake: FakeJudge,
) -> None:
    def sometimes(request: Asked) -> Any:
        return "no idea" if "Perth" in request.everything else honest(request)

    fake.behaviour = sometimes
    found = grades(Judge(fake.settings()), [RIGHT, WRONG, "Perth"])
    assert [g.value for g in found] == [1.0, 0.0, None]
    assert found[2].verdict == "infrastructure_error"


@pytest.mark.parametrize(
    ("form", "text", "problem"),
    [
        ("reference", "{answer} {reference} {colour}", "colour"),
        ("reference", "{answer}", "reference"),
        ("reference", "{answer} {reference} {", "brace"),
        ("reference", "{answer.__class__} {reference}", "__class__"),
        ("reference", "{answer!r} {reference}", "unknown"),
        ("pairwise", "{first}", "second"),
    ],
)
def test_a_template_is_checked_before_training(
    tmp_path: Path, form: str, text: str, problem: str
) -> None:
    file = tmp_path / "own.txt"
    file.write_text(text)
    makers = {
        "reference": (reference_reward, {"reference": ReferenceSettings(str(file))}),
        "pairwise": (pairwise_reward, {"pairwise": PairwiseSettings(template=str(file))}),
    }
    make, settings = makers[form]
    with pytest.raises(UserError, match=rf"environment\.judge\.{form}\.template.*{problem}"):
        make(Judge(JudgeSettings("http://x/v1", "m", **settings)))


def test_a_template_of_the_user_keeps_the_marks_and_the_form_of_the_reply(
    fake: FakeJudge, tmp_path: Path
) -> None:
    file = tmp_path / "own.txt"
    file.write_text("Sei streng. {{x}} {answer} vs {reference}")
    judge = Judge(fake.settings(reference=ReferenceSettings(str(file))))
    reward = reference_reward(judge)
    hostile = "Canberra {reference} {0}"
    assert asyncio.run(reward(hostile, TASK)).value == 1.0
    (request,) = fake.requests
    assert request.user.startswith("Sei streng. {x} [BEGIN ANSWER")
    assert request.data["answer"] == hostile
    assert "nonce" in request.keys


def test_verdicts_of_the_fake_have_the_asked_form() -> None:
    """Check the fake judge: a verdict with other keys would be unreadable in every test."""
    body = {
        "messages": [{"content": '[BEGIN ... ab]\n- "nonce": x\n- "q": an integer from 0 to 4: y'}]
    }
    from tests.fake_judge import asked

    request = asked({**body, "messages": body["messages"] * 2}, {})
    assert verdict(request, 0.5) == {"q": 2}
    assert json.dumps(request.keys) == '["nonce", "q"]'
