"""Distinguish local paths from hub ids, so that a misspelt path is refused and never looked up.

Models and datasets are named by a local path or by a hub id ("name" or "owner/name"). The libraries
query the hub for every name that does not exist locally. Without a network that takes half a
minute, and the error message then blames the hub. `not_found` needs at most a few seconds.
"""

from __future__ import annotations

import os
import re
import socket
import threading
from contextlib import suppress
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from ..errors import nearest

Kind = Literal["models", "datasets"]
"""What a name stands for, as the hub's cache spells it."""

PATIENCE_S = 4.0
"""Longest wait for the hub to accept a connection."""
_OFFLINE: dict[Kind, tuple[str, str]] = {
    "models": ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"),
    "datasets": ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"),
}
_OF_A_MODEL = ("config.json", "adapter_config.json", "recipe.toml", "manifest.json")
_CLOSE = 0.75
"""Similarity from which a name is taken for a misspelt local one."""

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


def not_found(name: str, kind: Kind) -> str:
    """Reason why a name that does not exist locally cannot be loaded.

    Near folders come first. Then the hub is asked whether it answers, unless its cache has the
    name.

    Args:
        name: path or hub id, as the user wrote it.

    Returns:
        Text that can follow "model.path = 'NAME': ". Empty if the hub may have it.
    """
    if (reason := not_a_hub_id(name)) or _cached(name, kind):
        return reason
    if close := _near(name, kind):
        return (
            f"no such folder (looked in {Path.cwd()}). Did you mean '{close}'? For the hub, give"
            f" the id with its owner, and download it first: hf download {name}"
        )
    # With a switch for offline work, the libraries answer at once.
    if offline_switch(kind) or hub_answers():
        return ""
    return (
        f"no such folder (looked in {Path.cwd()}), not in the hub's cache, and {_endpoint()} cannot"
        f" be reached: this machine seems to be offline.{_neighbour(Path(name))} Give a folder"
    )


def offline_switch(kind: Kind) -> str:
    """The variable that forbids to ask the hub, as "NAME = VALUE", or ""."""
    return next((f"{v} = {os.environ[v]}" for v in _OFFLINE[kind] if _is_on(v)), "")


def hub_folder(name: str, kind: Kind) -> Path:
    """Folder of a hub id in the hub's cache, whether it exists or not."""
    kept = (
        os.environ.get("HF_HUB_CACHE")
        or Path(os.environ.get("HF_HOME") or "~/.cache/huggingface") / "hub"
    )
    return Path(kept).expanduser() / f"{kind}--{name.replace('/', '--')}"


@cache
def hub_answers() -> bool:
    """True if the hub, or the proxy before it, accepts a connection within `PATIENCE_S`."""
    address = urlsplit(_endpoint())
    if not proxy_bypass(address.hostname or ""):
        address = urlsplit(getproxies().get(address.scheme) or _endpoint())
    port = address.port or (443 if address.scheme == "https" else 80)
    found: list[bool] = []

    def connect() -> None:
        with suppress(OSError):
            socket.create_connection((address.hostname or "", port), PATIENCE_S).close()
            found.append(True)

    # A thread: the time limit of a connection does not cover the search for its address.
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    return bool(found)


def _endpoint() -> str:
    return os.environ.get("HF_ENDPOINT") or "https://huggingface.co"


def _is_on(switch: str) -> bool:
    return os.environ.get(switch, "").upper() in ("1", "ON", "YES", "TRUE")


def _cached(name: str, kind: Kind) -> bool:
    """True if an earlier download left something of the name."""
    home = Path(os.environ.get("HF_HOME") or "~/.cache/huggingface").expanduser()
    prepared = Path(os.environ.get("HF_DATASETS_CACHE") or home / "datasets").expanduser()
    return (hub_folder(name, kind) / "snapshots").is_dir() or (
        kind == "datasets" and (prepared / name.replace("/", "___").lower()).is_dir()
    )


def _near(name: str, kind: Kind) -> str:
    """An existing folder that the name misspells, or ""."""
    owner, slash, rest = name.rpartition("/")
    try:
        folders = [child for child in Path().iterdir() if child.is_dir()]
    except OSError:
        return ""
    if slash:
        folders = [folder for folder in folders if (folder / rest).exists()]
        close = get_close_matches(owner, [folder.name for folder in folders], 1, _CLOSE)
        return f"{close[0]}/{rest}" if close else ""
    names = [
        folder.name
        for folder in folders
        if kind == "datasets" or any((folder / file).is_file() for file in _OF_A_MODEL)
    ]
    return next(iter(get_close_matches(name, names, 1, _CLOSE)), "")


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
