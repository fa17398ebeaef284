"""`sixfold audit` with a judge's rewards, and `sixfold critique`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.fake_judge import Asked, FakeJudge, gullible

from sixfold.cli import main

PRINCIPLES = """\
# two principles
polite: The answer has no insult.
The answer is in English.
"""


def adds(request: Asked) -> bool:
    """True if the answer is the sum in the question."""
    total = str(sum(int(n) for n in re.findall(r"\d+", request.data["question"])))
    found = re.findall(r"-?\d+", request.data["answer"])
    return found[-1:] == [total] and "," not in request.data["answer"]


@pytest.fixture
def fake() -> Iterator[FakeJudge]:
    with FakeJudge(lambda r: {"verdict": "right" if adds(r) else "wrong"}) as started:
        yield started


def audit(fake: FakeJudge, capsys: pytest.CaptureFixture[str], *more: str) -> dict[str, Any]:
    judge = ["--environment.judge.url", fake.url, "--environment.judge.model", "fake"]
    main(["audit", "demo", "--tasks", "2", "--json", *judge, *more])
    records = map(json.loads, capsys.readouterr().out.splitlines())
    return {record["check"]: record for record in records}


def test_the_audit_estimates_the_cost_before_it_asks_and_tries_injections(
    fake: FakeJudge, capsys: pytest.CaptureFixture[str]
) -> None:
    prices = ["--environment.judge.input_price", "2", "--environment.judge.output_price", "8"]
    found = audit(fake, capsys, "--environment.rewards", "judge_reference", *prices)
    assert next(iter(found)) == "judge's cost"
    estimate = int(
        re.search(r"up to ([\d,]+) questions", found["judge's cost"]["result"])[1].replace(",", "")
    )
    assert len(fake.requests) <= estimate <= 6 * len(fake.requests)
    assert "$" in found["judge's cost"]["result"]
    assert found["reference answer"]["level"] == "ok"
    assert found["uninformed answers"]["level"] == "ok"
    seen = [request.data["answer"] for request in fake.requests]
    assert any("expert in this field" in text for text in seen)
    assert not any(text.strip() in ("", ":", "Thought process:") for text in seen)


def test_the_audit_fails_a_judge_that_can_be_talked_into_a_verdict(
    fake: FakeJudge, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.behaviour = gullible
    found = audit(fake, capsys, "--environment.rewards", "judge_reference")
    assert found["uninformed answers"]["level"] == "failure"
    assert found["distractor"]["level"] == "failure"


def test_the_audit_compares_attacks_with_right_answers_for_a_pairwise_judge(
    fake: FakeJudge, capsys: pytest.CaptureFixture[str]
) -> None:
    def honest(request: Asked) -> dict[str, str]:
        first = re.fullmatch(r"[\d+=;]+#\d+", request.data["first"])
        return {"winner": "first" if first else "second"}

    fake.behaviour = honest
    found = audit(fake, capsys, "--environment.rewards", "judge_pairwise")
    assert found["comparisons"]["level"] == "ok"
    fake.behaviour = lambda r: {
        "winner": "first" if len(r.data["first"]) > len(r.data["second"]) else "second"
    }
    found = audit(fake, capsys, "--environment.rewards", "judge_pairwise")
    assert found["comparisons"]["level"] == "failure"
    assert "environment.judge.model" in found["comparisons"]["remedy"]


def critic(request: Asked) -> dict[str, Any]:
    """Finds insults, and removes them."""
    if "revision" in request.keys:
        return {"revision": request.data["answer"].replace(", you fool", "")}
    insult = "fool" in request.data["answer"] and "insult" in request.user
    verdicts = {key: "violates" if insult else "follows" for key in request.keys[1:]}
    if "critique" in request.keys:
        return {**verdicts, "critique": "It calls the user a fool." if insult else "fine"}
    verdicts.pop("reason", None)
    return verdicts


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "principles.txt").write_text(PRINCIPLES)
    drafts = [
        {"prompt": "2+2=?", "completion": "4, you fool"},
        {"prompt": [{"role": "user", "content": "Hello"}], "completion": "Hello!"},
        {"prompt": "3+3=?", "completion": ":"},
    ]
    (tmp_path / "drafts.jsonl").write_text("\n".join(map(json.dumps, drafts)))
    return tmp_path


def critique(fake: FakeJudge, files: Path, *more: str) -> int:
    return main(
        [
            *("critique", "demo", "--out", str(files / "pairs.jsonl")),
            *("--principles", str(files / "principles.txt")),
            *("--drafts", str(files / "drafts.jsonl")),
            *("--environment.judge.url", fake.url, "--environment.judge.model", "fake"),
            *more,
        ]
    )


def test_critique_and_revision_give_preference_pairs(
    fake: FakeJudge, files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.behaviour = critic
    assert critique(fake, files) == 0
    (pair,) = map(json.loads, (files / "pairs.jsonl").read_text().splitlines())
    assert pair == {
        "prompt": "2+2=?",
        "chosen": "4",
        "rejected": "4, you fool",
        "principle": "The answer has no insult.",
        "critique": "It calls the user a fool.",
    }
    said = capsys.readouterr().out
    assert "1 pairs from 3 answers and 2 principles" in said
    assert "2 no answer to revise" in said and "3 follows" in said
    assert critique(fake, files) == 2  # it exists
    asked = len(fake.requests)
    (files / "pairs.jsonl").unlink()
    assert critique(fake, files) == 0
    assert len(fake.requests) == asked  # its answers are kept beside it


def test_a_revision_that_still_violates_the_principle_is_no_pair(
    fake: FakeJudge, files: Path
) -> None:
    def clumsy(request: Asked) -> dict[str, Any]:
        return {"revision": "4, fool"} if "revision" in request.keys else critic(request)

    fake.behaviour = clumsy
    assert critique(fake, files) == 0
    assert (files / "pairs.jsonl").read_text() == ""


def test_a_spent_budget_ends_critiques_with_code_3_and_the_rest_is_asked_later(
    fake: FakeJudge, files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.behaviour = critic
    assert critique(fake, files, "--environment.judge.budget_calls", "2") == 3
    assert "environment.judge.budget_calls" in capsys.readouterr().err
    assert not (files / "pairs.jsonl").exists()
    assert critique(fake, files) == 0
    assert len(fake.requests) == 6


@pytest.mark.parametrize(
    ("name", "text", "named"),
    [
        ("drafts.jsonl", "", "--drafts"),
        ("drafts.jsonl", "[1]", "line 1"),
        ("drafts.jsonl", '{"prompt": "a", "completion": "b"}\n\n{"prompt": "a"}', "line 3"),
        ("drafts.jsonl", "\n{", "line 2"),
        ("principles.txt", "# nothing", "is empty"),
    ],
)
def test_an_error_in_a_file_is_located(
    fake: FakeJudge, files: Path, capsys: pytest.CaptureFixture[str],
    name: str, text: str, named: str,
) -> None:  # fmt: skip
    (files / name).write_text(text)
    assert critique(fake, files) == 2
    said = capsys.readouterr().err
    assert str(files / name) in said and named in said


def test_critique_samples_the_recipes_model(fake: FakeJudge, files: Path) -> None:
    fake.behaviour = critic
    judge = ["--environment.judge.url", fake.url, "--environment.judge.model", "fake"]
    out = str(files / "sampled.jsonl")
    assert main(["critique", "demo", "--out", out, "--tasks", "3", *judge]) == 0
    questions = {r.data["question"] for r in fake.requests}
    assert 1 <= len(questions) <= 3
