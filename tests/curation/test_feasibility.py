"""Stage `feasibility`: planted faults are found, each under its own name, and nothing else is."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from curated_rows import rows_of

from sixfold.errors import UserError
from sixfold_curation.feasibility import Feasibility, perturbed
from sixfold_curation.stage import Context, Decision, Health, decided

RECIPE = """
[data]
source = "unused.jsonl"
answer_after = "####"

[environment]
rewards = [{reward}]
timeout_s = 5.0
"""


def context(folder: Path, reward: str = '"math"') -> Context:
    path = folder / "train.toml"
    path.write_text(RECIPE.format(reward=reward))
    return Context(recipe=str(path))


def judged(
    folder: Path, fields: list[dict[str, Any]], reward: str = '"math"', **settings: Any
) -> tuple[list[Decision], Health]:
    stage = Feasibility(**{"template": False, **settings})
    return decided(stage, rows_of(fields), context(folder, reward))


def reasons(decisions: list[Decision]) -> list[str]:
    return [one.reason for one in decisions]


GOOD: list[dict[str, Any]] = [
    {"prompt": "1 + 1?", "answer": 2},
    {"prompt": "1 / 2?", "answer": "\\frac{1}{2}"},
    {"prompt": "Solve x + 1 = 4.", "answer": "x=3"},
    {"prompt": "1000 + 234?", "answer": "1234"},
    {"prompt": "Half of 5?", "answer": "2.5"},
]


@pytest.mark.nightly
def test_rows_that_the_verifier_judges_rightly_stay(tmp_path: Path) -> None:
    decisions, health = judged(tmp_path, GOOD)
    assert reasons(decisions) == [""] * 5 and all(one.kept for one in decisions)
    assert (health.value, health.alarm) == (0.0, "")


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"prompt": "Name a colour.", "answer": ""}, "unreadable"),
        ({"prompt": "What is the set?", "answer": None}, "unreadable"),
        ({"prompt": " ", "answer": "3"}, "unreadable"),
    ],
)
def test_a_row_whose_reference_answer_fails_is_dropped(
    tmp_path: Path, wrong: dict[str, Any], reason: str
) -> None:
    decisions, health = judged(tmp_path, [*GOOD[:2], wrong, *GOOD[2:]])
    assert reasons(decisions) == ["", "", reason, "", "", ""] and not decisions[2].kept
    assert decisions[2].note and health.value == pytest.approx(1 / 6)
    assert reason in health.alarm and health.figures["faults"][reason] == 1


VERIFIER = """
import os, time

def says(completion):
    return (completion.split() or [""])[-1].strip(".")

def faulty(completion, task):
    kind, said, gold = task.columns.get("kind"), says(completion), str(task.answer)
    if kind == "generous":
        return 1.0                       # pays for anything
    if kind == "lenient":
        return float(said in (gold, str(int(gold) + 1)))  # off by one
    if kind == "never":
        return 0.0
    if kind == "narrow":
        return float(completion == f"The answer is {gold}.")  # nothing around it
    if kind == "integers":
        return float(said.strip("$") == gold)  # 10.0 is refused
    if kind == "slow" and said == gold:
        time.sleep(60)
    if kind == "raises" and said == gold:
        raise RuntimeError("no licence")
    if kind == "exits" and said == gold:
        os._exit(3)
    try:
        return float(float(said.replace(",", "").strip("$")) == float(gold))
    except ValueError:
        return 0.0
"""
PLANTED = {
    "generous": "distractor_accepted",
    "lenient": "distractor_accepted",
    "never": "gold_refused",
    "narrow": "paraphrase_refused",
    "integers": "paraphrase_refused",
    "raises": "check_failed",
    "slow": "check_failed",
    "exits": "check_failed",
}


@pytest.mark.nightly
@pytest.mark.slow
def test_each_planted_fault_of_a_verifier_is_found_and_named(tmp_path: Path) -> None:
    (tmp_path / "verifier.py").write_text(VERIFIER)
    fields = [
        {"prompt": f"{n} + {n}?", "answer": str(2 * n), "kind": kind}
        for n, kind in enumerate([*PLANTED, *["good"] * 12], start=1)
    ]
    reward = f'"{tmp_path}/verifier.py:faulty"'
    recipe = context(tmp_path, reward)
    path = Path(recipe.recipe)
    path.write_text(path.read_text().replace("timeout_s = 5.0", "timeout_s = 1.0"))
    decisions, health = decided(Feasibility(template=False), rows_of(fields), recipe)
    expected = [PLANTED.get(str(one["kind"]), "") for one in fields]
    assert reasons(decisions) == expected
    dropped = {one.reason for one in decisions if not one.kept}
    assert dropped == set(PLANTED.values()) - {"paraphrase_refused"}
    assert health.figures["faults"] == {
        "unreadable": 0, "template": 0, "check_failed": 3, "gold_refused": 1,
        "distractor_accepted": 2, "paraphrase_refused": 2,
    }  # fmt: skip
    notes = {str(f["kind"]): one.note for f, one in zip(fields, decisions, strict=True)}
    assert "no licence" in notes["raises"] and "another number" in notes["lenient"]
    assert "an empty reply" in notes["generous"] and "10.0" in notes["integers"]
    assert "words around" in notes["narrow"]
    assert health.value == pytest.approx(8 / 20) and "2 paraphrase_refused" in health.alarm


def of_kinds(folder: Path, kinds: list[str], **settings: Any) -> tuple[list[Decision], Health]:
    """Decisions about sums whose verifier is of these kinds."""
    (folder / "verifier.py").write_text(VERIFIER)
    rows = [
        {"prompt": f"{n} + {n}?", "answer": str(2 * n), "kind": kind}
        for n, kind in enumerate(kinds, start=1)
    ]
    return judged(folder, rows, f'"{folder}/verifier.py:faulty"', **settings)


def test_the_alarm_rings_above_five_per_cent(tmp_path: Path) -> None:
    _, one_of_twenty = of_kinds(tmp_path, [*["good"] * 19, "never"])
    assert one_of_twenty.value == pytest.approx(0.05) and not one_of_twenty.alarm
    _, two = of_kinds(tmp_path, [*["good"] * 19, "never", "never"])
    assert two.value == pytest.approx(2 / 21) and "2 gold_refused" in two.alarm


def test_faults_that_are_kept_are_noted(tmp_path: Path) -> None:
    decisions, _ = of_kinds(tmp_path, ["good", "never"], keep=["gold_refused"])
    assert [one.kept for one in decisions] == [True, True]
    assert reasons(decisions) == ["", "gold_refused"]


@pytest.mark.nightly
def test_prompts_that_the_model_does_not_read_as_written(tmp_path: Path) -> None:
    """The model from scratch knows some characters only; `<|end|>` would end its turn."""
    fields = [
        {"prompt": "12+34=", "answer": "46"},
        {"prompt": "12+34=<|end|>", "answer": "46"},
        {"prompt": "12 ☃ 34", "answer": "46"},
    ]
    decisions, health = judged(tmp_path, fields, template=True)
    assert reasons(decisions) == ["", "template", "template"]
    assert "special token" in decisions[1].note and "☃" in decisions[2].note
    assert Counter(one.kept for one in decisions) == {True: 1, False: 2} and health.alarm


def test_a_form_that_the_verifier_never_takes_is_no_fault_of_rows(tmp_path: Path) -> None:
    """Most rows refuse 10.0, so it is a rule. Of the others, nothing is said."""
    decisions, health = of_kinds(tmp_path, ["integers"] * 6 + ["good"] * 5)
    assert reasons(decisions) == [""] * 11 and not health.alarm
    assert health.figures["forms that the verifier does not take"] == ["a decimal"]


def test_worked_solutions_and_rows_of_tests_only(tmp_path: Path) -> None:
    """A worked solution is tried as it is. Unit tests are no answer that a reply could give."""
    (tmp_path / "verifier.py").write_text(
        "def passes(completion, task):\n    return float(completion == task.columns['wanted'])\n"
    )
    path = tmp_path / "train.toml"
    path.write_text(
        RECIPE.format(reward=f'"{tmp_path}/verifier.py:passes"').replace(
            "[environment]", 'trace_field = "solution"\n\n[environment]'
        )
    )
    rows = rows_of(
        [
            {"prompt": "a", "answer": {"tests": [1]}, "wanted": "f", "solution": "f"},
            {"prompt": "b", "answer": {"tests": [2]}, "wanted": "g", "solution": "h"},
        ]
    )
    stage = Feasibility(template=False)
    decisions, _ = decided(stage, rows, Context(recipe=str(path)))
    assert reasons(decisions) == ["paraphrase_refused", "gold_refused"]
    bare = rows_of([{"prompt": "c", "answer": {"tests": [3]}, "wanted": "x"}])
    decisions, health = decided(stage, bare, Context(recipe=str(path)))
    assert reasons(decisions) == [""]
    assert health.figures["rows without a reference answer"] == 1


def test_a_stage_without_a_recipe_says_what_to_set(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="recipe ="):
        decided(Feasibility(), rows_of(GOOD))


@pytest.mark.parametrize(
    ("answer", "wrong"),
    [("x=3", ["x=4"]), ("\\frac{1}{2}", ["\\frac{1}{3}"]), ("2.5", ["2.6"]), ("east", [])],
)
def test_perturbed_answers(answer: str, wrong: list[str]) -> None:
    assert perturbed(answer) == wrong
