"""Stages in a row: order, resume after a kill anywhere, changes, provenance, stages of users."""

from __future__ import annotations

import fcntl
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from made_sets import (
    STAGE,
    curate,
    exact_stage,
    killed_at,
    output_bytes,
    provenance,
    read_rows,
    source_text,
    told,
    write_lines,
    write_recipe,
)
from pyarrow import parquet

from sixfold.data.comparisons import load_comparisons
from sixfold.data.sources import load_tasks
from sixfold.recipe.schema import ComparisonsConfig, DataConfig
from sixfold_curation.pipeline import opened_sources, planned
from sixfold_curation.rows_on_disk import StoredRows
from sixfold_curation.settings import read_curation

HALVED = f'[[stages]]\nkind = "{Path(__file__).with_name("made_sets.py")}:Halved"\n'


def rows_of(count: int, **more: Any) -> list[dict[str, Any]]:
    """Every prompt three times, in turn."""
    distinct = count // 3
    return [
        {"question": f"{n % distinct}+1?", "answer": f"{n % distinct + 1}", **more}
        for n in range(count)
    ]


def make_recipe(folder: Path, count: int = 30, **head: str) -> Path:
    """Two sources, duplicates, and every second row held."""
    folder.mkdir(exist_ok=True)
    first = write_lines(folder / "a.jsonl", rows_of(count))
    second = write_lines(
        folder / "b.jsonl", [*rows_of(6, level=1), {"question": None, "answer": 1}]
    )
    sources = source_text(first, "a"), source_text(second, "b", origin="public")
    settings = "\n".join(f"{name} = {json.dumps(value)}" for name, value in head.items())
    return write_recipe(folder, *sources, stages=exact_stage(folder) + HALVED, head=settings)


def test_the_rows_and_the_story_of_each(tmp_path: Path) -> None:
    """Worked out by hand: ten prompts of a and none of b are new; every second one is held."""
    assert curate(make_recipe(tmp_path)) == 0
    out = tmp_path / "out"
    assert [one["id"] for one in read_rows(out / "train.jsonl")] == [
        f"a/row-{n}" for n in range(1, 11, 2)
    ]
    assert [one["id"] for one in read_rows(out / "held.jsonl")] == [
        f"a/row-{n}" for n in range(2, 11, 2)
    ]
    stories = provenance(out)
    assert len(stories) == 37  # every row that was read
    assert [one["where"] for one in stories[29:31]] == [
        f"{tmp_path}/a.jsonl:30",
        f"{tmp_path}/b.jsonl:1",
    ]
    fates = [one["fate"] for one in stories]
    assert fates == ["kept", "held"] * 5 + ["dropped"] * 27
    assert told(stories[1]) == [("Halved", "held_odd")]
    assert told(stories[30]) == [("exact", "duplicate")]
    assert (stories[30]["stage"], stories[30]["note"]) == ("exact", "same as a/row-1")
    assert told(stories[36]) == [("sources", "no_prompt")]
    summary = json.loads((out / "summary.json").read_text())
    counts = [(s["name"], s["rows"], s["kept"], s["dropped"]) for s in summary["stages"]]
    assert counts == [
        ("sources", 37, 36, {"no_prompt": 1}),
        ("exact", 36, 10, {"duplicate": 26}),
        ("Halved", 10, 5, {"held_odd": 5}),
    ]
    assert [s["alarm"] for s in summary["stages"]][1] == "many duplicates"


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_a_kill_at_any_point_and_the_same_command_give_the_same_bytes(
    tmp_path: Path, form: str
) -> None:
    whole = make_recipe(tmp_path / "whole", format=form)
    assert curate(whole) == 0
    # The paths in notes and in the report must be equal.
    recipe = whole.with_name("again.toml")
    recipe.write_text(whole.read_text().replace("/out", "/again"))
    expected = output_bytes(tmp_path / "whole" / "out")
    again, point = tmp_path / "whole" / "again", 0
    while True:
        point += 1
        if again.exists():
            for path in sorted(again.rglob("*"), reverse=True):
                path.unlink() if path.is_file() else path.rmdir()
        if not killed_at(point, lambda: curate(recipe)):
            break
        assert curate(recipe) == 0
        assert output_bytes(again) == expected, f"killed at {point}"
    assert point > 20
    assert output_bytes(again) == expected


def test_kills_that_follow_each_other_end_with_the_same_bytes(tmp_path: Path) -> None:
    """Each run dies after about one more stage."""
    recipe = make_recipe(tmp_path)
    assert curate(recipe) == 0
    expected = output_bytes(tmp_path / "out")
    os.rename(tmp_path / "out", tmp_path / "before")
    kills = 0
    while killed_at(14, lambda: curate(recipe)):
        kills += 1
        assert kills < 20
    assert kills > 1
    assert output_bytes(tmp_path / "out") == expected


def stage_runs(capsys: pytest.CaptureFixture[str]) -> list[bool]:
    """For each stage, whether it ran."""
    lines = [line for line in capsys.readouterr().err.splitlines() if "rows kept" in line]
    return ["done before" not in line for line in lines]


def test_a_change_repeats_the_stages_that_it_concerns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = make_recipe(tmp_path)
    curate(recipe)
    assert stage_runs(capsys) == [True, True, True]
    curate(recipe)
    assert stage_runs(capsys) == [False, False, False]
    curate(recipe, "--set", "stages.exact.lower=true")
    assert stage_runs(capsys) == [False, True, True]
    curate(recipe, "--set", "stages.exact.lower=true", "--set", "format=parquet")
    assert stage_runs(capsys) == [False, False, False]
    assert not (tmp_path / "out" / "train.jsonl").exists()
    curate(recipe, "--set", "seed=1")
    assert stage_runs(capsys) == [True, True, True]
    write_lines(tmp_path / "b.jsonl", rows_of(6))
    curate(recipe, "--set", "seed=1")
    assert stage_runs(capsys) == [True, True, True]
    (tmp_path / "own_stage.py").write_text((tmp_path / "own_stage.py").read_text() + "\n")
    curate(recipe, "--set", "seed=1")
    assert stage_runs(capsys) == [False, True, True]
    curate(recipe, "--set", "seed=1", "--set", "longest_row=10000")
    assert stage_runs(capsys) == [True, True, True]
    assert curate(recipe) == 0
    write_lines(tmp_path / "b.jsonl", [*rows_of(6), {"question": None, "answer": 1}])
    assert curate(recipe) == 0
    assert curate(recipe, "--set", "bad_rows=refuse") == 2  # although its sources were read before


CODE = {
    "a package": ("rules_within:Exact", "rules_within/exact.py"),
    "a package below": ("rules_within:Exact", "rules_within/deep/limits.py"),
    "beside the folder of a module": ("rules_within.exact:Exact", "rules_within/deep/limits.py"),
    "above the folder of a module": ("rules_within.deep.limits:Exact", "rules_within/exact.py"),
    "a module": ("rules_alone:Exact", "exact_beside.py"),
}
"""Kind of a stage, and a file that it depends on."""


@pytest.mark.parametrize(("kind", "inside"), CODE.values(), ids=CODE)
def test_a_stage_of_a_module_depends_on_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, inside: str
) -> None:
    """The files of a package, and what a module alone imports from its folder."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "rules_within" / "deep").mkdir(parents=True)
    (tmp_path / "rules_within" / "deep" / "__init__.py").write_text("")
    (tmp_path / "rules_within" / "deep" / "limits.py").write_text(STAGE)
    (tmp_path / "rules_within" / "__init__.py").write_text("from .exact import Exact\n")
    (tmp_path / "rules_within" / "exact.py").write_text(STAGE)
    (tmp_path / "rules_alone.py").write_text("from exact_beside import Exact\n")
    (tmp_path / "exact_beside.py").write_text(STAGE)
    path = write_lines(tmp_path / "a.jsonl", rows_of(4))
    recipe = write_recipe(tmp_path, source_text(path), stages=f'[[stages]]\nkind = "{kind}"\n')
    curation = read_curation(recipe)
    opened = opened_sources(curation)
    keys = [planned(curation, opened)[-1].key for _ in range(2)]
    (tmp_path / inside).write_text(f"{STAGE}# changed\n")
    keys.append(planned(curation, opened)[-1].key)
    assert keys[0] == keys[1] != keys[2]


def test_a_change_of_a_file_that_a_stage_imports_repeats_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From its folder, also in a function, and by way of another file."""
    recipe = make_recipe(tmp_path)
    own = tmp_path / "own_stage.py"
    own.write_text(f"{STAGE}\ndef later():\n    import rules_beside\n")
    (tmp_path / "rules_beside.py").write_text("import limits_beside\n")
    (tmp_path / "limits_beside.py").write_text("LIMIT = 1\n")
    (tmp_path / "other.py").write_text("import json\n")
    for name, again in (("other", False), ("rules_beside", True), ("limits_beside", True)):
        curate(recipe)
        capsys.readouterr()
        (tmp_path / f"{name}.py").write_text((tmp_path / f"{name}.py").read_text() + "\n")
        curate(recipe)
        assert stage_runs(capsys) == [False, again, again], name


def test_imports_from_a_folder_without_an_init_file(tmp_path: Path) -> None:
    """Their files count too. A folder of data with the name of a package has none."""
    recipe = make_recipe(tmp_path)
    (tmp_path / "own_stage.py").write_text(
        f"from plain_beside.limits import LIMIT\nfrom plain_beside import deep\n{STAGE}\n"
        "def later():\n    import datasets\n    from datasets import load_dataset\n"
    )
    (tmp_path / "plain_beside" / "deep").mkdir(parents=True)
    (tmp_path / "datasets").mkdir()
    (tmp_path / "datasets" / "a.jsonl").write_text("{}")
    limits = tmp_path / "plain_beside" / "limits.py"
    keys = []
    for text in ("LIMIT = 1\n", "LIMIT = 1\n", "LIMIT = 2\n"):
        limits.write_text(text)
        curation = read_curation(recipe)
        keys.append(planned(curation, opened_sources(curation))[-1].key)
    assert keys[0] == keys[1] != keys[2]


def test_folders_of_other_rules_run_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make_recipe(tmp_path)
    monkeypatch.setattr("sixfold_curation.pipeline.RULES", 1)
    curate(recipe)
    monkeypatch.undo()
    for again in (True, False):
        capsys.readouterr()
        curate(recipe)
        assert stage_runs(capsys) == [again] * 3


def test_a_change_of_a_file_that_a_setting_names_repeats_its_stage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    named = tmp_path / "words.txt"
    named.write_text("a")
    recipe = make_recipe(tmp_path)
    change = ("--set", f"stages.exact.file={named}")
    curate(recipe, *change)
    curate(recipe, *change)
    assert stage_runs(capsys)[3:] == [False, False, False]
    named.write_text("b")
    curate(recipe, *change)
    assert stage_runs(capsys) == [False, True, True]


def test_results_after_a_change_are_those_of_a_new_folder(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path)
    curate(recipe)
    write_lines(tmp_path / "a.jsonl", rows_of(12))
    curate(recipe)
    changed = output_bytes(tmp_path / "out")
    os.rename(tmp_path / "out", tmp_path / "before")
    curate(recipe)
    assert output_bytes(tmp_path / "out") == changed


def test_an_output_that_was_changed_is_written_again(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path)
    curate(recipe)
    expected = output_bytes(tmp_path / "out")
    (tmp_path / "out" / "train.jsonl").write_text("changed")
    curate(recipe)
    assert output_bytes(tmp_path / "out") == expected


def test_a_damaged_file_of_work_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = make_recipe(tmp_path)
    curate(recipe)
    file = tmp_path / "out" / "work" / "01-exact" / "rows.jsonl.zst"
    file.write_bytes(file.read_bytes()[:-8])
    assert curate(recipe, "--set", "format=parquet") == 0  # it is not needed
    assert curate(recipe, "--set", "stages.Halved.name=x") == 2
    assert "01-exact/rows.jsonl.zst" in capsys.readouterr().err


def test_the_folder_of_another_data_set_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = make_recipe(tmp_path)
    curate(recipe)
    assert curate(recipe, "--set", "name=other") == 2
    assert "holds the data set 'made'" in capsys.readouterr().err
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("x")
    assert curate(recipe, "--out", str(tmp_path / "notes")) == 2
    assert "something else" in capsys.readouterr().err
    assert curate(recipe, "--out", str(tmp_path / "notes" / "mine.txt")) == 2
    assert "is a file" in capsys.readouterr().err


def test_two_processes_do_not_write_one_data_set(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = make_recipe(tmp_path)
    curate(recipe)
    with (tmp_path / "out" / "work" / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert curate(recipe) == 2
    assert "another process writes" in capsys.readouterr().err


def test_folders_of_stages_that_are_gone_are_removed(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path)
    curate(recipe)
    recipe.write_text(recipe.read_text().replace(HALVED, ""))
    curate(recipe)
    work = tmp_path / "out" / "work"
    assert sorted(path.name for path in work.iterdir() if path.is_dir()) == [
        "00-sources",
        "01-exact",
    ]
    assert not (tmp_path / "out" / "held.jsonl").exists()


WRONG = {
    "skips a row": ("if at: yield Decision(row)", "decided about 9 of 10|in their order"),
    "another order": ("yield Decision(list(rows)[9 - at])", "in their order"),
    "drops a row twice": ("yield Decision(row); yield Decision(row, False)", "in their order"),
    "changes a text alone": (
        "yield Decision(replace(row, prompt='x'))",
        "id, source, prompt and answer differ from the fields",
    ),
    "repeats an id": ("yield Decision(row); yield Decision(row)", "two rows with the id"),
    "no JSON": ("yield Decision(replace(row, fields={**row.fields, 'x': {1}}))", "not JSON"),
    "no health": ("yield Decision(row)", "returns its Health"),
    "an error": ("yield Decision(row); 1 / (3 - at)", "ZeroDivisionError"),
    "an exit": ("yield Decision(row); raise SystemExit(0)", "SystemExit"),
}


@pytest.mark.parametrize(("body", "message"), WRONG.values(), ids=WRONG)
def test_a_wrong_stage_of_a_user_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], body: str, message: str
) -> None:
    health = "" if "Health" in message else "        return Health('n', 1.0)\n"
    (tmp_path / "own.py").write_text(
        "from dataclasses import replace\n"
        "from sixfold_curation.stage import Decision, Health, Stage\n"
        "class Own(Stage):\n    kind = 'own'\n    def decide(self, rows, context):\n"
        f"        for at, row in enumerate(rows):\n            {body}\n{health}"
    )
    path = write_lines(
        tmp_path / "a.jsonl", [{"question": f"{n}?", "answer": n} for n in range(10)]
    )
    stages = f'[[stages]]\nkind = "{tmp_path}/own.py:Own"\n'
    assert curate(write_recipe(tmp_path, source_text(path), stages=stages)) == 2
    (line,) = [one for one in capsys.readouterr().err.splitlines() if "error" in one]
    assert "stage 'Own'" in line
    assert re.search(message, line)
    assert not (tmp_path / "out" / "train.jsonl").exists()


@pytest.mark.parametrize(
    "health", ["'n', 'x'", "'n', None", "1, 1.0", "'n', 1.0, True", "'n', 1.0, '', {'a': {1}}"]
)
def test_health_of_another_type_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], health: str
) -> None:
    (tmp_path / "own.py").write_text(
        "from sixfold_curation.stage import Decision, Health, Stage\n"
        "class Own(Stage):\n    kind = 'own'\n    def decide(self, rows, context):\n"
        f"        yield from map(Decision, rows)\n        return Health({health})\n"
    )
    path = write_lines(tmp_path / "a.jsonl", [{"question": "1?", "answer": 1}])
    stages = f'[[stages]]\nkind = "{tmp_path}/own.py:Own"\n'
    assert curate(write_recipe(tmp_path, source_text(path), stages=stages)) == 2
    (line,) = [one for one in capsys.readouterr().err.splitlines() if "error" in one]
    assert "stage 'Own'" in line


def test_a_stage_may_change_rows_and_repeat_them(tmp_path: Path) -> None:
    """The second copy of a row has an id of its own, and later stages see both."""
    (tmp_path / "own.py").write_text(
        "from dataclasses import replace\n"
        "from sixfold_curation.stage import Decision, Health, Stage\n"
        "class Twice(Stage):\n    kind = 'twice'\n    def decide(self, rows, context):\n"
        "        for row in rows:\n"
        "            text = row.prompt.upper()\n"
        "            fields = {**row.fields, 'prompt': text}\n"
        "            yield Decision(replace(row, prompt=text, fields=fields), reason='upper')\n"
        "            again = {**fields, 'id': row.id + '#2'}\n"
        "            record = replace(row, id=again['id'], prompt=text, fields=again)\n"
        "            yield Decision(record, reason='copy')\n"
        "        return Health('n', 1.0)\n"
    )
    path = write_lines(
        tmp_path / "a.jsonl", [{"question": f"q{n}?", "answer": n} for n in range(3)]
    )
    stages = f'[[stages]]\nkind = "{tmp_path}/own.py:Twice"\n' + exact_stage(tmp_path) + HALVED
    recipe = write_recipe(tmp_path, source_text(path), stages=stages)
    assert curate(recipe) == 0
    read = read_rows(tmp_path / "out" / "train.jsonl")
    assert [(one["id"], one["prompt"]) for one in read] == [
        ("made/row-1", "Q0?"),
        ("made/row-3", "Q2?"),
    ]
    first = provenance(tmp_path / "out")[0]
    assert first["fate"] == "kept"
    assert told(first) == [("Twice", "upper"), ("Twice", "copy"), ("exact", "duplicate")]
    assert first["decisions"][1]["id"] == "made/row-1#2"
    assert "id" not in first["decisions"][0]


def test_a_row_with_a_new_id_has_the_fate_of_its_content(tmp_path: Path) -> None:
    """All ids change, every second row is held, and one that stays has a dropped copy."""
    (tmp_path / "own.py").write_text(
        "from dataclasses import replace\n"
        "from sixfold_curation.stage import Decision, Health, Stage\n"
        "def named(row, name):\n"
        "    return replace(row, id=name, fields={**row.fields, 'id': name})\n"
        "class Named(Stage):\n    kind = 'named'\n    def decide(self, rows, context):\n"
        "        for at, row in enumerate(rows):\n"
        "            yield Decision(named(row, f'new-{at}'))\n"
        "            if not at: yield Decision(named(row, 'copy'))\n"
        "        return Health('n', 1.0)\n"
    )
    rows = [{"question": f"q{n}?", "answer": n} for n in range(3)]
    path = write_lines(tmp_path / "a.jsonl", rows)
    stages = f'[[stages]]\nkind = "{tmp_path}/own.py:Named"\n' + HALVED
    assert curate(write_recipe(tmp_path, source_text(path), stages=stages)) == 0
    kept = [one["id"] for one in read_rows(tmp_path / "out" / "train.jsonl")]
    assert kept == ["new-0", "new-1"]
    stories = provenance(tmp_path / "out")
    assert [one["fate"] for one in stories] == ["kept", "kept", "held"]
    assert (stories[2]["id"], stories[2]["stage"]) == ("made/row-3", "Halved")
    assert stories[2]["decisions"][0]["id"] == "new-2"


def test_rows_in_a_file_can_be_read_more_than_once(tmp_path: Path) -> None:
    curate(make_recipe(tmp_path))
    rows = StoredRows(tmp_path / "out" / "work" / "01-exact" / "rows.jsonl.zst", 10)
    assert len(rows) == 10
    assert list(rows) == list(rows)
    assert list(rows.numbers) == list(range(10))
    assert [one.prompt for one in rows] == [f"{n}+1?" for n in range(10)]


def test_no_row_left_is_an_error_that_names_the_stage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own.py").write_text(
        "from sixfold_curation.stage import Decision, Health, Stage\n"
        "class Nothing(Stage):\n    kind = 'nothing'\n    def decide(self, rows, context):\n"
        "        for row in rows:\n            yield Decision(row, False, 'all')\n"
        "        return Health('n', float('nan'))\n"
    )
    path = write_lines(tmp_path / "a.jsonl", rows_of(3))
    stages = f'[[stages]]\nkind = "{tmp_path}/own.py:Nothing"\n' + exact_stage(tmp_path)
    assert curate(write_recipe(tmp_path, source_text(path), stages=stages)) == 2
    assert "stage 'Nothing' drops 3 of 3" in capsys.readouterr().err


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_parquet_and_jsonl_hold_the_same_rows(tmp_path: Path, form: str) -> None:
    """Also if columns of sources have different types, or none."""
    rows: list[dict[str, Any]] = [
        {"question": "a?", "answer": "1", "tags": ["x"], "n": 1, "empty": {}, "none": None},
        {"question": "b?", "answer": 2, "tags": "x", "n": 2.5, "deep": {"a": [{"b": 1}]}},
        {"question": "c?", "answer": "3", "deep": {"c": "d"}, "n": None},
    ]
    path = write_lines(tmp_path / "a.jsonl", rows)
    recipe = write_recipe(tmp_path, source_text(path), head=f'format = "{form}"')
    assert curate(recipe) == 0
    out = tmp_path / "out" / f"train.{form}"
    tasks = load_tasks(DataConfig(source=str(out), heldout=0), seed=0, rewards=("m:f",)).train
    assert [(one.id, one.prompt, str(one.answer)) for one in tasks] == [
        (f"made/row-{n + 1}", row["question"], str(row["answer"])) for n, row in enumerate(rows)
    ]
    if form == "parquet":
        table = parquet.read_table(out)
        assert table["tags"].to_pylist() == ['["x"]', "x", None]
        assert table["n"].to_pylist() == [1.0, 2.5, None]
        assert table["deep"].to_pylist()[1:] == [
            {"a": [{"b": 1}], "c": None},
            {"a": None, "c": "d"},
        ]


MIXED: dict[str, tuple[list[Any], list[Any]]] = {
    "number and text": ([5, "x"], ["5", "x"]),
    "truth value and number": ([True, 5], ["true", "5"]),
    "large integer": ([2**70, 5], [str(2**70), "5"]),
    "lists": ([["a"], [1]], ['["a"]', "[1]"]),
    "objects": ([{"a": 1}, {"a": "x"}], ['{"a": 1}', '{"a": "x"}']),
    "numbers in lists": ([[5], [2.5]], ["[5]", "[2.5]"]),
    "objects without fields": ([{}, {"a": 1}], [{"a": None}, {"a": 1}]),
    "numbers": ([5, 2.5], [5.0, 2.5]),
}
"""Values of a column, and what Parquet has of them."""


@pytest.mark.parametrize("case", MIXED)
def test_a_column_of_several_types_is_json_in_parquet(tmp_path: Path, case: str) -> None:
    values, wanted = MIXED[case]
    rows = [{"question": f"{n}?", "answer": "1", "x": one} for n, one in enumerate(values)]
    source = source_text(write_lines(tmp_path / "a.jsonl", rows))
    assert curate(write_recipe(tmp_path, source, head='format = "parquet"')) == 0
    assert parquet.read_table(tmp_path / "out" / "train.parquet")["x"].to_pylist() == wanted


def test_an_integer_stays_the_same_answer_in_parquet(tmp_path: Path) -> None:
    """5.0 is another text than 5, which a reply gives."""
    rows = [{"question": f"{one}?", "answer": one} for one in (5, 2.5)]
    source = source_text(write_lines(tmp_path / "a.jsonl", rows))
    assert curate(write_recipe(tmp_path, source, head='format = "parquet"')) == 0
    table = parquet.read_table(tmp_path / "out" / "train.parquet")
    assert table["answer"].to_pylist() == ["5", "2.5"]


def test_completions_of_two_forms_are_the_same_in_parquet(tmp_path: Path) -> None:
    """Texts in one source, and messages in another."""
    said = [[{"role": "user", "content": "b?"}, {"role": "assistant", "content": c}] for c in "45"]
    forms = [
        {"prompt": "a?", "chosen": "4", "rejected": "5"},
        {"chosen": said[0], "rejected": said[1]},
    ]
    sources = [
        source_text(write_lines(tmp_path / f"{label}.jsonl", [row]), label)
        for label, row in zip("ab", forms, strict=True)
    ]
    read = []
    for form in ("jsonl", "parquet"):
        assert curate(write_recipe(tmp_path, *sources, head=f'format = "{form}"')) == 0
        data = DataConfig(source=str(tmp_path / "out" / f"train.{form}"), heldout=0)
        made = load_comparisons(data, ComparisonsConfig(), seed=0, chat=True).train
        read.append([(one.prompt, one.completions) for one in made])  # type: ignore[attr-defined]
    assert read[0] == read[1]


def test_lists_of_answers_beside_texts_need_jsonl(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"question": "a?", "answer": "4"}, {"question": "b?", "answer": ["4", "four"]}]
    source = source_text(write_lines(tmp_path / "a.jsonl", rows))
    assert curate(write_recipe(tmp_path, source, head='format = "parquet"')) == 2
    assert "made/row-2" in (said := capsys.readouterr().err) and "format = 'jsonl'" in said


@pytest.mark.parametrize("answers", [[["4"], [5]], [[4], [0.5]]])
def test_lists_of_answers_of_several_types_need_jsonl(
    tmp_path: Path, answers: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """Their JSON text would be another answer."""
    rows = [{"question": f"{n}?", "answer": one} for n, one in enumerate(answers)]
    source = source_text(write_lines(tmp_path / "a.jsonl", rows))
    assert curate(write_recipe(tmp_path, source, head='format = "parquet"')) == 2
    assert "format = 'jsonl'" in capsys.readouterr().err


def test_a_drawn_row_has_the_id_that_it_has_without_a_limit(tmp_path: Path) -> None:
    """Also in a folder of several files, and if a row cannot be read."""
    (tmp_path / "rows").mkdir()
    for name in "ab":
        lines = [json.dumps({"question": f"{name} {n}?", "answer": "1"}) for n in range(5)]
        lines[2] = "{broken"
        (tmp_path / "rows" / f"{name}.jsonl").write_text("\n".join(lines))
    stories = []
    for limit in (0, 8):
        curate(write_recipe(tmp_path, source_text(tmp_path / "rows", limit=limit)))
        found = provenance(tmp_path / "out")
        stories.append({one["id"]: one.get("note", one["where"]) for one in found})
    every, drawn = stories
    assert [len(every), len(drawn)] == [10, 8]
    assert drawn.items() <= every.items()
    assert any("invalid JSON" in note for note in drawn.values())


def test_the_folder_is_a_data_set_of_the_hub(tmp_path: Path) -> None:
    """`datasets` reads the rows alone, as the card says."""
    curate(make_recipe(tmp_path))
    data = DataConfig(source=str(tmp_path / "out"), heldout=0)
    tasks = load_tasks(data, seed=0, rewards=("short_answer",)).train
    assert [one.id for one in tasks] == [f"a/row-{n}" for n in range(1, 11, 2)]


def test_a_data_set_is_a_source_of_another(tmp_path: Path) -> None:
    curate(make_recipe(tmp_path / "first"))
    (tmp_path / "second").mkdir()
    source = source_text(tmp_path / "first" / "out", licence=None, licence_field="licence")
    assert curate(write_recipe(tmp_path / "second", source)) == 0
    read = read_rows(tmp_path / "second" / "out" / "train.jsonl")
    assert [one["id"] for one in read] == [f"made/a/row-{n}" for n in range(1, 11, 2)]
    assert {one["licence"] for one in read} == {"mit"}


@pytest.mark.parametrize("limit", [4, 100])
def test_a_limit_draws_rows_of_the_whole_file_by_the_seed(tmp_path: Path, limit: int) -> None:
    path = write_lines(tmp_path / "a.jsonl", rows_of(60))
    drawn = []
    for seed in (0, 0, 1):
        recipe = write_recipe(tmp_path, source_text(path, limit=limit), head=f"seed = {seed}")
        curate(recipe)
        drawn.append([one["id"] for one in read_rows(tmp_path / "out" / "train.jsonl")])
    assert len(drawn[0]) == min(limit, 60)
    assert drawn[0] == drawn[1]
    assert (drawn[0] != drawn[2]) is (limit < 60)
