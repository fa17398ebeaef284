"""List the checkpoints of a run by age, and find the newest intact one. No torch."""

from __future__ import annotations

import re
from pathlib import Path

from .manifest import damage

STAGES = ("sft", "step")
"""Stages of a run, in order. A checkpoint of SFT is older than every checkpoint of RL.

RL checkpoints are named "step".
"""

NAME = re.compile(rf"({'|'.join(STAGES)})-(\d{{6,}})")


def list_checkpoints(checkpoints: Path) -> list[Path]:
    """Published checkpoints, oldest first, intact or not. Empty if the directory does not exist."""
    return sorted(
        (path for path in checkpoints.glob("*-*") if NAME.fullmatch(path.name) and path.is_dir()),
        key=age,
    )


def newest_checkpoint(checkpoints: Path) -> tuple[Path | None, list[str]]:
    """Newest checkpoint that verifies, or None, and a warning for each newer one that does not.

    Raises:
        OtherRelease: if a later release wrote one.
    """
    warnings: list[str] = []
    for path in reversed(list_checkpoints(checkpoints)):
        cause = damage(path)
        if cause is None:
            return path, warnings
        warnings.append(f"skipping a damaged checkpoint: {cause}")
    return None, warnings


def age(path: Path) -> tuple[int, int]:
    """Sort key of a checkpoint, from the oldest to the newest."""
    stage, _, step = path.name.partition("-")
    return STAGES.index(stage), int(step)
