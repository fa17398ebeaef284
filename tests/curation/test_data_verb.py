"""`sixfold data`: what it prints, its exit codes, the report and the card."""

from __future__ import annotations

import json
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from made_sets import (
    curate,
    exact_stage,
    output_bytes,
    read_rows,
    source_text,
    write_lines,
    write_recipe,
)

from sixfold.cli import main
from sixfold.data.sources import load_tasks
from sixfold.recipe.schema import DataConfig


def rows_of(count: int) -> list[dict[str, Any]]:
    return [{"question": f"{n % 4}+1?", "answer": f"{n % 4 + 1}"} for n in range(count)]


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = write_lines(tmp_path / "a.jsonl", rows_of(12))
    return write_recipe(tmp_path, source_text(path), stages=exact_stage(tmp_path))


def test_the_table_has_rows_in_and_out_health_and_alarm(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert curate(recipe) == 0
    shown = capsys.readouterr().out
    lines = [line.split() for line in shown.splitlines()]
    assert ["sources", "12", "12", "0.0%", "rows", "that", "cannot", "be", "read", "0"] in lines
    assert ["exact", "12", "4", "66.7%", "share", "of", "duplicates", "0.667", "!"] in lines
    assert "alarm: exact: many duplicates" in shown
    assert str(recipe.parent / "out" / "train.jsonl") in shown


def test_copies_do_not_count_against_rows_that_are_dropped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of 8 rows, 4 are left out, and the other 4 are in the mix twice."""
    sources = [
        source_text(write_lines(tmp_path / f"{name}.jsonl", rows_of(4)), name) for name in "ab"
    ]
    mix = '[[stages]]\nkind = "mix"\nweights = { a = 1, b = 0 }\ncopies = 2\n'
    assert curate(write_recipe(tmp_path, *sources, stages=mix)) == 0
    assert re.search(r"mix +8 +8 +50\.0%", capsys.readouterr().out)
    assert re.search(r"50\.0\s?%", (tmp_path / "out" / "report.html").read_text())


def test_strict_has_exit_code_3_if_an_alarm_rings(recipe: Path) -> None:
    assert curate(recipe, "--strict") == 3
    assert len(read_rows(recipe.parent / "out" / "train.jsonl")) == 4  # the data set is made
    assert curate(recipe, "--set", "sources.made.limit=4") == 0
    assert curate(recipe, "--set", "stages.exact.lower=1") == 2


def test_plan_says_what_would_be_done_and_writes_nothing(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert curate(recipe, "--plan") == 0
    shown = capsys.readouterr().out
    assert "source made:" in shown and "human, licence mit" in shown
    assert "stage exact: to do · lower = False" in shown
    assert not (recipe.parent / "out").exists()
    curate(recipe)
    capsys.readouterr()
    curate(recipe, "--plan", "--set", "stages.exact.lower=true")
    shown = capsys.readouterr().out
    assert "stage sources: done, 12 of 12 rows kept" in shown
    assert "stage exact: to do · lower = True" in shown


def test_explain_prints_the_story_of_a_row(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    curate(recipe)
    capsys.readouterr()
    assert curate(recipe, "--explain", "made/row-6") == 0
    assert capsys.readouterr().out.splitlines() == [
        "made/row-6: dropped",
        f"  read from {recipe.parent}/a.jsonl:6",
        "  exact: dropped, duplicate: same as made/row-2",
    ]
    assert curate(recipe, "--explain", "made/row-2") == 0
    assert "made/row-2: kept" in capsys.readouterr().out
    assert curate(recipe, "--explain", "row-2") == 2
    assert "no row 'row-2'. Ids look like made/row-1" in capsys.readouterr().err


def test_explain_knows_a_row_by_every_id_that_it_had(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Copies of a mix, and the second of two rows with one id, have ids of their own."""
    path = write_lines(tmp_path / "a.jsonl", [{"id": "x", "prompt": p} for p in ("one", "two")])
    stages = '[[stages]]\nkind = "mix"\nweights = { made = 1 }\ntotal = 4\ncopies = 2\n'
    recipe = write_recipe(tmp_path, source_text(path), stages=stages)
    assert curate(recipe) == 0
    ids = [row["id"] for row in read_rows(tmp_path / "out" / "train.jsonl")]
    assert len(set(ids)) == 4
    for identity in ids:
        capsys.readouterr()
        assert curate(recipe, "--explain", identity) == 0
        assert f"{path}:{1 + ('x~2' in identity)}" in capsys.readouterr().out


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_leakage_names_the_prompts_that_jump_and_the_rows_that_have_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str
) -> None:
    """Two of 20 prompts go from 1 of 16 to 16 of 16; the data set has one of them."""
    prompts = [f"How many {name} does it take to fill {n} boxes of eggs and {n + 7} sacks of rice?"
               for n, name in enumerate("abcdefghijklmnopqrst")]  # fmt: skip

    def evaluation(name: str, right: dict[int, int]) -> str:
        samples = [
            {"task_id": f"t{n}", "prompt": text, "solved": sample < right.get(n, 1)}
            for n, text in enumerate(prompts)
            for sample in range(16)
        ]
        samples[0]["completion"] = "a line separator\u2028ends no line"
        path = tmp_path / name
        lines = (json.dumps(sample, ensure_ascii=False) + "\n" for sample in samples)
        path.write_text("".join(lines))
        return str(path)

    base, trained = evaluation("base.jsonl", {}), evaluation("trained.jsonl", {4: 16, 9: 16})
    rows = [{"question": text, "answer": "1"} for text in (prompts[9], "What is 1 + 1?")]
    recipe = write_recipe(
        tmp_path, source_text(write_lines(tmp_path / "a.jsonl", rows)), head=f'format = "{form}"'
    )
    assert curate(recipe, "--leakage", base, trained) == 2
    assert "no finished data set" in capsys.readouterr().err
    assert curate(recipe) == 0
    capsys.readouterr()
    assert curate(recipe, "--leakage", base, trained) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith("2 of 20 prompts jump") and "1 of them" in shown[0]
    told = {line.partition(":")[0]: line for line in shown[1:]}
    assert set(told) == {"t4", "t9"}
    assert "1/16 -> 16/16" in told["t9"] and "made/row-1" in told["t9"]
    assert "not found in the training data" in told["t4"]
    assert curate(recipe, "--leakage", base, trained, "--strict") == 3
    assert curate(recipe, "--leakage", base, base, "--strict") == 0
    assert curate(recipe, "--leakage", base, trained, "--plan") == 2


def test_explain_before_the_end_is_refused(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert curate(recipe, "--explain", "made/row-2") == 2
    assert "no finished data set" in capsys.readouterr().err


def test_out_names_the_folder_and_the_bytes_do_not_depend_on_it(recipe: Path) -> None:
    curate(recipe)
    curate(recipe, "--out", str(recipe.parent / "other"))
    assert output_bytes(recipe.parent / "out") == output_bytes(recipe.parent / "other")


def test_a_recipe_that_is_not_there_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", str(tmp_path / "no.toml")]) == 2
    assert "recipe not found" in capsys.readouterr().err


class _Page(HTMLParser):
    """Text of the page, and its tags."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            assert not (name in ("src", "href") and not str(value).startswith("#"))

    def handle_data(self, data: str) -> None:
        self.texts.append(data.strip())


def test_the_report_shows_counts_alarms_and_escaped_examples(tmp_path: Path) -> None:
    rows = [{"question": "<script>alert(1)</script>\u202e", "answer": "1"}] * 3
    path = write_lines(tmp_path / "a.jsonl", rows)
    recipe = write_recipe(tmp_path, source_text(path), stages=exact_stage(tmp_path))
    curate(recipe)
    text = (tmp_path / "out" / "report.html").read_text()
    page = _Page()
    page.feed(text)
    assert "script" not in page.tags
    assert "svg" in page.tags
    assert "many duplicates" in page.texts
    assert {"3", "1", "66.7%", "0.667"} <= set(page.texts)
    assert "<script>alert(1)</script>⟨U+202E⟩" in page.texts
    assert "same as made/row-1" in page.texts
    assert "\u202e" not in text


def test_the_card_has_counts_licences_origins_and_health(tmp_path: Path) -> None:
    first = write_lines(tmp_path / "a.jsonl", rows_of(4))
    second = write_lines(
        tmp_path / "b.jsonl",
        [{"question": "x?", "answer": 1, "l": "MIT"}, {"question": "y?", "answer": 1, "l": None}],
    )
    sources = (
        source_text(first, "a", licence="Apache-2.0"),
        source_text(second, "b", origin="logged", licence=None, licence_field="l"),
    )
    curate(write_recipe(tmp_path, *sources))
    card = (tmp_path / "out" / "README.md").read_text()
    assert card.startswith("---\n")
    assert 'license: ["other"]' in card  # one row has none
    assert f"| a | human | {first} | any other | 4 | 4 | 4 |" in card
    assert f"| b | logged | {second} | any other | 2 | 2 | 2 |" in card
    for line in ("| Apache-2.0 | 4 | 4 |", "| MIT | 1 | 1 |", "| (none) | 1 | 1 |"):
        assert line in card
    assert "| sources | 6 | 6 | rows that cannot be read | 0 |  |" in card
    figures = json.loads((tmp_path / "out" / "summary.json").read_text())["stages"][0]["figures"]
    assert [one["rows"] for one in figures["sources"]] == [4, 2]


def test_the_shipped_recipe_makes_a_set_that_the_demo_trains_on(tmp_path: Path) -> None:
    """Every prompt once, 80 to 20 by source, right answers, and no alarm that nobody explains."""
    assert curate(Path("sums"), "--out", str(tmp_path / "sums"), "--strict") == 0
    rows = read_rows(tmp_path / "sums" / "train.jsonl")
    assert len({row["prompt"] for row in rows}) == len(rows) == 2500
    assert Counter(row["source"] for row in rows) == {"pairs": 2000, "mixed": 500}
    for row in rows:
        assert sum(map(int, re.findall(r"\d+", row["prompt"]))) == int(row["answer"])
    data = DataConfig(source=str(tmp_path / "sums" / "train.jsonl"), heldout=0)
    tasks = load_tasks(data, seed=0, rewards=("arithmetic",)).train
    assert [(task.prompt, task.answer) for task in tasks] == [
        (row["prompt"], row["answer"]) for row in rows
    ]


def test_the_card_counts_what_is_kept(tmp_path: Path) -> None:
    """The row under another licence is dropped, so the data set does not have that licence."""
    first = write_lines(tmp_path / "a.jsonl", [{"question": "x?", "answer": 1}] * 2)
    second = write_lines(tmp_path / "b.jsonl", [{"question": "x?", "answer": 1}])
    sources = (
        source_text(first, "a", licence="apache-2.0"),
        source_text(second, "b", licence="cc-by-nc-4.0"),
    )
    curate(write_recipe(tmp_path, *sources, stages=exact_stage(tmp_path)))
    card = (tmp_path / "out" / "README.md").read_text()
    assert 'license: ["apache-2.0"]' in card
    assert "| apache-2.0 | 2 | 1 |" in card and "| cc-by-nc-4.0 | 1 | 0 |" in card
    assert f"| a | human | {first} | any other | 2 | 2 | 1 |" in card
    assert f"| b | human | {second} | any other | 1 | 1 | 0 |" in card
