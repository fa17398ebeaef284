"""Folder of a LoRA adapter in PEFT's format, such as `model/` of a LoRA checkpoint. No torch.

    adapter_config.json          PEFT's settings; names the base model and its revision
    adapter_model.safetensors    the adapter's matrices
    base.json                    hash of the base, its path relative to this folder, and how its
                                 weights were rounded, if Sixfold saved the folder

PEFT and vLLM read the first two files only.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..sizing.model_files import read_object

CONFIG, WEIGHTS, BASE = "adapter_config.json", "adapter_model.safetensors", "base.json"


@dataclass(frozen=True)
class Base:
    """The frozen model that an adapter was trained on.

    Attributes:
        path: model folder or hub id.
        revision: commit of a hub id; empty for a folder.
        sha256: hash of a folder's weights when the adapter was trained (`folder_hash`). Empty for a
            hub id, or if it is unknown.
        rounded: "nf4" if the adapter was trained on weights rounded to it; empty otherwise.
    """

    path: str
    revision: str = ""
    sha256: str = ""
    rounded: str = ""


def is_adapter(path: str) -> bool:
    """True if the path is a folder with an adapter and no model of its own."""
    folder = Path(path).expanduser()
    return (folder / CONFIG).is_file() and not (folder / "config.json").exists()


def adapter_settings(folder: Path) -> dict[str, Any]:
    """Content of adapter_config.json.

    Raises:
        UserError: if it cannot be read.
    """
    return read_object(folder / CONFIG)


def base_of(path: str, setting: str) -> Base:
    """Find the base model that an adapter folder names.

    The path in base.json is relative to the adapter's folder. It is tried first, so a run that was
    moved as a whole still finds its base.

    Args:
        setting: name of the setting that holds the path, for error messages.

    Raises:
        UserError: if the folder names no base, or the base does not exist.
    """
    folder = Path(path).expanduser()
    named = adapter_settings(folder)
    own = read_object(folder / BASE) if (folder / BASE).is_file() else {}
    base = named.get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise UserError(
            f"{setting} = '{path}': {CONFIG} names no base model. Write the base model's folder or"
            " hub id to its base_model_name_or_path"
        )
    beside = (folder / own["path"]).resolve() if own.get("path") else None
    if beside is not None and beside.is_dir():
        base = str(beside)
    elif Path(base).is_absolute() and not Path(base).exists():
        raise UserError(
            f"{setting} = '{path}': the base model {base} does not exist. Put it back, or put a"
            " link to its new place there"
        )
    rounded = trained_on(path) or ""
    if Path(base).is_dir():
        return Base(base, "", str(own.get("sha256") or ""), rounded)
    return Base(base, str(named.get("revision") or ""), "", rounded)


def trained_on(path: str) -> str | None:
    """Rounding of the base on which an adapter was trained: "nf4", or "" without rounding.

    Returns:
        None if Sixfold did not save the adapter.

    Raises:
        UserError: if base.json cannot be read, or has a rounding that is not known here.
    """
    file = Path(path).expanduser() / BASE
    if not file.is_file():
        return None
    rounded = read_object(file).get("rounded", "")
    if rounded not in ("", "nf4"):
        raise UserError(f"{file}: rounded = {rounded!r} is not known. Use a newer version")
    return str(rounded)


def loaded_from(path: str, revision: str, setting: str) -> tuple[str, str]:
    """Path and revision of the model to load. For an adapter's folder, those of its base.

    Args:
        path: model folder, adapter's folder or hub id.
        revision: branch, tag or commit of a hub id; empty for the newest.
        setting: name of the setting that holds the path, for error messages.

    Raises:
        UserError: as `base_of`.
    """
    if not is_adapter(path):
        return path, revision
    base = base_of(path, setting)
    return base.path, base.revision


def check_base(base: Base, setting: str) -> None:
    """Check that the base's weights are those that the adapter was trained on.

    Raises:
        UserError: if they have changed.
    """
    if base.sha256 and base.sha256 != folder_hash(Path(base.path)):
        raise UserError(
            f"{setting}: the base model {base.path} has changed since its adapter was trained."
            " Restore its weights"
        )


def folder_hash(folder: Path) -> str:
    """sha256 of the names and contents of all *.safetensors files in a model folder."""
    found = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors")):
        found.update(file.name.encode())
        with file.open("rb") as stream:
            found.update(hashlib.file_digest(stream, "sha256").digest())
    return found.hexdigest()
