"""What a stage has made: a model or a dataset, with a manifest.

The manifest `artifact.json` in the stage's folder is written last. So a stage is finished exactly
if it has one. It names the content by a hash, and holds the settings and the hashes of the inputs
that the stage was made with.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..checkpoint.listing import newest_checkpoint
from ..checkpoint.manifest import MANIFEST, verify
from ..checkpoint.model_source import MODEL
from ..errors import UserError
from ..files.durable import disk_errors, faultpoint, write_json_atomic
from ..files.folder import ARTIFACT
from ..recipe.adapter_folder import is_adapter
from ..recipe.resume_policy import settings_of
from ..recipe.stages import Made, Stage, ignores

DATASET = "dataset.jsonl"
"""File of a dataset in its stage's folder."""

_FREE = (
    *("run.device", "run.threads", "run.max_minutes", "run.silence_s"),
    *("checkpoint", "log", "parallel"),
)
"""Settings and sections that do not change what a stage makes."""


@dataclass(frozen=True)
class Artifact:
    """A finished stage.

    Attributes:
        stage: name of the stage.
        kind: its kind.
        made: "model", "adapter", "reward_model" or "dataset".
        path: the checkpoint or the file, relative to the stage's folder.
        sha256: hash of the content: of the model's files, or of the dataset.
        settings: settings that decided the content, by dotted key.
        inputs: hash of each earlier stage that it read, by name.
    """

    stage: str
    kind: str
    made: str
    path: str
    sha256: str
    settings: Mapping[str, Any]
    inputs: Mapping[str, str]

    def difference(self, stage: Stage, inputs: Mapping[str, str]) -> str:
        """How a stage differs from the one that made this. Empty if it does not.

        Args:
            stage: the stage as the recipe has it now.
            inputs: hash of each earlier stage that it reads, by name.
        """
        if stage.kind != self.kind:
            return f"it was of kind {self.kind} and is of kind {stage.kind} now"
        now = deciding_settings(stage)
        changed = [key for key, value in now.items() if value != self.settings.get(key, value)]
        if changed:
            asked = {"run.steps": stage.row.steps or "run.steps"}  # as the user sets it
            shown = [
                f"{asked.get(key, key)} {self.settings[key]!r} -> {now[key]!r}" for key in changed
            ]
            more = f" and {len(shown) - 3} more" if len(shown) > 3 else ""
            return f"its settings have changed: {', '.join(shown[:3])}{more}"
        other = [name for name, found in inputs.items() if found != self.inputs.get(name)]
        if other:
            return f"it was made from another result of stage '{other[0]}'"
        return ""


def deciding_settings(stage: Stage) -> dict[str, Any]:
    """Settings that decide what a stage makes, as JSON restores them."""

    def decides(key: str) -> bool:
        section = key.partition(".")[0]
        return key not in _FREE and section not in _FREE and not ignores(stage.kind, section)

    return {key: value for key, value in settings_of(stage.recipe).items() if decides(key)}


def publish(folder: Path, stage: Stage, made: Made, inputs: Mapping[str, str]) -> Artifact:
    """Write the manifest of a finished stage.

    Args:
        folder: folder of the stage.
        stage: the stage.
        made: what it made.
        inputs: hash of each earlier stage that it read, by name.

    Raises:
        UserError: if its result is missing or damaged.
    """
    path, kind = folder / DATASET, str(made)
    if made != "dataset":
        checkpoint, _ = newest_checkpoint(folder / "checkpoints")
        if checkpoint is None:
            raise UserError(f"{folder} has no intact checkpoint, so stage '{stage.name}' made none")
        path = checkpoint
        kind = "adapter" if is_adapter(str(checkpoint / MODEL)) else kind
    artifact = Artifact(
        stage.name,
        stage.kind,
        kind,
        path.relative_to(folder).as_posix(),
        _content_hash(path),
        deciding_settings(stage),
        dict(inputs),
    )
    faultpoint("artifact.publish")
    write_json_atomic(folder / ARTIFACT, asdict(artifact))
    faultpoint("artifact.publish")
    return artifact


def read_artifact(folder: Path) -> Artifact | None:
    """The artifact of a stage's folder. None if the stage has not finished.

    Raises:
        UserError: if the manifest cannot be read.
    """
    path = folder / ARTIFACT
    if not path.is_file():
        return None
    try:
        return Artifact(**json.loads(path.read_bytes()))
    except (ValueError, TypeError) as error:
        raise UserError(
            f"{path} is damaged: delete it, and sixfold train --resume publishes the stage again"
        ) from error


def verified(folder: Path, artifact: Artifact) -> Path:
    """Path of an artifact's content, every byte of which has been verified.

    Raises:
        UserError: if it is missing or was changed.
    """
    path = folder / artifact.path
    if not path.exists():
        raise UserError(f"{path} is missing: stage '{artifact.stage}' made it. Restore it")
    if artifact.made != "dataset":
        verify(path)
    if _content_hash(path) != artifact.sha256:
        raise UserError(
            f"{path} is not what stage '{artifact.stage}' made: its content has changed. Restore"
            f" it, or make it again with --from {artifact.stage}"
        )
    return path


def _content_hash(path: Path) -> str:
    """Hash of a dataset's bytes, or of the names and hashes of a checkpoint's model files.

    The rest of a checkpoint holds times, in which equal runs differ.
    """
    with disk_errors(f"cannot read {path}"):
        if path.is_file():
            return hashlib.sha256(path.read_bytes()).hexdigest()
        files = json.loads((path / MANIFEST).read_bytes())["files"]
    model = {name: each["sha256"] for name, each in files.items() if name.startswith(f"{MODEL}/")}
    return hashlib.sha256(json.dumps(model, sort_keys=True).encode()).hexdigest()
