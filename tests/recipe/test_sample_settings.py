"""The [sample] section: tables of mixed data, and settings that would have no effect."""

from __future__ import annotations

from pathlib import Path

import pytest

from sixfold.errors import UserError
from sixfold.recipe.schema import MixConfig, SampleConfig
from sixfold.recipe.toml import load_recipe


def parsed(tmp_path: Path, text: str) -> SampleConfig:
    path = tmp_path / "r.toml"
    path.write_text(text)
    return load_recipe(path).sample


def test_tables_of_mixed_data(tmp_path: Path) -> None:
    found = parsed(
        tmp_path,
        '[sample]\nkeep = "best"\n[[sample.mix]]\nsource = "a.jsonl"\nweight = 0.5\n'
        '[[sample.mix]]\nsource = "stage:first"\n',
    )
    assert found.mix == (
        MixConfig(source="a.jsonl", weight=0.5),
        MixConfig(source="stage:first", weight=1.0),
    )
    assert [mix.stage for mix in found.mix] == ["", "first"]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('keep = "best"\nthreshold = 0.5', "sample.threshold.*keep = 'reward'"),
        ('keep = "best"\nper_task = 2', "sample.per_task.*keep = 'reward'"),
        ('keep = "all"\nper_task = 2', "sample.per_task.*keep = 'reward'"),
        ('keep = "all"\nthreshold = 0.5', "sample.threshold.*keep = 'reward'"),
        ('mix = [{ source = "a.csv" }]', "sample.mix.*a.csv.*jsonl"),
        ('mix = [{ source = "stage:" }]', "sample.mix.*stage:NAME"),
        ('mix = [{ source = "a.jsonl", weight = 0 }]', "weight"),
        ("samples = 0", "sample.samples"),
        ("min_rows = 0", "sample.min_rows"),
    ],
)
def test_refused(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(UserError, match=named):
        parsed(tmp_path, f"[sample]\n{text}\n")
