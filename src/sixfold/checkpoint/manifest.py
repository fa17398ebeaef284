"""Manifest of a checkpoint: size and sha256 of every file, and its own checksum. No torch.

It is written last. A checkpoint is intact if it contains exactly the files listed in its manifest,
and each file is unchanged. What the files contain does not matter here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..files.durable import disk_errors, faultpoint, fsync_path
from ..version import __version__

FORMAT = 2
"""Format of the manifest. The payload has its own."""

MANIFEST = "manifest.json"

Stamp = tuple[tuple[str, int, int, int], ...]
_intact: dict[Path, Stamp] = {}
"""Checkpoints that this process has written or verified, with their files' sizes and times."""


class OtherRelease(UserError):
    """Another release wrote the checkpoint, in a form that this one cannot read.

    It is not damaged, so nothing may skip or delete it.
    """


def write_manifest(staging: Path, step: int) -> None:
    """Hash every file of a finished directory, and write the manifest to the disk.

    This is the only place where a save is hashed.
    """
    files = {
        path.relative_to(staging).as_posix(): {"size": path.stat().st_size, "sha256": _sha256(path)}
        for path in sorted(staging.rglob("*"))
        if path.is_file()
    }
    body = {"format": FORMAT, "step": step, "sixfold": __version__, "files": files}
    (staging / MANIFEST).write_bytes(_with_checksum(body))
    faultpoint("checkpoint.manifest")
    fsync_path(staging / MANIFEST)
    faultpoint("checkpoint.fsync")
    fsync_path(staging)
    faultpoint("checkpoint.fsync")


def verify(directory: Path) -> int:
    """Verify every byte of a checkpoint, and return its step.

    Raises:
        OtherRelease: if a later release wrote it.
        UserError: if it is not a checkpoint, is incomplete or altered, or contains files that were
            not saved with it.
    """
    if not (directory / MANIFEST).is_file():
        raise UserError(f"{directory} is not a checkpoint: no {MANIFEST}")
    with disk_errors(f"cannot read {directory}"):
        body = _read(directory)
        files: dict[str, dict[str, Any]] = body["files"]
        for name in files:
            if not (directory / name).is_file():
                raise UserError(f"{directory} is incomplete (missing {name})")
        added = sorted(_names(directory) - files.keys() - {MANIFEST})
        if added:  # a loader would use some of them: adapter_config.json changes the model
            raise UserError(
                f"{directory} holds files that were not saved with it ({', '.join(added[:3])}):"
                " move them elsewhere"
            )
        for name, wanted in files.items():
            _verify_file(directory / name, wanted["size"], wanted["sha256"])
        remember(directory)
    return int(body["step"])


def damage(directory: Path) -> str | None:
    """Reason why a checkpoint cannot be used, in one line. None if it is intact.

    Raises:
        OtherRelease: if a later release wrote it.
    """
    try:
        verify(directory)
    except OtherRelease:
        raise
    except UserError as error:
        return str(error)
    return None


def remember(directory: Path) -> None:
    """Record that the checkpoint is intact in its current state."""
    _intact[directory] = _stamp(directory)


def is_intact(directory: Path) -> bool:
    """True if the checkpoint is intact.

    Files that are unchanged since this process wrote or verified them are not read again.
    """
    if directory in _intact and _stamp(directory) == _intact[directory]:
        return True
    try:
        return damage(directory) is None
    except OtherRelease:
        return False


def _names(directory: Path) -> set[str]:
    return {
        path.relative_to(directory).as_posix()
        for path in directory.rglob("*")
        if path.is_symlink() or not path.is_dir()
    }


def _stamp(directory: Path) -> Stamp:
    found = ((name, (directory / name).lstat()) for name in sorted(_names(directory)))
    return tuple(
        (name, status.st_size, status.st_mtime_ns, status.st_ino) for name, status in found
    )


def _with_checksum(body: Mapping[str, Any]) -> bytes:
    """Bytes of the manifest, including its own checksum. There is only one valid form."""
    seal = hashlib.sha256(json.dumps(body).encode()).hexdigest()
    return (json.dumps({**body, "sha256": seal}, indent=1) + "\n").encode()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read(directory: Path) -> dict[str, Any]:
    """Body of the manifest, after verifying its own checksum."""
    raw = (directory / MANIFEST).read_bytes()
    try:
        body = json.loads(raw)
    except ValueError:  # covers bytes that are not UTF-8
        body = None
    if not isinstance(body, dict) or not isinstance(body.get("format"), int):
        raise UserError(f"{directory / MANIFEST} is damaged: it is not a manifest of Sixfold")
    if body["format"] > FORMAT:
        raise OtherRelease(
            f"{directory}: checkpoint format {body['format']} is newer than this release (max"
            f" {FORMAT}); upgrade sixfold"
        )
    body.pop("sha256", None)
    if _with_checksum(body) != raw:
        raise UserError(f"{directory / MANIFEST} is damaged: its own sha256 does not match")
    return body


def _verify_file(path: Path, size: int, sha256: str) -> None:
    found = path.stat().st_size
    if found != size:
        raise UserError(
            f"{path} is {'truncated' if found < size else 'altered'}: {found} bytes, {size} were"
            " saved"
        )
    if _sha256(path) != sha256:
        raise UserError(f"{path}: sha256 mismatch")
