"""The hardware file that `sixfold plan --measure` wrote for this machine."""

from __future__ import annotations

import os
from pathlib import Path

from .hardware import Cluster
from .hardware_file import read_hardware


def measured_path() -> Path:
    """Where the measured hardware file is: `sixfold/hardware.toml` in the user's cache folder.

    The cache folder is `$XDG_CACHE_HOME`, or `~/.cache` if that is empty or a relative path, as the
    XDG base directory specification asks.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not cache.is_absolute():
        cache = Path.home() / ".cache"
    return cache / "sixfold" / "hardware.toml"


def measured_hardware(path: Path | None = None) -> Cluster | None:
    """This machine as `sixfold plan --measure` found it.

    Args:
        path: the file. None: `measured_path()`.

    Returns:
        None if nothing was measured: there is no such file.

    Raises:
        UserError: if the file cannot be read or is not a hardware file.
    """
    path = measured_path() if path is None else path
    return read_hardware(path) if path.exists() else None
