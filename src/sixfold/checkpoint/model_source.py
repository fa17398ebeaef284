"""Find a model in a run, a checkpoint, a model folder or on the hub. No torch.

Every command uses this module.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..files.folder import model_stage
from ..recipe.hub_names import not_found
from ..recipe.reward_models import STAGE, is_address, is_implicit, reward_model_name, with_paths
from ..recipe.schema import Recipe
from .listing import list_checkpoints, newest_checkpoint
from .manifest import MANIFEST, verify

MODEL = "model"
"""Name of the model folder in a checkpoint."""


def model_folder(
    path: str, setting: str = "MODEL", *, reward_model: bool = False, kinds: Sequence[str] = ()
) -> str:
    """Model folder or hub id that a user's argument refers to.

    Args:
        path: a run (its newest intact checkpoint; of a run with stages, that of the last finished
            stage that made a model), a checkpoint, a model folder, or a hub id.
        setting: name of the argument, for error messages.
        reward_model: of a run with stages, take the last reward model in place of the last model.
        kinds: kinds of stages whose reward models are taken. Empty: all.

    Raises:
        UserError: if nothing is found, or no checkpoint is intact. Every byte of a checkpoint is
            verified.
    """
    folder = Path(path).expanduser()
    is_run, is_checkpoint = _kind(folder, setting)
    if is_run:
        made = ("reward_model",) if reward_model else ("model", "adapter")
        return str(_newest(folder, setting, made, kinds) / MODEL)
    if is_checkpoint:
        verify(folder)
        return str(folder / MODEL)
    if folder.exists():
        return str(folder)
    if reason := not_found(path, "models"):
        raise UserError(f"{setting}: no checkpoint, run or model at '{path}': {reason}")
    return path


def _newest(run: Path, setting: str, made: Sequence[str], kinds: Sequence[str]) -> Path:
    checkpoint, warnings = newest_checkpoint(model_stage(run, made, kinds) / "checkpoints")
    for warning in warnings:
        print(warning, file=sys.stderr)
    if checkpoint is None:
        raise UserError(
            f"{setting} = '{run}': the run has no intact checkpoint. Name another run, a checkpoint"
            " or a model folder"
        )
    return checkpoint


PROCESS_REWARD_MODELS = ("ForTokenClassification", "ForProcessRewardModel", "ForPrmModel")
"""Ends of the names of classes that score steps."""


def is_reward_model(path: str) -> bool:
    """True for a reward model, and for a run whose stages have made one and no policy.

    Args:
        path: a run, a checkpoint, a model folder or a hub id.
    """
    return any(name.endswith("ForSequenceClassification") for name in _classes(path))


def is_process_reward_model(path: str) -> bool:
    """As `is_reward_model`, for one that scores steps. True for a policy and its reference."""
    return "," in path or any(name.endswith(PROCESS_REWARD_MODELS) for name in _classes(path))


def _classes(path: str) -> list[str]:
    """Classes that the config.json of a model names. Of a run: of its last model, policies first.

    Args:
        path: a run, a checkpoint, a model folder or a hub id.
    """
    folder = Path(path).expanduser()
    is_run, _ = _kind(folder, "MODEL")
    if not folder.exists() and not_found(path, "models"):
        return []
    if is_run:
        stage = folder
        for made in (("reward_model",), ("model", "adapter")):  # a policy comes first
            with suppress(UserError):
                stage = model_stage(folder, made)
        folder = next(reversed(list_checkpoints(stage / "checkpoints")), folder)
    if (folder / MANIFEST).is_file():
        folder = folder / MODEL
    return architectures(str(folder) if folder.exists() else path)


def architectures(model: str) -> list[str]:
    """Classes that a model's config.json names. [] if there is none."""
    from transformers import AutoConfig

    try:
        if Path(model).is_dir():  # as it is: transformers may not know the architecture
            named = json.loads((Path(model) / "config.json").read_bytes()).get("architectures")
        else:
            named = AutoConfig.from_pretrained(model, trust_remote_code=False).architectures
    except (OSError, ValueError, KeyError, AttributeError):
        return []
    return list(named or ())


def with_model_folders(recipe: Recipe) -> Recipe:
    """Recipe in which runs and checkpoints are replaced by their model folders.

    Applies to model.path, reference.path, engine.speculation.path and the reward models among
    environment.rewards.

    The run stores its recipe in this form. When it is resumed, it finds the same weights, even if
    the run that they came from has continued.

    Raises:
        UserError: as `model_folder`.
    """
    changes: dict[str, object] = {}
    for name in ("model", "reference"):
        section = getattr(recipe, name)
        # Hub ids and folders: checked where the setting is read.
        if section.path and any(_kind(Path(section.path).expanduser(), f"{name}.path")):
            changes[name] = section.model_copy(
                update={"path": model_folder(section.path, f"{name}.path")}
            )
    setting = "environment.rewards"

    def pinned_reward(path: str, name: str) -> str:
        if path.startswith(STAGE) or is_address(path):
            return path
        folder = Path(path).expanduser()
        if any(_kind(folder, setting)):
            if is_implicit(name):
                return model_folder(path, setting)
            return model_folder(path, setting, reward_model=True, kinds=(reward_model_name(name),))
        if path and not folder.exists() and (reason := not_found(path, "models")):
            raise UserError(f"{setting}: no reward model at '{path}': {reason}")
        return path

    rewards = tuple(
        with_paths(name, partial(pinned_reward, name=name)) for name in recipe.environment.rewards
    )
    if rewards != recipe.environment.rewards:
        changes["environment"] = recipe.environment.model_copy(update={"rewards": rewards})
    draft = recipe.engine.speculation
    if draft.kind == "draft":
        setting = "engine.speculation.path"
        if any(_kind(Path(draft.path).expanduser(), setting)):
            pinned = draft.model_copy(update={"path": model_folder(draft.path, setting)})
            changes["engine"] = recipe.engine.model_copy(update={"speculation": pinned})
    return recipe.model_copy(update=changes) if changes else recipe


def recorded_models(asked: Mapping[str, Any], recorded: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with the model folders that a started run has recorded for the runs that it names.

    Without them a resume would take newer checkpoints, if those runs have continued since.

    Args:
        asked: settings by dotted key, which name runs, checkpoints, folders or hub ids.
        recorded: what `with_model_folders` once made of them.
    """
    keys = ("model.path", "reference.path", "engine.speculation.path")
    return {k: recorded[k] for k in keys if asked.get(k) and _holds(asked[k], recorded[k])}


def _holds(folder: object, model: object) -> bool:
    outer, inner = (Path(str(path)).expanduser().resolve() for path in (folder, model))
    return inner != outer and inner.is_relative_to(outer)


def _kind(folder: Path, setting: str) -> tuple[bool, bool]:
    """Two answers: the folder is a run, and the folder is a checkpoint."""
    try:
        return (folder / "recipe.toml").is_file(), (folder / MANIFEST).is_file()
    except (OSError, ValueError) as error:  # too long, or with a zero byte
        raise UserError(
            f"{setting} = {str(folder)[:100]!r}: not a path and not a hub id"
        ) from error
