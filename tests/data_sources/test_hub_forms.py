"""Datasets as they are on the hub: nested columns, chats out of parquet, several sources,
revisions, columns that are not there.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pytest
from pyarrow import parquet

from sixfold.data.columns import MISSING, lookup
from sixfold.data.sources import load_tasks
from sixfold.data.task_set import TaskSet
from sixfold.errors import UserError
from sixfold.recipe.schema import DataConfig, SourceConfig


def load(data: DataConfig, *rewards: str, seed: int = 0) -> TaskSet:
    return load_tasks(data, seed=seed, rewards=rewards or ("math",))


def write(path: Path, *rows: Any) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def verl_row(n: int) -> dict[str, Any]:
    """verl's preprocessed form; DAPO-Math-17k has the same columns."""
    return {
        "data_source": "math_dapo",
        "prompt": [{"content": f"Solve {n}.", "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": str(n), "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": f"9a9b6eb4-{n}", "split": "train"},
    }


VERL = dict(
    prompt_field="prompt", answer_field="reward_model.ground_truth", id_field="extra_info.index"
)


@pytest.mark.parametrize("form", ["parquet", "jsonl", "numpy"])
def test_the_form_of_verl_and_dapo_math(tmp_path: Path, form: str) -> None:
    rows = [verl_row(n) for n in range(4)]
    if form == "parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
        source = str(tmp_path / "a.parquet")
    elif form == "numpy":
        datasets.Dataset.from_list(rows).with_format("numpy").save_to_disk(tmp_path / "a")
        source = str(tmp_path / "a")
    else:
        source = write(tmp_path / "a.jsonl", *rows)
    tasks = load(DataConfig(source=source, heldout=0, **VERL)).train
    assert [(t.id, t.prompt, t.answer) for t in tasks] == [
        (f"9a9b6eb4-{n}", ({"role": "user", "content": f"Solve {n}."},), str(n)) for n in range(4)
    ]
    assert (
        tasks[1].columns["reward_model"]["style"] == "rule-lighteval/MATH_v2"
        and tasks[1].columns["data_source"] == "math_dapo"
    )


def test_paths_into_rows() -> None:
    row = {"a": {"b": {"c": 1}, "n": None}, "a.b": 2, "l": [{"x": 3}], "t": "text"}
    assert [lookup(row, path) for path in ("a.b", "a.b.c", "l.0.x", "a.n", "t")] == [
        2,
        1,
        3,
        None,
        "text",
    ]
    for path in ("a.x", "a.n.x", "l.1", "l.-1", "t.0", "", "a.", "x"):
        assert lookup(row, path) is MISSING


def test_a_wrong_path_names_the_right_one(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", *(verl_row(n) for n in range(3)))
    with pytest.raises(
        UserError,
        match=(
            r"a.jsonl:1: missing field 'reward_model.groundtruth'.*Did you mean"
            r" 'reward_model.ground_truth'\?"
        ),
    ):
        load(
            DataConfig(
                source=source, heldout=0, **{**VERL, "answer_field": "reward_model.groundtruth"}
            )
        )
    with pytest.raises(
        UserError, match=r"a.jsonl:1: missing field 'extra_info.idx' \(data.id_field\)"
    ):
        load(DataConfig(source=source, heldout=0, **{**VERL, "id_field": "extra_info.idx"}))


def test_text_parts_are_joined_and_others_refused(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "1+"}, {"type": "text", "text": "1?"}]
    row = {"question": [{"role": "user", "content": parts, "name": None}], "answer": "2"}
    assert load(DataConfig(source=write(tmp_path / "a.jsonl", row), heldout=0)).train[0].prompt == (
        {"role": "user", "content": "1+1?"},
    )
    parts[1] = {"type": "image", "url": "x"}
    with pytest.raises(
        UserError, match=r"a.jsonl:1: a message has a part of type 'image'; only text"
    ):
        load(DataConfig(source=write(tmp_path / "a.jsonl", row), heldout=0))


@pytest.mark.parametrize("rewards", [("math",), ("mine.py:f",), ()])
def test_a_column_that_is_named_has_to_be_there(tmp_path: Path, rewards: tuple[str, ...]) -> None:
    source = write(tmp_path / "a.jsonl", *({"question": f"{n}?", "answer": n} for n in range(3)))
    for setting in ("answer_field", "prompt_field", "trace_field", "id_field"):
        with pytest.raises(
            UserError,
            match=rf"a.jsonl:1: missing field 'anser'.*data.{setting}|which reward 'math'",
        ):
            load_tasks(
                DataConfig(source=source, heldout=0, **{setting: "anser"}), seed=0, rewards=rewards
            )


def test_missing_answers_are_reported(tmp_path: Path) -> None:
    """A reward of the user's own may need none, so the column of the default name may be absent,
    with a word.
    """
    none = load(
        DataConfig(source=write(tmp_path / "a.jsonl", {"question": "q", "anwser": 1}), heldout=0),
        "mine.py:f",
    )
    assert none.train[0].answer is None and none.train[0].columns == {"question": "q", "anwser": 1}
    assert none.notes == [
        "split 'train' has no column 'answer' (data.answer_field), so its tasks have no reference"
        " answer. Did you mean 'anwser'?"
    ]
    some = load(
        DataConfig(
            source=write(
                tmp_path / "b.jsonl",
                {"question": "q", "answer": 1},
                {"question": "r", "answer": None},
            ),
            heldout=0,
        ),
        "mine.py:f",
    )
    assert some.notes == [
        "split 'train': 1 of 2 rows have no answer in 'answer' (data.answer_field)"
    ]


def test_rows_are_numbered_where_the_id_column_is_set_aside(tmp_path: Path) -> None:
    source = write(
        tmp_path / "a.jsonl", *({"question": f"{n}?", "answer": n, "id": 7} for n in range(2))
    )
    with pytest.raises(UserError, match=r"duplicate id '7'.*set data.id_field = ''"):
        load(DataConfig(source=source, heldout=0))
    assert [t.id for t in load(DataConfig(source=source, heldout=0, id_field="")).train] == [
        "train-0",
        "train-1",
    ]


def mixture(tmp_path: Path, **data: Any) -> DataConfig:
    one = write(
        tmp_path / "one.jsonl", *({"id": n, "question": f"one {n}?", "answer": n} for n in range(6))
    )
    two = write(
        tmp_path / "two.jsonl",
        *({"id": n, "problem": f"two {n}?", "solution": {"final": f"x = {n}"}} for n in range(4)),
    )
    sources = (
        SourceConfig(source=one, name="one", weight=3.0),
        SourceConfig(
            source=two,
            name="two",
            prompt_field="problem",
            answer_field="solution.final",
            answer_after="x =",
            prompt_suffix="!",
        ),
    )
    return DataConfig(**{"sources": sources, "heldout": 3, "prompt_suffix": ".", **data})


def test_a_mixture(tmp_path: Path) -> None:
    tasks = load(mixture(tmp_path))
    everything = {t.id: t for t in [*tasks.train, *tasks.heldout]}
    assert (
        set(everything) == {f"one/{n}" for n in range(6)} | {f"two/{n}" for n in range(4)}
        and len(tasks.heldout) == 3
    )
    two = everything["two/3"]
    assert (two.prompt, two.answer, two.source) == ("two 3?!", "3", "two")
    assert (everything["one/3"].prompt, everything["one/3"].source) == ("one 3?.", "one")
    assert tasks.weights == {"one": 3.0, "two": 1.0}
    assert load(mixture(tmp_path)) == tasks


def test_a_mixture_holds_out_the_splits_that_its_sources_name(tmp_path: Path) -> None:
    data = mixture(tmp_path)
    test = write(tmp_path / "test.jsonl", {"id": 0, "question": "one 5?", "answer": 5})
    first = data.sources[0].model_copy(update={"heldout_split": test})
    tasks = load(data.model_copy(update={"sources": (first, data.sources[1])}))
    assert [(t.id, t.prompt) for t in tasks.heldout] == [("heldout/one/0", "one 5?.")]
    assert len(tasks.train) == 9 and tasks.notes == [
        "1 training rows dropped: their prompts also occur in the held-out tasks"
    ]
    last = first.model_copy(update={"limit": 1, "heldout_split": str(tmp_path / "one.jsonl")})
    with pytest.raises(UserError, match=r"0 usable rows|no task of 'one' is left to train on"):
        load(
            data.model_copy(
                update={"sources": (last.model_copy(update={"limit": 0}), data.sources[1])}
            )
        )


def test_rewards_are_checked_against_every_source(tmp_path: Path) -> None:
    with pytest.raises(
        UserError,
        match=r"reward 'reasoning_gym' scores tasks of data.source = 'reasoning_gym' only",
    ):
        load(mixture(tmp_path), "reasoning_gym")
    with pytest.raises(
        UserError, match=r"two.jsonl:1: missing field 'answer', which reward 'math' checks"
    ):
        sources = mixture(tmp_path).sources
        load(
            mixture(
                tmp_path, sources=(sources[0], sources[1].model_copy(update={"answer_field": None}))
            )
        )


COMMIT = "0123456789abcdef0123456789abcdef01234567"


def test_a_revision_reaches_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def hub(*arguments: Any, **options: Any) -> dict[str, Any]:
        asked.append((arguments, options))
        split = datasets.Dataset.from_list([{"question": "q", "answer": "1"}])
        if options["revision"]:
            split.info.download_checksums = {
                f"hf://datasets/org/name@{COMMIT}/main/train.parquet": {"num_bytes": 1}
            }
        return {"train": split}

    monkeypatch.setattr("datasets.load_dataset", hub)
    pinned = load(DataConfig(source="org/name", subset="main", revision="abc123", heldout=0))
    assert pinned.hub_commits == {"org/name": COMMIT}
    assert load(DataConfig(source="org/name", heldout=0)).hub_commits == {}
    assert asked == [
        (("org/name", "main"), {"revision": "abc123"}),
        (("org/name", None), {"revision": None}),
    ]


def test_settings_of_the_hub_are_refused_for_what_is_here(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", {"question": "q", "answer": "1"})
    for unused in ({"revision": "v1"}, {"subset": "main"}):
        with pytest.raises(
            UserError, match=r"is a file: data.subset and data.revision are for hub datasets"
        ):
            load(DataConfig(source=source, heldout=0, **unused))
    with pytest.raises(UserError, match=r"data.revision = 'v1' pins a hub dataset"):
        load(DataConfig(source=str(tmp_path), revision="v1"))
    with pytest.raises(UserError, match=r"data.split and data.heldout_split are both 'train'"):
        load(DataConfig(source="org/name", heldout_split="train"))
