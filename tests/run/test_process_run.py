"""Runs with `algorithm.advantage = 'process'`: rewards of steps reach the advantages."""

from __future__ import annotations

import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

import sixfold
from sixfold.environment.episode import Action, End, Observation
from sixfold.errors import UserError
from sixfold.files.folder import RunFolder
from sixfold.recipe.toml import parse_recipe
from sixfold.report.notes import read_notes
from sixfold.report.rollouts import read_rollouts
from sixfold.run.start import train_run
from sixfold.types import Task

from .processes import TINY, tiny_recipe

REWARDS = """
from sixfold.environment.grade import Grade


def digits(completion, task):
    ends = [i + 1 for i, c in enumerate(completion) if c.isdigit()]
    return Grade(len(completion) % 3, None, steps=[(i, int(completion[i - 1]) / 9) for i in ends])


def whole(completion, task):
    return float(len(completion) % 3)


def too_far(completion, task):
    return Grade(1.0, None, steps=[(len(completion) + 1, 1.0)])
"""
ONE_STEP = {"sft__steps": 0, "run__steps": 1, "algorithm__advantage": "process"}


def train(folder: Path, reward: str, **overrides: Any) -> int:
    (folder / "rewards.py").write_text(REWARDS)
    flags = tiny_recipe(
        folder, environment__rewards=f'["{folder}/rewards.py:{reward}"]', **ONE_STEP, **overrides
    )
    return train_run(parse_recipe('run.name = "r"', "test", flags))


def digit_tokens(record: dict[str, Any], tokenizer: Any) -> dict[int, float]:
    """Index of each token that is a digit of the text -> its digit / 9, by single tokens."""
    found, at = {}, 0
    for turn in record["turns"]:
        for index in range(turn["start"], turn["stop"]):
            piece = tokenizer.decode([record["tokens"][index]])
            if not record["text"][at:].startswith(piece):
                assert record["tokens"][index] in tokenizer.all_special_ids
                continue
            at += len(piece)
            if piece.isdigit():
                found[index] = int(piece) / 9
    assert at == len(record["text"])
    return found


def test_a_run_trains_on_the_steps_of_a_users_reward(tmp_path: Path) -> None:
    """The dumped advantages are sums, from each token on, of the step rewards standardised in
    their group. The final reward is a step at the last token.
    """
    assert train(tmp_path, "digits", environment__weights="[0.5]") == 0
    run = RunFolder(tmp_path / "r")
    tokenizer = AutoTokenizer.from_pretrained(
        run.path / "checkpoints" / "step-000001" / "model", local_files_only=True
    )
    groups = defaultdict(list)
    for record in read_rollouts(run.rollout_file(1)):
        groups[record["task_id"]].append(record)
    assert len(groups) == 4
    told = 0
    for records in groups.values():
        rewards = []
        for record in records:
            steps = {i: 0.5 * r for i, r in digit_tokens(record, tokenizer).items()}
            assert dict(record["reward"]["steps"]) == pytest.approx(steps)
            told += len(steps)
            end = record["turns"][-1]["stop"] - 1
            steps[end] = steps.get(end, 0.0) + 0.5 * (len(record["text"]) % 3)
            rewards.append(steps)
        every = [r for steps in rewards for r in steps.values()]
        mean = math.fsum(every) / len(every)
        std = math.sqrt(math.fsum((r - mean) ** 2 for r in every) / len(every))
        for record, steps in zip(records, rewards, strict=True):
            given = record["advantage"]
            for index in range(record["turns"][0]["start"], len(record["tokens"])):
                expected = sum((r - mean) / (std + 1e-6) for i, r in steps.items() if i >= index)
                found = given[index] if isinstance(given, list) else given
                assert found == pytest.approx(expected, abs=1e-4)
    assert told > 20, "completions have digits"


@pytest.mark.parametrize(
    ("reward", "words"),
    [
        ("whole", r"algorithm\.advantage = 'process', but no trajectory .* Grade\(value"),
        ("too_far", r"Grade\.steps: a step ends at character"),
    ],
)
def test_a_run_without_usable_steps_stops(tmp_path: Path, reward: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        train(tmp_path, reward)
    assert not (tmp_path / "r" / "checkpoints" / "step-000001").exists()


class Turns:
    """Two turns. The first earns `first`."""

    first = 0.0

    def __init__(self, task: Task) -> None:
        self.ended = False

    async def start(self) -> Observation:
        return Observation(text="1+1=")

    async def step(self, action: Action) -> Observation | End:
        if self.ended:
            return End(reward=float(len(action.text) % 2))
        self.ended = True
        again = ({"role": "user", "content": "2+2="},)
        return Observation(messages=again, reward=self.first)  # type: ignore[arg-type]


class Paid(Turns):
    first = 0.5


@pytest.mark.parametrize(("episode", "notes"), [(Turns, True), (Paid, False)])
def test_turns_that_all_earn_0_are_noted(tmp_path: Path, episode: type[Turns], notes: bool) -> None:
    settings = {key: value for key, value in TINY.items() if key != "sft.steps"} | {
        "run.name": "r",
        "run.dir": str(tmp_path),
        "run.steps": 1,
        "sft.steps": 0,
        "model.scratch.context": 96,
        "rollout.max_new_tokens": 8,
        "algorithm.advantage": "process",
    }
    folder = sixfold.train(environment=episode, settings=settings)
    written = [note.text for note in read_notes(folder / "notes.jsonl")]
    assert any("trains on the final rewards alone" in text for text in written) == notes


def test_a_function_given_from_python_may_give_steps(tmp_path: Path) -> None:
    """The recipe's own reward, which it replaces, gives none."""
    from sixfold.environment.grade import Grade

    def first(completion: str, task: Task) -> Grade:
        return Grade(0.0, None, steps=[(1, 1.0)] if completion else [])

    settings = TINY | {
        "run.name": "r",
        "run.dir": str(tmp_path),
        "run.steps": 1,
        "sft.steps": 0,
        "algorithm.advantage": "process",
    }
    folder = sixfold.train(reward=first, settings=settings)
    records = list(read_rollouts(RunFolder(folder).rollout_file(1)))
    assert any(len(r["reward"]["steps"]) == 1 for r in records)
