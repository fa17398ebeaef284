"""Names of other libraries' environments: `[MODULE or FILE.py:]NAME[?ARGUMENT=VALUE&...]`."""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from sixfold.environment.named import load_file, loading
from sixfold.errors import UserError


@dataclass(frozen=True)
class Spec:
    """Parsed name of an environment.

    Attributes:
        module: module or file that defines or registers the environment. "" if none is given.
    """

    module: str
    name: str
    arguments: dict[str, Any] = field(default_factory=dict)


def parse_spec(kind: str, text: str) -> Spec:
    """Parse the name of an environment.

    The value of an argument is read as JSON, or else as text.

    Args:
        text: the text after `KIND:` in `environment.episode` or `data.source`.

    Raises:
        UserError: the name is empty, or an argument has no value.
    """
    place, mark, query = text.partition("?")
    module, _, name = place.rpartition(":")
    if not name:
        raise UserError(f"'{kind}:{text}' has no name. Give {kind}:NAME or {kind}:module:NAME")
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=True) if mark else []
    except ValueError as error:
        raise UserError(
            f"'{kind}:{text}': the arguments after '?' must have the form NAME=VALUE&NAME=VALUE"
        ) from error
    return Spec(module, name, {key: _value(value) for key, value in pairs})


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def import_module(kind: str, module: str) -> Any:
    """Import a module, or load a file that ends in `.py`.

    A file is loaded only once, because it may register environments.

    Raises:
        UserError: it does not exist, or fails to load.
    """
    where = f"environment of kind '{kind}'"
    if module.endswith(".py"):
        path = Path(module).resolve()
        if not path.is_file():
            raise UserError(f"{where}: file not found: {module} (looked in {Path.cwd()})")
        loaded = _FILES.get(path)
        if loaded is None:
            loaded = _FILES[path] = load_file(path, kind)
        return loaded
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))  # a module beside the recipe
    with loading(f"{where}: cannot import {module}"):
        return importlib.import_module(module)


_FILES: dict[Path, Any] = {}
