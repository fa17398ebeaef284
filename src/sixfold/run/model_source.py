"""Where a model is: in a run, a checkpoint, a model folder, or on the hub. One answer for every command. No torch."""

from __future__ import annotations

import sys
from pathlib import Path

from ..errors import UserError
from ..recipe.hub_names import not_a_hub_id
from ..recipe.schema import Recipe
from .listing import newest_checkpoint
from .manifest import MANIFEST, verify

MODEL = "model"
"""The model's folder in a checkpoint."""


def model_folder(path: str, setting: str = "MODEL") -> str:
    """The model folder, or hub id, that a user's words stand for.

    Args:
        path: a run (its newest intact checkpoint), a checkpoint, a model folder, or a hub id.
        setting: where the user gave it, for the error messages.

    Raises:
        UserError: nothing is there, or no checkpoint is intact. Every byte of a checkpoint is verified.
    """
    folder = Path(path).expanduser()
    is_run, is_checkpoint = _kind(folder, setting)
    if is_run:
        return str(_newest(folder, setting) / MODEL)
    if is_checkpoint:
        verify(folder)
        return str(folder / MODEL)
    if folder.exists():
        return str(folder)
    if reason := not_a_hub_id(path):
        raise UserError(f"{setting}: no checkpoint, run or model at '{path}': {reason}")
    return path


def _newest(run: Path, setting: str) -> Path:
    checkpoint, warnings = newest_checkpoint(run / "checkpoints")
    for warning in warnings:
        print(warning, file=sys.stderr)
    if checkpoint is None:
        raise UserError(f"{setting} = '{run}': the run has no intact checkpoint to load a model from")
    return checkpoint


def with_model_folders(recipe: Recipe) -> Recipe:
    """The recipe with model.path and reference.path as model folders, where they name runs or checkpoints.

    A run keeps the recipe in this form: when it is resumed, it finds the same weights, however far the
    run that they are from has gone on.

    Raises:
        UserError: as `model_folder`.
    """
    changes: dict[str, object] = {}
    for name in ("model", "reference"):
        section = getattr(recipe, name)
        if section.path and any(_kind(Path(section.path).expanduser(), f"{name}.path")):  # others are left to those who read the setting
            changes[name] = section.model_copy(update={"path": model_folder(section.path, f"{name}.path")})
    return recipe.model_copy(update=changes) if changes else recipe


def _kind(folder: Path, setting: str) -> tuple[bool, bool]:
    """Whether the folder is a run, and whether it is a checkpoint. Raises UserError for a name that no folder can have."""
    try:
        return (folder / "recipe.toml").is_file(), (folder / MANIFEST).is_file()
    except (OSError, ValueError) as error:  # too long, or with a zero byte
        raise UserError(f"{setting} = {str(folder)[:100]!r}: not a path and not a hub id") from error
