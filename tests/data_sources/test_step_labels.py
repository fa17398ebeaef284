"""Solutions with labelled steps, in the forms of the public data sets."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from sixfold.data.step_labels import LabelledSolution, load_step_labels
from sixfold.errors import UserError
from sixfold.recipe.schema import DataConfig


def load(place: Path, rows: Sequence[Mapping[str, Any]], **settings: Any) -> Any:
    file = place / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    return load_step_labels(DataConfig(source=str(file), heldout=0, **settings), seed=0)


def read(place: Path, *rows: Mapping[str, Any]) -> list[tuple[Any, Any, Any]]:
    tasks = load(place, rows).train
    assert all(isinstance(task, LabelledSolution) for task in tasks)
    return [(task.prompt, task.steps, task.labels) for task in tasks]


STEPWISE = {"prompt": "1+1", "completions": ["a", "b"], "labels": [True, False]}
PRM800K = {
    "question": {"problem": "1+1", "ground_truth_answer": "2"},
    "label": {
        "steps": [
            {
                "completions": [
                    {"text": "one", "rating": 1},
                    {"text": "uno", "rating": -1},
                    {"text": "eins", "rating": None},
                ],
                "human_completion": None,
                "chosen_completion": 0,
            },
            {
                "completions": [{"text": "bad", "rating": -1}],
                "human_completion": {"text": "mended", "rating": None},
                "chosen_completion": None,
            },
            {
                "completions": [{"text": "worse", "rating": -1}, {"text": "so", "rating": 0}],
                "human_completion": None,
                "chosen_completion": None,
            },
        ],
        "finish_reason": "found_error",
    },
}
SHEPHERD = {
    "input": "1+1 (руки)? Step 1: one ки\nStep 2: two ки\nStep 3: The answer is: 2 ки",
    "label": "1+1 (руки)? Step 1: one +\nStep 2: two -\nStep 3: The answer is: 2 +",
    "task": "GSM8K",
}
BENCH = {"problem": "1+1", "steps": ["a", "b", "c"], "label": 1, "final_answer_correct": False}


def test_forms_of_the_public_data_sets(tmp_path: Path) -> None:
    assert read(tmp_path, STEPWISE, {**STEPWISE, "labels": [0.25, None]}) == [
        ("1+1", ("a", "b"), (1.0, 0.0)),
        ("1+1", ("a", "b"), (0.25, None)),
    ]
    assert read(tmp_path, BENCH, {**BENCH, "label": -1}, {**BENCH, "label": 2}) == [
        ("1+1", ("a", "b", "c"), (1.0, 0.0, None)),
        ("1+1", ("a", "b", "c"), (1.0, 1.0, 1.0)),
        ("1+1", ("a", "b", "c"), (1.0, 1.0, 0.0)),
    ]
    assert read(tmp_path, SHEPHERD) == [
        (
            "1+1 (руки)?",
            ("Step 1: one", "Step 2: two", "Step 3: The answer is: 2"),
            (1.0, 0.0, 1.0),
        )
    ]
    # The chosen steps are one solution; "so", the second wrong end, and "bad" and "uno" others.
    assert sorted(read(tmp_path, PRM800K)) == sorted(
        [
            ("1+1", ("one", "mended", "worse"), (1.0, None, 0.0)),
            ("1+1", ("one", "mended", "so"), (None, None, 1.0)),
            ("1+1", ("one", "bad"), (None, 0.0)),
            ("1+1", ("uno",), (0.0,)),
        ]
    )


def test_blank_steps_and_unlabelled_solutions_are_left_out_with_a_note(tmp_path: Path) -> None:
    blank = {**STEPWISE, "completions": ["a", " \n", "b"], "labels": [1, 0, 1]}
    unknown = {**STEPWISE, "labels": [None, None]}
    found = load(tmp_path, [blank, unknown])
    assert [(task.steps, task.labels) for task in found.train] == [(("a", "b"), (1.0, 1.0))]
    assert len(found.notes) == 1 or any("1 blank steps" in note for note in found.notes)
    assert any("1 solutions without labels" in note for note in found.notes)


def test_prompts_are_worded_by_the_settings_and_never_on_both_sides(tmp_path: Path) -> None:
    found = load(tmp_path, [{**STEPWISE, "q": "2+2"}], prompt_field="q", prompt_suffix="?")
    assert found.train[0].prompt == "2+2?"
    rows = [{**STEPWISE, "prompt": f"{n // 2}"} for n in range(8)]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    halves = load_step_labels(DataConfig(source=str(file), heldout=2), seed=0)
    assert halves.heldout and halves.train
    assert not {t.prompt for t in halves.train} & {t.prompt for t in halves.heldout}


def test_malformed_rows_name_the_line_and_the_remedy(tmp_path: Path) -> None:
    steps = PRM800K["label"]["steps"]  # type: ignore[index]
    for row, message in (
        ({"prompt": "1", "answer": "2"}, "no solution with labelled steps: expected the columns"),
        ({**STEPWISE, "labels": [True]}, "one label for each of the 2 steps"),
        ({**STEPWISE, "labels": [True, 2]}, "from 0 to 1 or null, got 2"),
        ({**STEPWISE, "labels": [True, "+"]}, "from 0 to 1 or null, got '\\+'"),
        ({**STEPWISE, "completions": "ab"}, "'completions' must be a list of texts"),
        ({**STEPWISE, "prompt": " "}, "empty prompt"),
        ({**STEPWISE, "labels": [None, None]}, "has no labelled step in 1 rows"),
        ({**BENCH, "label": 3}, "0 to 2, or -1 if all are right, got 3"),
        ({**SHEPHERD, "label": SHEPHERD["label"].replace("-", "?")}, "with \\+ or - in place"),
        ({**SHEPHERD, "label": SHEPHERD["label"].replace("two", "too")}, "with \\+ or - in place"),
        ({**SHEPHERD, "input": "no solution"}, "has no 'Step 1:'"),
        ({**PRM800K, "label": {"steps": [{}]}}, "step 0 of 'label.steps' has no 'completions'"),
        (
            {**PRM800K, "label": {"steps": [{**steps[0], "chosen_completion": 7}]}},
            "chosen_completion is 7, but it has 3 completions",
        ),
        (
            {
                **PRM800K,
                "label": {"steps": [{**steps[0], "completions": [{"text": "x", "rating": 5}]}]},
            },
            "a rating must be -1, 0, 1 or null, got 5",
        ),
        (
            {
                **PRM800K,
                "label": {"steps": [{**steps[0], "completions": [{"text": "x", "rating": [1]}]}]},
            },
            r"a rating must be -1, 0, 1 or null, got \[1\]",
        ),
    ):
        with pytest.raises(UserError, match=message):
            load(tmp_path, [row])
