"""Prompts that jump more than chance explains, and where the training data has them."""

from __future__ import annotations

import json
import math
from itertools import product
from pathlib import Path

import pytest
from rows_of_curation import rows_of

from sixfold.errors import UserError
from sixfold_curation.leakage import adjusted, fisher, leakage


def completions(path: Path, solved: dict[str, tuple[int, int]], prompts: dict[str, str]) -> Path:
    lines = [
        {"task_id": task, "sample": n, "prompt": prompts[task], "solved": n < right}
        for task, (right, samples) in solved.items()
        for n in range(samples)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


PROMPTS = {
    f"t{n}": f"In how many ways can {n + 3} different books be put on {n + 2} shelves of a library,"
    f" if shelf {'abcdefghijklmnopqrst'[n]} holds one book at least?"
    for n in range(20)
}


def test_fisher_is_the_share_of_all_assignments_with_such_a_jump() -> None:
    """Against every way to hand out the right samples; and the lady tasting tea, 1 in 70."""
    for a, b in product(range(4), range(5)):
        n, m = 3, 4
        hits = a + b
        ways = [choice for choice in product((0, 1), repeat=n + m) if sum(choice) == hits]
        share = sum(sum(choice[n:]) >= b for choice in ways) / len(ways)
        assert fisher(a, n, b, m) == pytest.approx(share)
    assert fisher(0, 4, 4, 4) == pytest.approx(1 / 70)


def test_adjusted_p_values_are_those_of_the_paper() -> None:
    """The 15 p-values of Benjamini and Hochberg 1995, section 3.2: four are below 0.05."""
    p = [0.0001, 0.0004, 0.0019, 0.0095, 0.0201, 0.0278, 0.0298, 0.0344, 0.0459, 0.3240, 0.4262,
         0.5719, 0.6528, 0.7590, 1.0]  # fmt: skip
    assert sum(q <= 0.05 for q in adjusted(p)) == 4
    assert adjusted(p)[0] == pytest.approx(0.0015) and adjusted(p)[-1] == 1.0
    assert adjusted(p[::-1]) == adjusted(p)[::-1]


def test_leaked_prompts_jump_and_are_found_in_the_training_data(tmp_path: Path) -> None:
    base = {task: (2, 16) for task in PROMPTS}
    after = {task: (4, 16) for task in PROMPTS} | {"t3": (16, 16), "t7": (15, 16)}
    found = leakage(
        completions(tmp_path / "a.jsonl", base, PROMPTS),
        completions(tmp_path / "b.jsonl", after, PROMPTS),
        rows_of(["What is 3 + 4?", PROMPTS["t3"] + " Think.", PROMPTS["t9"]]),
    )
    assert [jump.task for jump in found.found] == ["t3", "t7"]
    assert found.found[0].jump == pytest.approx(14 / 16)
    assert found.found[0].training_rows == ("s/1 (n_gram)",)
    assert found.found[1].training_rows == ()
    lines = found.lines()
    assert lines[0].startswith("2 of 20 prompts jump") and "1 of them" in lines[0]
    assert lines[-1] == "1 more prompts are in the training data: t9" and not found.note


def test_a_model_that_improves_a_little_on_all_prompts_is_not_accused(tmp_path: Path) -> None:
    found = leakage(
        completions(tmp_path / "a.jsonl", {task: (4, 16) for task in PROMPTS}, PROMPTS),
        completions(tmp_path / "b.jsonl", {task: (8, 16) for task in PROMPTS}, PROMPTS),
    )
    assert found.found == ()


def test_too_few_samples_are_said_with_the_number_that_would_do(tmp_path: Path) -> None:
    found = leakage(
        completions(tmp_path / "a.jsonl", {task: (0, 1) for task in PROMPTS}, PROMPTS),
        completions(tmp_path / "b.jsonl", {task: (1, 1) for task in PROMPTS}, PROMPTS),
    )
    assert not found.found and "take 6 samples per prompt" in found.note
    assert 20 / math.comb(12, 6) <= 0.05 < 20 / math.comb(10, 5)


def test_samples_without_a_verdict_and_other_tasks_are_left_out(tmp_path: Path) -> None:
    a = completions(tmp_path / "a.jsonl", {"t1": (0, 8), "t2": (0, 8)}, PROMPTS)
    b = completions(tmp_path / "b.jsonl", {"t1": (8, 8), "t5": (8, 8)}, PROMPTS)
    line = {"task_id": "t1", "sample": 9, "prompt": PROMPTS["t1"], "solved": None}
    b.write_text(b.read_text() + json.dumps(line) + "\n")
    found = leakage(a, b)
    assert [(jump.task, jump.trained) for jump in found.jumps] == [("t1", (8, 8))]
    assert "2 tasks are in one file only" in found.note


def test_files_that_are_no_evaluations_are_refused(tmp_path: Path) -> None:
    good = completions(tmp_path / "a.jsonl", {"t1": (0, 8)}, PROMPTS)
    other = completions(tmp_path / "b.jsonl", {"t2": (0, 8)}, PROMPTS)
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"task_id": "t1"}\n')
    with pytest.raises(UserError, match="share no task"):
        leakage(good, other)
    with pytest.raises(UserError, match=r"bad\.jsonl:1 is no sample"):
        leakage(good, bad)
    with pytest.raises(UserError, match="no such file"):
        leakage(good, tmp_path / "absent.jsonl")


def test_files_about_other_prompts_under_the_same_ids_are_refused(tmp_path: Path) -> None:
    solved = dict.fromkeys(PROMPTS, (1, 8))
    base = completions(tmp_path / "base.jsonl", solved, PROMPTS)
    other = completions(tmp_path / "other.jsonl", solved, {**PROMPTS, "t3": "Something else?"})
    with pytest.raises(UserError, match=r"t3 .*another prompt"):
        leakage(base, other)


def test_line_separators_in_a_prompt_do_not_end_its_line(tmp_path: Path) -> None:
    line = {"task_id": "a", "prompt": "one\u2028two\x85three", "solved": True}
    (tmp_path / "c.jsonl").write_text(json.dumps(line, ensure_ascii=False) + "\n", encoding="utf-8")
    assert leakage(tmp_path / "c.jsonl", tmp_path / "c.jsonl").jumps[0].task == "a"
