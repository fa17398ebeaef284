"""Distinguish local paths from hub ids, so that a misspelt path is refused and never looked up.

Models and datasets are named by a local path or by a hub id ("name" or "owner/name"). The libraries
query the hub for every name that does not exist locally. Without a network that takes half a
minute, and the error message then blames the hub.
"""

from __future__ import annotations

import re
from pathlib import Path

from ..errors import nearest

_HUB_ID = re.compile(r"[A-Za-z0-9_][\w.-]*(/[A-Za-z0-9_][\w.-]*)?", re.ASCII)
_LONGEST_NAME = 96
_LOCAL_OWNERS = frozenset(
    {"checkpoints", "data", "datasets", "models", "output", "outputs", "recipes", "runs"}
)
_FILE_SUFFIXES = frozenset(
    {
        *(
            ".arrow",
            ".bin",
            ".csv",
            ".gguf",
            ".gz",
            ".json",
            ".jsonl",
            ".parquet",
            ".pt",
            ".pth",
            ".py",
            ".safetensors",
        ),
        *(".tar", ".toml", ".tsv", ".txt", ".xlsx", ".xz", ".yaml", ".yml", ".zip", ".zst"),
    }
)


def not_a_hub_id(name: str) -> str:
    """Reason why a name that does not exist locally cannot be a hub id either.

    Call this only for a name that is not an existing file or folder.

    Args:
        name: path or hub id, as the user wrote it.

    Returns:
        Text that can follow "model.path = 'NAME': ". Empty if the name may be a hub id.
    """
    if not name.strip() or "\0" in name:
        return "not a path and not a hub id"
    if _is_hub_id(name) and not _looks_local(name):
        return ""
    path = Path(name).expanduser()
    what = "file" if path.suffix.lower() in _FILE_SUFFIXES else "folder"
    return f"no such {what} (looked in {Path.cwd()}).{_neighbour(path)}"


def _is_hub_id(name: str) -> bool:
    """True if the hub allows the name.

    It must be "name" or "owner/name", of letters, digits, '-', '_' and '.'.
    """
    short = len(name.rpartition("/")[2]) <= _LONGEST_NAME
    return (
        short
        and _HUB_ID.fullmatch(name) is not None
        and not re.search(r"--|\.\.|[-.]/|[-.]$", name)
    )


def _looks_local(name: str) -> bool:
    """True if a name in the form of a hub id has a file suffix or starts with a local folder."""
    owner = name.partition("/")[0] if "/" in name else ""
    return (
        Path(name).suffix.lower() in _FILE_SUFFIXES
        or owner in _LOCAL_OWNERS
        or (owner != "" and Path(owner).is_dir())
    )


def _neighbour(path: Path) -> str:
    """Hint " Did you mean 'x'?" for a file or folder nearby with a similar name, or ""."""
    try:
        names = [child.name for child in path.parent.iterdir()]
    except (OSError, ValueError):
        return ""
    return nearest(path.name, names)
