"""A small run of four stages, and what two equal runs have in common."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sixfold.checkpoint.listing import list_checkpoints
from sixfold.recipe.stages import StagedRecipe
from sixfold.recipe.toml import parse_staged
from tests.run.processes import metrics, tiny_recipe

TEXT = """\
run.name = "p"

[[stages]]
kind = "sft"
name = "first"
sft.steps = 4

[[stages]]
kind = "sft"
name = "second"
sft.steps = 3
sft.learning_rate = 5e-4
data.arithmetic.terms = 3
model = "stage:first"

[[stages]]
kind = "rl"
name = "adapted"
run.steps = 3
model.lora.rank = 2
algorithm.beta = 0.01
reference.path = "stage:second"

[[stages]]
kind = "rl"
name = "last"
run.steps = 2
model.lora.rank = 2
"""


def flags(folder: Path, **overrides: Any) -> list[str]:
    made = tiny_recipe(folder, eval__every=2, **overrides)
    at = made.index("--sft.steps")  # each stage has its own
    return made[:at] + made[at + 2 :]


def staged(folder: Path, **overrides: Any) -> StagedRecipe:
    return parse_staged(TEXT, "p.toml", flags(folder, **overrides))


def result(run: Path) -> dict[str, Any]:
    """What a run has made, without times: metrics and hashes of the stages, and the drift."""
    found: dict[str, Any] = {}
    for folder in sorted((run / "stages").iterdir()):
        artifact = json.loads((folder / "artifact.json").read_bytes())
        drift = folder / "drift.json"
        found[folder.name] = {
            "metrics": metrics(folder),
            "sha256": artifact["sha256"],
            "inputs": artifact["inputs"],
            "checkpoints": [path.name for path in list_checkpoints(folder / "checkpoints")],
            "drift": json.loads(drift.read_bytes()) if drift.exists() else None,
        }
    return found
