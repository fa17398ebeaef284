"""The checkpoints of a run by name and age, and which of them is intact. No torch."""

from __future__ import annotations

import re
from pathlib import Path

from .manifest import damage

STAGES = ("sft", "step")
"""Stages of a run in their order. A checkpoint of SFT is older than every one of RL; RL's are named for its steps."""

NAME = re.compile(rf"({'|'.join(STAGES)})-(\d{{6,}})")


def list_checkpoints(checkpoints: Path) -> list[Path]:
    """Published checkpoints, oldest first, whether or not they are intact. Empty if there is no such directory."""
    return sorted((path for path in checkpoints.glob("*-*") if NAME.fullmatch(path.name) and path.is_dir()), key=age)


def newest_checkpoint(checkpoints: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint that verifies, or None; and a warning for each newer one that was passed over because it does not.

    Raises NewerFormat where a later release wrote one.
    """
    warnings: list[str] = []
    for path in reversed(list_checkpoints(checkpoints)):
        cause = damage(path)
        if cause is None:
            return path, warnings
        warnings.append(f"passing over a damaged checkpoint: {cause}")
    return None, warnings


def age(path: Path) -> tuple[int, int]:
    """Sorts checkpoints from the oldest to the newest."""
    stage, _, step = path.name.partition("-")
    return STAGES.index(stage), int(step)
