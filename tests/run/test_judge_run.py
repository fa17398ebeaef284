"""A run whose reward is a judging model: metrics, resume, budget, summary and report."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sixfold.errors import BudgetSpent, UserError
from sixfold.recipe.schema import Recipe
from sixfold.recipe.toml import parse_recipe
from sixfold.run.start import train_run
from tests.fake_judge import Asked, FakeJudge

from .processes import metrics, tiny_recipe


@pytest.fixture
def fake() -> Iterator[FakeJudge]:
    def digits(request: Asked) -> dict[str, Any]:
        right = any(digit in request.data["answer"] for digit in "02468")
        return {"verdict": "right" if right else "wrong"}

    with FakeJudge(digits) as started:
        yield started


def recipe(folder: Path, fake: FakeJudge, **more: Any) -> Recipe:
    given = {
        "run__name": "judged",
        "environment__rewards": '["judge_reference"]',
        "environment__judge__url": fake.url,
        "environment__judge__model": "fake-qwen",
        "environment__judge__input_price": 1.0,
        "environment__judge__output_price": 10.0,
        **more,
    }
    return parse_recipe('run.name = "judged"', "test", tiny_recipe(folder, **given))


def test_a_run_with_a_judge_reports_its_cost_and_repeats_no_question(
    tmp_path: Path, fake: FakeJudge
) -> None:
    assert train_run(recipe(tmp_path, fake, run__steps=2)) == 0
    folder = tmp_path / "judged"
    first = metrics(folder)
    assert [step["judge/calls_total"] for step in first] == sorted(
        step["judge/calls_total"] for step in first
    )
    for step in first:
        assert step["judge/cost_usd"] == pytest.approx(step["judge/calls"] * 0.0002)
        assert 0.0 <= step["judge/cached_frac"] <= 1.0
    about = json.loads((folder / "summary.json").read_text())["judge"]
    assert about["model"] == "fake-qwen" and about["family"] == "qwen"
    assert about["calls"] == len(fake.requests)
    assert "Judge: cost of the run" in (folder / "report.html").read_text()
    stored = (folder / "judge" / "answers-0.jsonl").read_text()
    assert len(stored.splitlines()) == len(fake.requests)

    texts = [request.user.replace(request.nonce, "") for request in fake.requests]
    assert len(set(texts)) == len(texts)
    again = recipe(tmp_path, fake, run__steps=3)
    assert train_run(again, resume=folder) == 0
    assert metrics(folder)[:2] == first
    texts = [request.user.replace(request.nonce, "") for request in fake.requests]
    assert len(set(texts)) == len(texts)


def test_a_run_stops_at_its_budget_with_a_checkpoint_and_resumes_with_a_larger_one(
    tmp_path: Path, fake: FakeJudge
) -> None:
    whole = recipe(tmp_path, fake, run__steps=3, run__name="whole")
    assert train_run(whole) == 0
    asked = [metrics(tmp_path / "whole")[i]["judge/calls_total"] for i in range(3)]
    budget = int(asked[1]) + 1
    small = recipe(tmp_path, fake, run__steps=3, environment__judge__budget_calls=budget)
    folder = tmp_path / "judged"
    with pytest.raises(BudgetSpent, match=r"budget_calls.*step-000002.*--resume"):
        train_run(small)
    assert (folder / "checkpoints" / "step-000002" / "manifest.json").is_file()
    fake.requests.clear()
    enough = recipe(tmp_path, fake, run__steps=3, environment__judge__budget_calls=100_000)
    assert train_run(enough, resume=folder) == 0
    answers = (folder / "judge" / "answers-0.jsonl").read_text().splitlines()
    assert len(answers) == budget + len(fake.requests), "no answer was paid for and lost"
    mean = [[step["reward/mean"] for step in metrics(tmp_path / n)] for n in ("whole", "judged")]
    assert mean[0] == mean[1]


def test_a_rejected_key_stops_the_run_before_it_begins(tmp_path: Path, fake: FakeJudge) -> None:
    fake.statuses = [401] * 1000
    with pytest.raises(UserError, match=r"401.*SIXFOLD_JUDGE_KEY"):
        train_run(recipe(tmp_path, fake))
    assert not (tmp_path / "judged").exists()


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"environment__judge__model": ""}, "environment.judge.model"),
        ({"environment__judge__budget_usd": 1, "environment__judge__input_price": 0,
          "environment__judge__output_price": 0}, "environment.judge.input_price"),
        ({"environment__judge__url": "api.openai.com"}, "environment.judge.url"),
        ({"environment__judge__url": "https://me:secret@host/v1"}, "environment.judge.url"),
        ({"environment__judge__url": "https://host/v1?key=1"}, "environment.judge.url"),
        ({"environment__judge__rubric__template": "no/such/file.txt",
          "environment__rewards": '["judge_rubric"]'}, "environment.judge.rubric.template"),
    ],
)  # fmt: skip
def test_wrong_settings_of_a_judge_are_named(
    tmp_path: Path, fake: FakeJudge, settings: dict[str, Any], named: str
) -> None:
    with pytest.raises(UserError, match=named.replace(".", r"\.")):
        train_run(recipe(tmp_path, fake, **settings))
