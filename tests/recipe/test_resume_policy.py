"""Every setting has a decision: it may change when a run is resumed, or it may not."""

from __future__ import annotations

import pytest

from sixfold.errors import UserError
from sixfold.recipe.knobs import knobs
from sixfold.recipe.resume_policy import FIXED, FREE, allowed_changes, settings_of, why_fixed
from sixfold.recipe.schema import Recipe
from sixfold.recipe.toml import parse_recipe


def test_every_setting_is_decided_and_the_tables_hold_nothing_else() -> None:
    sections = {key.partition(".")[0] for key in knobs()}
    assert sections <= FREE.keys() | FIXED.keys()
    assert set(FIXED) | set(FREE) <= sections | set(knobs())


def test_changes_are_listed_or_refused() -> None:
    saved = settings_of(Recipe())
    assert allowed_changes(saved, Recipe(), warming_up=False) == []
    free = parse_recipe('run.steps = 7\nrun.name = "other"\nlog.to = ["csv"]', "test")
    assert allowed_changes(saved, free, warming_up=False) == [
        "run.steps 100 -> 7",
        'log.to [] -> ["csv"]',
    ]
    warm = parse_recipe("sft.steps = 7", "test")
    assert allowed_changes(saved, warm, warming_up=True) == ["sft.steps 0 -> 7"]
    with pytest.raises(
        UserError, match=r"sft\.steps cannot change from 0 to 7 on resume: the finished SFT steps"
    ):
        allowed_changes(saved, warm, warming_up=False)


def test_a_setting_that_an_older_release_did_not_have_was_at_its_default() -> None:
    saved = settings_of(Recipe())
    del saved["model.path"], saved["run.steps"]
    assert allowed_changes(saved, Recipe(), warming_up=False) == []
    with pytest.raises(UserError, match=r"model\.path cannot change"):
        allowed_changes(saved, parse_recipe('model.path = "x"', "test"), warming_up=False)


def test_a_name_that_is_no_setting_is_a_bug() -> None:
    with pytest.raises(ValueError, match="not a setting"):
        why_fixed("model.nope")
