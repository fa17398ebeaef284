"""Mistakes in the recipe of a data set: each is one line with the key, the line and the remedy."""

from __future__ import annotations

from pathlib import Path

import pytest
from made_sets import exact_stage, source_text, write_lines, write_recipe

from sixfold.errors import UserError
from sixfold_curation.settings import read_curation

ROWS = [{"question": "1+1?", "answer": "2"}]


def source(tmp_path: Path, **more: object) -> str:
    return source_text(write_lines(tmp_path / "rows.jsonl", ROWS), **more)


MISTAKES: dict[str, tuple[dict[str, object], str, str]] = {
    "no origin": ({"origin": None}, "", r"origin of source 'made' is missing.*logged.*line 4"),
    "unknown origin": ({"origin": "web"}, "", r"origin.*human.*public.*'web'.*line 7"),
    "no licence": ({"licence": None}, "", r"'made' needs either licence.*unknown.*licence_field"),
    "both licences": ({"licence_field": "l"}, "", r"'made' needs either licence"),
    "empty licence": ({"licence": " "}, "", r"'made' needs either licence.*line 8"),
    "unknown key": ({"lable": "x"}, "", r"unknown key 'lable'\. Did you mean 'label'\?.*line 9"),
    "wrong type": ({"limit": "many"}, "", r"limit.*integer.*'many'.*line 9"),
    "negative": ({"limit": -1}, "", r"limit.*greater than or equal to 0.*-1"),
    "bad label": ({"label": "a b"}, "", r"label.*letters, digits.*'a b'.*line 5"),
    "unknown head": ({}, "sede = 1", r"unknown key 'sede'\. Did you mean 'seed'\?.*line 3"),
    "bad format": ({}, 'format = "csv"', r"format.*jsonl.*parquet.*'csv'.*line 3"),
    "bad seed": ({}, "seed = 1.5", r"seed.*integer.*line 3"),
    "syntax": ({}, "seed = one", r"line 3.*text needs quotes"),
}


@pytest.mark.parametrize(("more", "head", "message"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_names_the_key_and_its_line(
    tmp_path: Path, more: dict[str, object], head: str, message: str
) -> None:
    recipe = write_recipe(tmp_path, source(tmp_path, **more), head=head)
    with pytest.raises(UserError, match=message) as caught:
        read_curation(recipe)
    assert "\n" not in str(caught.value)


STAGES = {
    "unknown kind": ('[[stages]]\nkind = "duplicate_"', r"unknown kind of stage 'duplicate_'"),
    "no kind": ("[[stages]]\nthreshold = 1", r"stage 1 has no kind.*line 10"),
    "missing file": ('[[stages]]\nkind = "no.py:X"', r"file not found: no.py.*line 11"),
    "no stage": ('[[stages]]\nkind = "json:loads"', r"json:loads is no subclass of.*Stage"),
    "no table": ("stages = 3", r"stages: expected tables \[\[stages\]\]|Unbalanced"),
}


@pytest.mark.parametrize(("stages", "message"), STAGES.values(), ids=STAGES)
def test_a_mistake_of_a_stage_names_it(tmp_path: Path, stages: str, message: str) -> None:
    head = stages if stages.startswith("stages") else ""
    recipe = write_recipe(tmp_path, source(tmp_path), stages="" if head else stages, head=head)
    with pytest.raises(UserError, match=message):
        read_curation(recipe)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"lowre": True}, r"unknown key 'lowre'\. Did you mean 'lower'\?.*line 13"),
        ({"lower": "yes"}, r"lower.*boolean.*'yes'.*line 13"),
    ],
)
def test_settings_of_a_stage_are_checked(
    tmp_path: Path, setting: dict[str, object], message: str
) -> None:
    recipe = write_recipe(tmp_path, source(tmp_path), stages=exact_stage(tmp_path, **setting))
    with pytest.raises(UserError, match=message):
        read_curation(recipe)


def test_two_stages_and_two_sources_need_names_of_their_own(tmp_path: Path) -> None:
    stage = exact_stage(tmp_path)
    with pytest.raises(UserError, match="stage 2 needs a name of its own"):
        read_curation(write_recipe(tmp_path, source(tmp_path), stages=stage * 2))
    with pytest.raises(UserError, match="two sources have the label 'made'"):
        read_curation(write_recipe(tmp_path, source(tmp_path), source(tmp_path)))


def test_a_recipe_without_a_source_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no source.*\[\[sources\]\]"):
        read_curation(write_recipe(tmp_path))


def test_set_changes_settings_of_the_recipe_a_source_and_a_stage(tmp_path: Path) -> None:
    stage = exact_stage(tmp_path, lower=True)
    recipe = write_recipe(tmp_path, source(tmp_path, label="a.b"), stages=stage)
    changes = ("seed=7", "sources.a.b.limit=3", "stages.exact.lower=false", "format=parquet")
    curation = read_curation(recipe, changes)
    assert (curation.settings.seed, curation.settings.format) == (7, "parquet")
    assert curation.settings.sources[0].limit == 3
    assert curation.stages[0].stage.model_dump()["lower"] is False


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("seed", "expected KEY=VALUE"),
        ("sources.mode.limit=3", r"sources\.NAME\.KEY.*made.*Did you mean 'made'"),
        ("stages.x.lower=1", r"stages\.NAME\.KEY"),
        ("sources.made.limti=3", "unknown key 'limti'. Did you mean 'limit'"),
    ],
)
def test_a_wrong_set_is_refused(tmp_path: Path, change: str, message: str) -> None:
    recipe = write_recipe(tmp_path, source(tmp_path))
    with pytest.raises(UserError, match=message):
        read_curation(recipe, (change,))
