"""What a finished stage remembers of its settings: those that decide what it makes."""

from __future__ import annotations

import pytest

from sixfold.recipe.toml import parse_staged
from sixfold.stages.artifact import Artifact, deciding_settings

TEXT = """
[model.scratch]
hidden_size = 32
[prm]
epochs = 1
[algorithm]
clip_high = 0.2
[[stages]]
kind = "sft"
sft.steps = 10
[[stages]]
kind = "sample"
sample.keep = "all"
sample.labels = "outcome"
sample.deduplicate = false
[[stages]]
kind = "prm"
data.source = "stage:sample"
[[stages]]
kind = "rl"
model = "stage:sft"
data.source = "arithmetic"
run.steps = 3
"""


@pytest.mark.parametrize(
    ("before", "after", "stages"),
    [
        ("epochs = 1", "epochs = 2", ["prm"]),
        ("clip_high = 0.2", "clip_high = 0.3", ["rl"]),
        ("sft.steps = 10", "sft.steps = 11", ["sft"]),
        ("hidden_size = 32", "hidden_size = 64", ["sft", "sample", "prm", "rl"]),
    ],
)
def test_a_setting_counts_for_the_stages_that_read_it(
    before: str, after: str, stages: list[str]
) -> None:
    """[prm] can be tuned without another SFT; a model of another size means that all is redone."""
    old = {stage.name: stage for stage in parse_staged(TEXT, "p.toml").stages}
    new = {
        stage.name: stage for stage in parse_staged(TEXT.replace(before, after), "p.toml").stages
    }
    changed = []
    for name, stage in old.items():
        made = Artifact(name, stage.kind, "model", "", "", deciding_settings(stage), {})
        assert not made.difference(stage, {})
        if made.difference(new[name], {}):
            changed.append(name)
    assert changed == stages
