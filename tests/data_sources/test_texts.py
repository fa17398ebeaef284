"""Documents from every source: complete texts, a held-out part that no training document repeats,
and one line for each thing that can be wrong.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from sixfold.data.sources import load_tasks
from sixfold.data.texts import TextSet, load_texts
from sixfold.errors import UserError
from sixfold.recipe.schema import ArithmeticConfig, DataConfig, SourceConfig


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))
    datasets.disable_progress_bars()


def load(source: Path | str, field: str = "text", seed: int = 0, **data: Any) -> TextSet:
    return load_texts(DataConfig(source=str(source), **data), field, seed=seed)


def texts(made: TextSet) -> tuple[list[str], list[str]]:
    return [one.text for one in made.train], [one.text for one in made.heldout]


def rows(path: Path, *found: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in found))
    return path


def refusal(*args: Any, **data: Any) -> str:
    with pytest.raises(UserError) as caught:
        load(*args, **data)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_text_file_is_one_document_with_every_character(tmp_path: Path) -> None:
    text = "\u00e9\u4e2d \r\nsecond\n\n\tlast \x0b"
    for name, data in (("a.txt", text.encode()), ("b.txt.gz", gzip.compress(text.encode()))):
        (tmp_path / name).write_bytes(data)
        assert texts(load(tmp_path / name, heldout=0)) == ([text], [])


def test_the_end_of_an_only_document_is_held_out_and_a_note_says_so(tmp_path: Path) -> None:
    text = "".join(chr(0x4E00 + i) for i in range(95))
    (tmp_path / "a.txt").write_text(text)
    made = load(tmp_path / "a.txt")
    assert texts(made) == ([text[:85]], [text[85:]])
    (note,) = made.notes
    assert "a.txt" in note and "10 characters" in note and "held out" in note


def test_a_folder_of_text_files_is_a_document_per_file(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    for name in ("b.txt", "a.txt", "deep/c.txt"):
        (tmp_path / name).write_text(f"text of {name}")
    (tmp_path / "picture.png").write_bytes(b"\x89")
    made = load(tmp_path, heldout=1)
    assert sorted(texts(made)[0] + texts(made)[1]) == [
        "text of a.txt",
        "text of b.txt",
        "text of deep/c.txt",
    ]
    assert len(made.heldout) == 1
    assert len(load(tmp_path, heldout=0, limit=2).train) == 2


def test_a_folder_that_also_has_rows_is_a_dataset(tmp_path: Path) -> None:
    (tmp_path / "README.txt").write_text("about the rows")
    rows(tmp_path / "train.jsonl", *({"text": f"row {n}"} for n in range(3)))
    assert texts(load(tmp_path, heldout=0))[0] == ["row 0", "row 1", "row 2"]


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv", "parquet"])
def test_rows_have_their_text_in_the_column_that_is_named(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.{suffix}"
    found = datasets.Dataset.from_dict({"body": ["one, \u00e9", "two"], "text": ["x", "y"]})
    if suffix == "json":
        path.write_text(json.dumps(list(found)))
    else:
        getattr(found, f"to_{'json' if suffix == 'jsonl' else suffix}")(path)
    assert texts(load(path, "body", heldout=0)) == (["one, \u00e9", "two"], [])
    nested = rows(tmp_path / "n.jsonl", {"meta": {"body": "deep"}})
    assert texts(load(nested, "meta.body", heldout=0)) == (["deep"], [])


def test_held_out_documents_are_drawn_by_hash_and_do_not_depend_on_the_order(
    tmp_path: Path,
) -> None:
    names = [f"{n}.txt" for n in range(30)]
    (tmp_path / "here").mkdir()
    for name in names:
        (tmp_path / "here" / name).write_text(f"text of {name}")
    first = load(tmp_path / "here", heldout=7)
    train, heldout = texts(first)
    assert first.notes == []
    assert len(heldout) == 7 and sorted(train + heldout) == sorted(f"text of {n}" for n in names)
    assert texts(load(tmp_path / "here", heldout=7)) == (train, heldout)
    assert set(texts(load(tmp_path / "here", heldout=7, seed=1))[1]) != set(heldout)
    for text in train[:5]:
        (tmp_path / "here" / text.split()[-1]).unlink()
    (tmp_path / "here").rename(tmp_path / "there")
    assert texts(load(tmp_path / "there", heldout=7)) == (train[5:], heldout)


def test_another_file_is_held_out_and_what_it_repeats_is_dropped(tmp_path: Path) -> None:
    train = rows(tmp_path / "train.jsonl", {"text": "a"}, {"text": "b"}, {"text": "a"})
    test = rows(tmp_path / "test.jsonl", {"text": "a"}, {"text": "c"})
    made = load(train, heldout_split=str(test))
    assert texts(made) == (["b"], ["a", "c"])
    assert made.notes == ["2 training documents also occur in the held-out ones and are left out"]
    for name in ("train", "test"):
        (tmp_path / f"{name}.txt").write_text(name)
    made = load(tmp_path / "train.txt", heldout_split=str(tmp_path / "test.txt"))
    assert texts(made) == (["train"], ["test"]) and not made.notes


def test_empty_documents_are_counted(tmp_path: Path) -> None:
    path = rows(tmp_path / "a.jsonl", {"text": ""}, {"text": "a"}, {"text": None}, {"text": " \n"})
    made = load(path, heldout=0)
    assert texts(made) == (["a"], []) and made.notes == ["3 documents are empty and are left out"]
    assert "has no text: 1 documents are empty" in refusal(rows(tmp_path / "b.jsonl", {"text": ""}))


@pytest.mark.parametrize("source", ["arithmetic", "calculator"])
def test_a_task_that_is_held_out_for_rl_is_in_no_training_document(source: str) -> None:
    data = DataConfig(source=source, heldout=20, limit=90, arithmetic=ArithmeticConfig(digits=2))
    made, tasks = load_texts(data, "text", seed=3), load_tasks(data, seed=3, rewards=())
    assert [one.task for one in made.train] == tasks.train
    assert {one.id for one in made.heldout} == {task.id for task in tasks.heldout}
    for one in made.train:
        assert one.task and isinstance(one.task.prompt, str)
        assert one.text.startswith(one.task.prompt) and one.text.endswith(str(one.task.answer))
        trace = one.task.trace if isinstance(one.task.trace, str) else "".join(one.task.trace or ())
        assert one.text == one.task.prompt + trace


def test_documents_of_several_sources_follow_each_other(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("long text")
    table = rows(tmp_path / "b.jsonl", {"text": "row"}, {"text": ""})
    sources = (
        SourceConfig(source=str(tmp_path / "a.txt"), name="a"),
        SourceConfig(source=str(table), name="b"),
        SourceConfig(source="arithmetic", limit=2, name="c"),
    )
    made = load_texts(DataConfig(sources=sources, heldout=0), "text", seed=0)
    assert [one.text for one in made.train[:2]] == ["long text", "row"] and len(made.train) == 4
    assert [one.id.partition("/")[0] for one in made.train] == ["a", "b", "c", "c"]
    assert made.notes == ["b: 1 documents are empty and are left out"]
    heavy = DataConfig(sources=(sources[0], SourceConfig(source="arithmetic", weight=2.0)))
    with pytest.raises(UserError, match=r"weight of 'arithmetic' has no effect.*Remove it"):
        load_texts(heavy, "text", seed=0)


def test_what_is_wrong_is_one_line_with_the_place_and_the_remedy(tmp_path: Path) -> None:
    assert "missing.txt: no such file" in refusal(tmp_path / "missing.txt")
    bad = tmp_path / "bad.txt"
    bad.write_bytes(b"ab\xff")
    assert "bad.txt: invalid UTF-8 at byte 2" in refusal(bad)
    (tmp_path / "cut.txt.gz").write_bytes(gzip.compress(b"text" * 99)[:-9])
    assert "cut.txt.gz: the packed file is damaged" in refusal(tmp_path / "cut.txt.gz")
    table = rows(tmp_path / "a.jsonl", {"body": "x"}, {"body": 3})
    said = refusal(table)
    assert "a.jsonl:1: missing field 'text'" in said and "pretrain.text_field" in said
    assert "'body'" in said
    said = refusal(table, "body")
    assert "a.jsonl:2: 'body' must be text, got int" in said and "pretrain.text_field" in said
    good = tmp_path / "good.txt"
    good.write_text("text")
    assert "data.subset and data.revision" in refusal(good, subset="main")
    assert "data.heldout_split is another .txt file" in refusal(good, heldout_split="test")
    two = rows(tmp_path / "two.jsonl", {"text": "a"}, {"text": "b"})
    assert "data.heldout = 2 of 2 documents" in refusal(two, heldout=2)
    assert "all training documents are also held out" in refusal(two, heldout_split=str(two))
    (tmp_path / "x.md").write_text("text")
    assert ".txt" in refusal(tmp_path / "x.md")
