"""Read a recipe from TOML and `--dotted.flags`. No torch.

Every mistake is a UserError of one line. It says what is wrong, where (file and line, or flag), and
how to fix it. `check_keys` checks keys before pydantic checks values, so a misspelt name is never
reported as a bad value.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from ..errors import UserError
from .find import find_recipe, read_recipe_file
from .flags import parse_flags
from .keys import bad_value, check_keys, drop_removed, shown
from .kinds import kinds_in, settle_kinds
from .knobs import kind_knobs, knobs, sections
from .schema import Recipe
from .toml_lines import key_lines, line_of, syntax_error

RECORDED = "recipe.toml"
"""Name of the file in which a run records its recipe: `files.folder`."""


def load_recipe(path_or_name: str, flags: Sequence[str] = ()) -> Recipe:
    """Read a recipe, apply `--dotted.key value` flags, and check everything.

    Args:
        path_or_name: path of a TOML file, or name of a shipped recipe.
        flags: command-line flags, which take precedence over the file.

    Raises:
        UserError: for any mistake.
    """
    path = find_recipe(path_or_name)
    recorded = path.name == RECORDED
    return parse_recipe(read_recipe_file(path), str(path), flags, recorded=recorded)


def parse_recipe(
    text: str, where: str, flags: Sequence[str] = (), *, recorded: bool = False
) -> Recipe:
    """Like `load_recipe`, for TOML text in memory.

    Args:
        text: the TOML text.
        where: name of the text in error messages.
        flags: command-line flags, which take precedence over the text.
        recorded: a run recorded the text, maybe by an earlier version.

    Raises:
        UserError: for any mistake.
    """
    try:
        asked = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        # ValueError: also raised for an integer with too many digits.
        raise UserError(syntax_error(text, where, error)) from error
    if not asked:
        raise UserError(f'{where} is empty; the smallest recipe is one line: run.name = "my-run"')
    if recorded:
        drop_removed(asked)
    lines = key_lines(text)

    def place(key: str) -> str:
        line = line_of(key, lines)
        return f"{where}, line {line}" if line else where

    given = parse_flags(flags)
    flagged: dict[str, Any] = {}
    check_keys(asked, place)
    in_file = kinds_in(asked)
    for key, value in given.items():
        _put(flagged, key, value)
    check_keys(flagged, lambda key: f"--{key}")
    for key, value in given.items():
        _put(asked, key, value)

    def origin(key: str) -> str:
        return f"--{key}" if key in given else place(key)

    settle_kinds(asked, in_file, given, origin)
    return _validate(asked, where, origin)


def _put(tree: dict[str, Any], key: str, value: Any) -> None:
    *path, name = key.split(".")
    for i, part in enumerate(path, start=1):
        branch = tree.setdefault(part, {})
        if isinstance(branch, dict):
            tree = branch
            continue
        parent = ".".join(path[:i])
        if parent not in sections():
            raise UserError(f"{parent}: expected {knobs()[parent].accepts}, got --{key}")
        tree = {}  # `check_keys` refuses the value of the section
    tree[name] = value


def _validate(asked: Mapping[str, Any], where: str, place: Callable[[str], str]) -> Recipe:
    try:
        # JSON mode is strict about types, but accepts a list as a tuple and an integer as a number.
        # TOML dates have no JSON form. They are passed as a table, which every setting refuses.
        return Recipe.model_validate_json(
            json.dumps(asked, default=lambda date: {"date": str(date)})
        )
    except ValidationError as invalid:
        error = invalid.errors(include_url=False)[0]
        key = _setting_at(error["loc"])
        if error["type"] == "unsupported":  # raised by a validator of this setting
            raise UserError(
                f"{key} = '{error['input']}': {error['msg']} ({place(key)})"
            ) from invalid
        if key in knobs():
            raise UserError(f"{bad_value(knobs()[key], asked)} ({place(key)})") from invalid
        parent, _, name = key.rpartition(".")
        if parent in knobs():  # a field of a list of tables
            number = next(part for part in error["loc"] if isinstance(part, int)) + 1
            raise UserError(
                f"{parent}, entry {number}: {name}: {_said_of_field(error)} ({place(key)})"
            ) from invalid
        raise UserError(f"{error['msg'].removeprefix('Value error, ')} ({where})") from invalid


def _setting_at(location: Sequence[str | int]) -> str:
    """Dotted key of a location in pydantic's errors.

    A location contains indices of lists, and the kind of a section after the section's name.
    """
    key, in_kind = "", False
    for part in location:
        if isinstance(part, str) and key in kind_knobs() and not in_kind:
            in_kind = True
        elif isinstance(part, str):
            key, in_kind = f"{key}.{part}".lstrip("."), False
    return key


def _said_of_field(error: Any) -> str:
    """Pydantic's message about a field in a list of tables, with the refused value."""
    message = error["msg"][0].lower() + error["msg"][1:]
    return message if error["type"] == "missing" else f"{message}, got {shown(error['input'])}"
