"""The manifest of a checkpoint: size and sha256 of every file, written last, with a checksum of itself. No torch.

A checkpoint is intact when it holds exactly the files that its manifest lists, and each is as it was saved.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .. import __version__
from ..errors import UserError
from .durable import disk_errors, faultpoint, fsync_path

FORMAT = 2
"""Format 2 added the settings and fingerprints of a run to its state, and checkpoints of the SFT stage. This release reads 1 and 2."""

TENSORS, STATE, MANIFEST = "trainer.safetensors", "state.json", "manifest.json"

Stamp = tuple[tuple[str, int, int, int], ...]
_intact: dict[Path, Stamp] = {}
"""Checkpoints that this process has written, or verified byte by byte, with the sizes and times of their files then."""


class NewerFormat(UserError):
    """A later release wrote the checkpoint. It is not damaged: nothing may pass over it or delete it."""


def write_manifest(staging: Path, step: int) -> None:
    """Hash every file of a finished directory, and write the manifest to the disk. Nothing else hashes a save."""
    files = {
        path.relative_to(staging).as_posix(): {"size": path.stat().st_size, "sha256": _sha256(path)}
        for path in sorted(staging.rglob("*"))
        if path.is_file()
    }
    body = {"format": FORMAT, "step": step, "sixfold": __version__, "files": files}
    (staging / MANIFEST).write_bytes(_sealed(body))
    faultpoint("checkpoint.manifest")
    fsync_path(staging / MANIFEST)
    faultpoint("checkpoint.fsync")
    fsync_path(staging)
    faultpoint("checkpoint.fsync")


def verify(directory: Path) -> int:
    """The step of a checkpoint whose every byte is as it was saved.

    Raises:
        NewerFormat: a later release wrote it.
        UserError: it is no checkpoint, incomplete, altered, or holds files that were not saved with it.
    """
    if not (directory / MANIFEST).is_file():
        raise UserError(f"{directory} is not a checkpoint: no {MANIFEST}")
    with disk_errors(f"cannot read {directory}"):
        body = _read(directory)
        files: dict[str, dict[str, Any]] = body["files"]
        for name in (TENSORS, STATE, *files):
            if name not in files or not (directory / name).is_file():
                raise UserError(f"{directory} is incomplete (missing {name})")
        added = sorted(_names(directory) - files.keys() - {MANIFEST})
        if added:  # one that loaders look for, such as adapter_config.json, would change what is loaded
            raise UserError(f"{directory} holds files that were not saved with it ({', '.join(added[:3])}): move them elsewhere")
        for name, wanted in files.items():
            _verify_file(directory / name, wanted["size"], wanted["sha256"])
        remember(directory)
    return int(body["step"])


def damage(directory: Path) -> str | None:
    """Why a checkpoint cannot be used, in one line; None if every byte of it is as it was saved. Raises NewerFormat."""
    try:
        verify(directory)
    except NewerFormat:
        raise
    except UserError as error:
        return str(error)
    return None


def remember(directory: Path) -> None:
    """Note that this process knows the checkpoint to be intact as it is now."""
    _intact[directory] = _stamp(directory)


def is_intact(directory: Path) -> bool:
    """True when nothing has touched the files since this process wrote or verified them; else every byte is verified."""
    if directory in _intact and _stamp(directory) == _intact[directory]:
        return True
    try:
        return damage(directory) is None
    except NewerFormat:
        return False


def _names(directory: Path) -> set[str]:
    return {path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_symlink() or not path.is_dir()}


def _stamp(directory: Path) -> Stamp:
    found = ((name, (directory / name).lstat()) for name in sorted(_names(directory)))
    return tuple((name, status.st_size, status.st_mtime_ns, status.st_ino) for name, status in found)


def _sealed(body: Mapping[str, Any]) -> bytes:
    """The manifest's one valid spelling, its own checksum included."""
    seal = hashlib.sha256(json.dumps(body).encode()).hexdigest()
    return (json.dumps({**body, "sha256": seal}, indent=1) + "\n").encode()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read(directory: Path) -> dict[str, Any]:
    """The manifest's body, its own checksum verified."""
    raw = (directory / MANIFEST).read_bytes()
    try:
        body = json.loads(raw)
    except ValueError:  # covers bytes that are not UTF-8
        body = None
    if not isinstance(body, dict) or not isinstance(body.get("format"), int):
        raise UserError(f"{directory / MANIFEST} is damaged: it is not a manifest of Sixfold")
    if body["format"] > FORMAT:
        raise NewerFormat(f"{directory}: checkpoint format {body['format']} is newer than this release (max {FORMAT}); upgrade sixfold")
    body.pop("sha256", None)
    if _sealed(body) != raw:
        raise UserError(f"{directory / MANIFEST} is damaged: its own sha256 does not match")
    return body


def _verify_file(path: Path, size: int, sha256: str) -> None:
    found = path.stat().st_size
    if found != size:
        raise UserError(f"{path} is {'truncated' if found < size else 'altered'}: {found} bytes, {size} were saved")
    if _sha256(path) != sha256:
        raise UserError(f"{path}: sha256 mismatch")
