"""Stored profiles: counts add up, a kill loses no whole line, and figures are never mixed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from sixfold.data.profile import (
    Measurement,
    ProfileFile,
    ProfileKey,
    measured,
    read_profile,
    task_key,
)
from sixfold.errors import UserError
from sixfold.types import Task

KEY = ProfileKey("w0", "t0", {"temperature": 1.0, "top_p": 0.9}, {"rewards": ["math"]})
ONE = Measurement("a", "gsm/1", 7, 3, (1.0, 1.0, 1.0, 0.0), failed=1, prompt_tokens=9, tokens=50)
SAME_TASK = Measurement("a", "dapo/5", 8, 0, (0.0, 0.0), prompt_tokens=9, tokens=14, truncated=1)
OTHER = Measurement("b", "gsm/2", 7, 0, (), failed=4)


def write(path: Path, *measured: Measurement, key: ProfileKey = KEY) -> None:
    file = ProfileFile(path, key)
    for one in measured:
        file.add(one)
    file.close()


def test_rollouts_of_one_task_add_up_and_a_repeated_seed_counts_once(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "profile.jsonl"
    write(path, ONE, OTHER)
    write(path, SAME_TASK, ONE)
    profile = read_profile(path)
    known = profile.tasks["a"]
    assert (known.solved, known.samples, profile.rate("a")) == (3, 6, 0.5)
    # 5 rollouts of 50 tokens in all, and 2 of 14.
    assert (known.prompt_tokens, known.mean_tokens) == (9, 64 / 7)
    assert profile.rate("b") is None and profile.rate("never measured") is None
    assert len(path.read_text().splitlines()) == 4 and profile.key == KEY


def test_votes_are_counted_among_rollouts_whose_answers_are_known(tmp_path: Path) -> None:
    """A line of an earlier release has no answers. A line with none has none."""
    path = tmp_path / "profile.jsonl"
    write(path, replace(OTHER, rewards=(0.0,) * 8, others={"117": 7}), ONE)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[2].pop("others")
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    write(path, SAME_TASK, replace(OTHER, seed=8, rewards=(0.0,) * 4, others={}))
    tasks = read_profile(path).tasks
    assert (tasks["a"].rival, tasks["a"].compared) == (("", 0), 0)
    assert (tasks["b"].rival, tasks["b"].compared) == (("117", 7), 12)


def test_lengths_of_a_run_count_every_task_once(tmp_path: Path) -> None:
    """Runs draw tasks equally. Those that none solves have 64 rollouts here, the others 8."""
    path = tmp_path / "profile.jsonl"
    hard = [Measurement(f"h{n}", "h", 0, 0, (0.0,) * 64, tokens=64 * 4000) for n in range(3)]
    rest = [Measurement(f"r{n}", "r", 0, 4, (0.0,) * 8, tokens=8 * 500) for n in range(7)]
    write(path, *hard, *rest)
    found = measured(path)
    assert found.completion_tokens == (3 * 4000 + 7 * 500) / 10
    assert len(found.rates) == 10


def test_a_task_is_known_by_prompt_and_answer_under_any_id() -> None:
    task = Task("gsm/1", "1+1=", 2)
    assert task_key(task) == task_key(replace(task, id="x", answer="2", source="s", trace="#2"))
    others = [
        replace(task, prompt="1+2="), replace(task, answer=3), replace(task, world="seed 4"),
        replace(task, prompt=({"role": "user", "content": "1+1="},)),
    ]  # fmt: skip
    assert len({task_key(one) for one in (task, *others)}) == 5


def test_a_kill_at_any_byte_loses_only_the_line_that_was_being_written(tmp_path: Path) -> None:
    whole = tmp_path / "whole.jsonl"
    write(whole, ONE, OTHER, SAME_TASK)
    data = whole.read_bytes()
    ends = [i + 1 for i, byte in enumerate(data) if byte == ord("\n")]
    torn = tmp_path / "torn.jsonl"
    for size in range(len(data)):
        torn.write_bytes(data[:size])
        if size >= ends[0]:
            kept = sum(end <= size for end in ends[1:])
            known = read_profile(torn).tasks.values()
            assert sum(len(one.measured) for one in known) == kept, size
        write(torn, ONE, OTHER, SAME_TASK)
        assert torn.read_bytes() == data, size


@pytest.mark.parametrize(
    ("key", "differs"),
    [
        (replace(KEY, weights="w1"), "weights"),
        (replace(KEY, template="t1"), "template"),
        (replace(KEY, sampling={"temperature": 1.0, "top_p": 1.0}), "sampling.top_p"),
        (replace(KEY, verifier={"rewards": ["math"], "timeout_s": 5}), "verifier.timeout_s"),
    ],
)
def test_figures_of_another_model_or_verifier_are_refused(
    tmp_path: Path, key: ProfileKey, differs: str
) -> None:
    path = tmp_path / "profile.jsonl"
    write(path, ONE)
    before = path.read_bytes()
    with pytest.raises(UserError, match=differs):
        ProfileFile(path, key)
    assert path.read_bytes() == before and key.digest != KEY.digest


def test_one_seed_with_two_results_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "profile.jsonl"
    write(path, ONE)
    other = replace(ONE, solved=2, rewards=(1.0, 1.0, 0.0, 0.0))
    with pytest.raises(UserError, match=r"gsm/1.*seed 7"):
        write(path, other)


@pytest.mark.parametrize(
    ("line", "number"),
    [
        ('{"profile": 2, "key": {}}', 1),
        ("[1, 2]", 1),
        ("not JSON", 3),
        ('{"task": "a", "solved": 1}', 3),
        (json.dumps({"task": "c", "id": "c", "seed": 1, "solved": 3, "rewards": [1.0]}), 3),
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, line: str, number: int) -> None:
    path = tmp_path / "profile.jsonl"
    write(path, ONE)
    lines = path.read_text().splitlines()
    lines[number - 1 : number] = [line]
    path.write_text("\n".join([*lines, ""]))
    with pytest.raises(UserError, match=f"line {number}"):
        read_profile(path)
