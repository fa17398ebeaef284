"""Fingerprints: equal for equal things in another process, and precise about what differs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sixfold.environment.episodes import load_episode
from sixfold.environment.tools.episode import Equipped
from sixfold.environment.tools.setup import ToolSetup
from sixfold.run.fingerprint import (
    PARTS,
    episode_fingerprint,
    rewards_difference,
    rewards_fingerprint,
    tasks_difference,
    tasks_fingerprint,
)
from sixfold.types import Task

TASKS = [
    Task(f"t{i}", f"{i}+1=", answer=i + 1, trace=f"#{i}", columns={"level": i}) for i in range(4)
]


def encode(task: Task) -> list[int]:
    return [ord(c) for c in str(task.prompt)]


def difference(tasks: Sequence[Task], shift: int = 0) -> str:
    changed = tasks_fingerprint(tasks, lambda task: [token + shift for token in encode(task)])
    return tasks_difference(tasks_fingerprint(TASKS, encode), changed)


@pytest.mark.parametrize(
    ("field", "value", "part"),
    [
        ("id", "x", "ids"),
        ("answer", None, "answers"),
        ("trace", None, "traces"),
        ("columns", {"level": 9}, "columns"),
        ("prompt", "9", "prompts"),
    ],
)
def test_the_part_that_differs_is_named_and_no_other(field: str, value: object, part: str) -> None:
    assert difference([*TASKS[:3], replace(TASKS[3], **{field: value})]) == f"{PARTS[part]} differ"  # type: ignore[arg-type]


def test_tokens_alone_point_at_the_template() -> None:
    assert "today's date" in difference(TASKS, shift=1) and difference(TASKS) == ""


def test_order_and_number_count() -> None:
    assert "their ids" in difference(TASKS[::-1])
    assert difference(TASKS[:3]) == "there were 4, now there are 3"


def test_adjacent_ids_do_not_merge() -> None:
    """["1", "12"] and ["11", "2"] are other lists of ids."""
    a, b = ([Task(i, "p") for i in ids] for ids in (("1", "12"), ("11", "2")))
    assert (
        tasks_difference(tasks_fingerprint(a, encode), tasks_fingerprint(b, encode))
        == "their ids differ"
    )


def in_a_process(tasks: str, hash_seed: str = "0") -> str:
    """The fingerprint of an expression for tasks, computed by a process of its own."""
    code = (
        "from sixfold.run.fingerprint import tasks_fingerprint; from sixfold.types import Task;"
        f" print(tasks_fingerprint({tasks}, lambda task: [ord(c) for c in str(task.prompt)]))"
    )
    return subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()


class Odd:
    """Has no JSON form and, like most objects, shows its address."""


def test_objects_in_a_row_are_the_same_in_every_process() -> None:
    first, second = (
        [Task("a", "p", columns={"odd": Odd(), "also": {3}, "raw": b"x"})] for _ in range(2)
    )
    assert (
        tasks_difference(tasks_fingerprint(first, encode), tasks_fingerprint(second, encode)) == ""
    )
    assert in_a_process(repr(TASKS)) == str(tasks_fingerprint(TASKS, encode))


@pytest.mark.slow
def test_sets_and_keys_of_any_type_are_the_same_in_every_process() -> None:
    """The order of a set of texts differs from process to process, and JSON has no order for mixed
    keys.
    """
    tasks = "[Task('a', 'p', columns={'s': set('abcdef'), 'm': {1: 2, 'b': 3, (4, 5): 6}})]"
    outputs = {in_a_process(tasks, seed) for seed in ("1", "2")}
    assert len(outputs) == 1


@pytest.mark.parametrize("make", [np.zeros, torch.zeros])
def test_hash_covers_the_middle_of_a_long_array(make: Callable[[int], Any]) -> None:
    first, second = make(3000), make(3000)
    second[1500] = 1
    prints = [
        tasks_fingerprint([Task("a", "p", columns={"x": array})], encode)
        for array in (first, second)
    ]
    assert tasks_difference(*prints) == f"{PARTS['columns']} differ"


def test_rewards_are_known_by_their_code(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def f(completion, task):\n    return 1.0\n")
    before = rewards_fingerprint([f"{file}:f", "math", encode])
    assert [name for name, _ in before] == [f"{file}:f", "math", "encode"] and all(
        digest for _, digest in before
    )
    file.write_text("def f(completion, task):\n    return 2.0\n")
    moved = file.rename(tmp_path / "moved.py")
    assert rewards_difference(before, rewards_fingerprint([f"{moved}:f", "math", encode])) == [
        f"{moved}:f"
    ]
    assert rewards_difference(before, rewards_fingerprint([f"{moved}:f", "math", Odd()])) == [
        f"{moved}:f",
        "Odd",
    ]


def test_the_code_of_a_module_is_found_without_running_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package may do anything when it is imported; the rewards' process imports it."""
    package = tmp_path / "package_of_rewards"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit(0)")
    (package / "mine.py").write_text("def f(completion, task): ...")
    monkeypatch.syspath_prepend(tmp_path)
    names = ["package_of_rewards.mine:f", "package_of_rewards.none:f", "none.mine:f"]
    assert [bool(digest) for _, digest in rewards_fingerprint(names)] == [True, False, False]


def test_environments_are_known_by_the_code_of_their_class(tmp_path: Path) -> None:
    prints = []
    for number in (1, 2, 2):
        file = tmp_path / f"mine{len(prints)}.py"
        body = f"    async def start(self): ...\n    async def step(self, a): return {number}\n"
        file.write_text("class Mine:\n    def __init__(self, task): ...\n" + body)
        prints.append(rewards_fingerprint([load_episode(f"{file}:Mine")]))
    assert rewards_difference(prints[0], prints[1]) == ["Mine"]
    assert rewards_difference(prints[1], prints[2]) == []


def test_an_environment_with_tools_of_the_run_is_known_by_its_own_code(tmp_path: Path) -> None:
    prints = []
    for number in (1, 2, 2):
        file = tmp_path / f"own{len(prints)}.py"
        body = f"    async def start(self): ...\n    async def step(self, a): return {number}\n"
        file.write_text("class Own:\n    def __init__(self, task): ...\n" + body)
        made = Equipped(load_episode(f"{file}:Own"), ToolSetup())
        prints.append([episode_fingerprint(f"{file}:Own", made)])
    assert rewards_difference(prints[0], prints[1]) == ["Own"]
    assert rewards_difference(prints[1], prints[2]) == []
    assert rewards_difference([["Equipped", "ab"]], prints[0]) == []  # runs of earlier releases
    assert episode_fingerprint("web_shop", made) == ["web_shop", "version 1"]


def test_a_reward_without_a_source_is_never_called_changed() -> None:
    typed_into_a_shell = eval("lambda completion, task: 1.0")
    assert rewards_fingerprint([typed_into_a_shell])[0][1] == ""
    assert rewards_difference(rewards_fingerprint([typed_into_a_shell]), [["f", "ab"]]) == []
