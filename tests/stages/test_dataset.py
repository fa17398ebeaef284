"""Rows of a dataset load as the tasks that were sampled, with the completions as solutions."""

from __future__ import annotations

import asyncio
import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from sixfold.data.sources import load_tasks
from sixfold.environment.calculator import Calculator
from sixfold.errors import UserError
from sixfold.files.blocks import join, write_block
from sixfold.model.scratch import character_tokenizer
from sixfold.recipe.schema import DataConfig, SampleConfig, ScratchConfig
from sixfold.recipe.stages import dataset_settings
from sixfold.renderer.renderer import Renderer
from sixfold.rollout.player import Limits, Player
from sixfold.rollout.worked_episode import Script, worked_episodes
from sixfold.stages.dataset import check_tasks, mixed_rows, sampled_row
from sixfold.stages.keepers import Keeper, completion_of, select
from sixfold.types import Group, Reward, Task

TOOL = {"name": "add", "parameters": {"type": "object", "properties": {"z": {}, "a": {}}}}
CALL = {"name": "add", "arguments": {"z": 1}}
CONVERSATION = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": "ü\u2028?"},
    {"role": "assistant", "content": "", "tool_calls": [{"function": CALL, "id": "7"}]},
    {"role": "tool", "content": "3", "name": "add"},
    {"role": "user", "content": "and?"},
]


def tasks_of(
    tmp_path: Path, rows: list[dict[str, Any]], rewards: tuple[str, ...] = (), **data: Any
) -> list[Task]:
    path = tmp_path / "tasks.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_tasks(
        DataConfig(source=str(path), heldout=0, **data), seed=0, rewards=rewards
    ).train


def loaded(path: Path, form: Any = "messages", rewards: tuple[str, ...] = ()) -> list[Task]:
    settings = dataset_settings(str(path), form)
    return load_tasks(DataConfig(**settings, heldout=0), seed=0, rewards=rewards).train


def round_trip(
    tmp_path: Path, tasks: list[Task], completions: list[Any], rewards: tuple[str, ...] = ()
) -> list[Task]:
    """The tasks of a dataset with these completions, one per task."""
    form, notes = check_tasks(tasks)
    assert notes == []
    keepers = [Keeper(t, 3, c, 0.5) for t, c in zip(tasks, completions, strict=True)]
    rows = [sampled_row(keeper, model="f00", seed=9) for keeper in keepers]
    write_block(tmp_path / "blocks", 0, rows, {})
    join(tmp_path / "blocks", 1, tmp_path / "data.jsonl")
    return loaded(tmp_path / "data.jsonl", form, rewards)


def assert_same(found: list[Task], tasks: list[Task], completions: list[Any]) -> None:
    for one, task, completion in zip(found, tasks, completions, strict=True):
        assert one.trace == completion
        for name in ("prompt", "answer", "tools", "template_args", "form"):
            assert getattr(one, name) == getattr(task, name), name
        assert json.dumps(one.tools) == json.dumps(task.tools)  # the template prints their order
        assert one.id == f"{task.id}/sample-3"
        assert one.columns["reward"] == 0.5
        assert one.columns["provenance"] == {
            "task": task.id,
            "sample": 3,
            "model": "f00",
            "seed": 9,
            "source": task.source,
        }


def test_rows_load_as_the_sampled_tasks(tmp_path: Path) -> None:
    tasks = tasks_of(
        tmp_path,
        [
            {"id": 7, "question": "1+1=", "answer": 2, "tests": [{"input": [1.5, None]}]},
            {
                "question": CONVERSATION,
                "answer": ["2", {"a": [1]}],
                "tools": [TOOL],
                "chat_template_kwargs": {"thinking": True},
            },
            {"question": "no answer", "answer": None},
            {"question": "big", "answer": 10**4000},
        ],
        prompt_suffix=" Think.",
    )
    assert [len(task.tools) for task in tasks] == [0, 1, 0, 0]
    completions = ["<think>\u2028\r\n</think> 2", " 3\n", "x", "{}"]
    found = round_trip(tmp_path, tasks, completions)
    assert_same(found, tasks, completions)
    assert found[0].columns["tests"] == [{"input": [1.5, None]}]


def test_the_texts_of_data_are_in_the_prompts_once(tmp_path: Path) -> None:
    rows = [{"question": "a", "answer": "1"}]
    settings = {"system_prompt": "S", "prompt_suffix": "!", "prefill": "<think>\n"}
    tasks = tasks_of(tmp_path, rows, **settings)
    assert tasks[0].form == "continued"
    assert_same(round_trip(tmp_path, tasks, ["x"]), tasks, ["x"])


def test_a_completion_that_repeats_the_prefill_is_trained_as_it_is(tmp_path: Path) -> None:
    tasks = tasks_of(tmp_path, [{"question": "12", "answer": "1"}], prefill="7 ")
    renderer = Renderer(character_tokenizer(ScratchConfig().alphabet))
    for completion in ("71", "\n71", " 71", "7 1", "1"):
        (task,) = round_trip(tmp_path, tasks, [completion])
        assert renderer.decode(renderer.solution(task)) == completion


def test_rendered_prompts_stay_rendered(tmp_path: Path) -> None:
    rows = [{"question": "<|user|>1+1=<|assistant|>", "answer": "2"}]
    tasks = tasks_of(tmp_path, rows, prompt_form="rendered")
    assert_same(round_trip(tmp_path, tasks, ["2"]), tasks, ["2"])


def test_rows_of_a_code_benchmark_are_not_converted_a_second_time(tmp_path: Path) -> None:
    """That would replace the prompts that were sampled. A reward that needs tests says so."""
    row = {
        "task_id": "HumanEval/0",
        "prompt": "def f(x):\n    'Return x.'\n",
        "canonical_solution": "    return x\n",
        "test": "def check(candidate):\n    assert candidate(1) == 1\n",
        "entry_point": "f",
    }
    converted = tasks_of(tmp_path, [row], prompt_field="prompt", rewards=("code",))
    (found,) = round_trip(tmp_path, converted, ["x"], rewards=("code",))
    assert found.prompt == converted[0].prompt != row["prompt"]
    assert found.columns["tests"] == converted[0].columns["tests"]
    unconverted = tasks_of(tmp_path, [row], prompt_field="prompt")
    (found,) = round_trip(tmp_path, unconverted, ["x"])
    assert found.prompt == unconverted[0].prompt == row["prompt"]
    with pytest.raises(UserError, match="tests"):
        round_trip(tmp_path, unconverted, ["x"], rewards=("code",))


def test_a_dataset_can_be_sampled_again(tmp_path: Path) -> None:
    tasks = tasks_of(tmp_path, [{"id": "a", "question": "1", "answer": "1", "tests": ["x"]}])
    first = round_trip(tmp_path, tasks, ["first"])
    (second,) = round_trip(tmp_path, first, ["second"])
    assert (second.trace, second.id) == ("second", "a/sample-3/sample-3")
    assert second.columns["provenance"]["task"] == "a/sample-3"
    assert second.columns["tests"] == ["x"]


def test_an_episode_is_played_again_with_its_replies(tmp_path: Path) -> None:
    """The trained tokens of SFT are those that were sampled."""
    renderer = Renderer(character_tokenizer(ScratchConfig().alphabet))
    player = Player(
        Script(renderer, ()), renderer, Limits(90, 8), Calculator, environment="calculator"
    )  # type: ignore[arg-type]
    task = Task("1", "12+45*7=", answer=327, trace=("c(45*7)", "c(12+315)", "327"))
    (sampled,) = asyncio.run(worked_episodes(player, [task]))
    sampled.reward = Reward(1.0, solved=True)
    read = partial(completion_of, decode=renderer.decode, stops=player.stops)
    (kept,) = select([Group(task, [sampled])], SampleConfig(), read).kept
    (found,) = round_trip(tmp_path, [task], [kept.completion])
    assert found.trace == task.trace
    (again,) = asyncio.run(worked_episodes(player, [found]))
    assert (again.tokens, again.provenance) == (sampled.tokens, sampled.provenance)


def test_columns_without_json_are_left_out_with_a_note() -> None:
    columns = {
        "nan": math.nan,
        "deep": [{"x": [math.inf]}],
        "bytes": b"x",
        "keys": {1: 2},
        "surrogate": "\ud800",
        "long": 10**4300,
        "fine": ({"x": 1.5},),
    }
    tasks = [Task("a", "?", 1, columns=columns), Task("b", "?", 1, columns={"nan": 1.0})]
    form, notes = check_tasks(tasks)
    assert form == "messages"
    assert [note.split("'")[1] for note in notes] == [name for name in columns if name != "fine"]
    assert all(" 1 tasks " in note and "left out" in note for note in notes)
    row = sampled_row(Keeper(tasks[0], 0, "x", 1.0), model="", seed=0)
    assert set(columns) & set(row) == {"fine"}
    assert sampled_row(Keeper(tasks[1], 0, "x", 1.0), model="", seed=0)["nan"] == 1.0


def test_columns_that_ours_replace_are_noted() -> None:
    columns = {"id": 7, "reward": 2, "prompt": "other", "answer": 1, "completion": "old"}
    _, notes = check_tasks([Task("split/7", "?", 1, columns=columns)])
    assert [note.split("'")[1] for note in notes] == ["reward", "prompt", "completion"]
    assert all("replaced" in note for note in notes)


def test_tasks_that_no_row_can_hold_are_refused_before_sampling() -> None:
    good = Task("good", "?", 1)
    for bad, named in (
        (replace(good, id="bad", answer=math.nan), "answer"),
        (replace(good, id="bad", answer=b"x"), "answer"),
        (replace(good, id="bad", prompt="\ud800"), "prompt"),
        (replace(good, id="bad", prompt='[{"role": "user", "content": "x"}]'), "prompt"),
        (replace(good, id="bad", prompt=({"role": "tool", "content": "x"},)), "roles"),
        (replace(good, id="bad", template_args={"x": math.inf}), "template_args"),
        (replace(good, id="bad", columns={"tools": [TOOL]}), "tools"),
        (replace(good, id="bad", form="rendered"), "form"),
        (replace(good, id="bad", world="3"), "world"),
    ):
        with pytest.raises(UserError, match=rf"task bad.*{named}"):
            check_tasks([good, bad])


def test_mixed_rows_are_drawn_by_weight(tmp_path: Path) -> None:
    path = tmp_path / "other.jsonl"
    rows = [{"prompt": f"p{i}", "completion": f"c{i}", "extra": i} for i in range(20)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tasks = loaded(path)
    found, note = mixed_rows(tasks, 10, 0.5, number=0, seed=1)
    assert note == "" and len(found) == 5
    expected = {(f"p{i}", f"c{i}", i) for i in range(20)}
    assert len({(r["prompt"], r["completion"], r["extra"]) for r in found} & expected) == 5
    assert mixed_rows(tasks, 10, 0.5, number=0, seed=1)[0] == found
    assert mixed_rows(tasks, 10, 0.5, number=0, seed=2)[0] != found
    assert mixed_rows(tasks, 1, 0.4, number=0, seed=1) == ([], "")
    every, note = mixed_rows(tasks, 10, 3.0, number=1, seed=1)
    assert len(every) == 20 and "20 rows" in note and "3 times the 10" in note
    assert not {row["id"] for row in every} & {row["id"] for row in found}


def test_sampled_and_mixed_rows_load_together(tmp_path: Path) -> None:
    (task,) = tasks_of(tmp_path, [{"id": "a", "question": "1", "answer": "1"}])
    sampled = sampled_row(Keeper(task, 0, "x", 1.0), model="f00", seed=0)
    write_block(tmp_path / "first", 0, [sampled], {})
    join(tmp_path / "first", 1, tmp_path / "first.jsonl")
    mixed, _ = mixed_rows(loaded(tmp_path / "first.jsonl"), 1, 1.0, number=0, seed=0)
    assert mixed[0]["provenance"] == sampled["provenance"]
    write_block(tmp_path / "both", 0, [sampled], {})
    write_block(tmp_path / "both", 1, mixed, {})
    join(tmp_path / "both", 2, tmp_path / "both.jsonl")
    found = loaded(tmp_path / "both.jsonl")
    assert [task.id for task in found] == ["a/sample-0", "a/sample-0/mix-0"]
    assert [task.trace for task in found] == ["x", "x"]
