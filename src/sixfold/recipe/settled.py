"""Settle one recipe: what a file and flags ask for, checked. No torch.

`check_keys` checks keys before pydantic checks values, so a misspelt name is never reported as a
bad value.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from ..errors import UserError
from .keys import bad_value, check_keys, shown
from .kinds import kinds_in, settle_kinds
from .knobs import kind_knobs, knobs, sections
from .schema import Recipe


def settled(
    asked: dict[str, Any],
    given: Mapping[str, Any],
    where: str,
    place: Callable[[str], str],
    given_at: Callable[[str], str] = "--{}".format,
) -> Recipe:
    """The recipe of a file's values with other values on top.

    Args:
        asked: values of the file by section. Changed in place.
        given: values by dotted key that take precedence, such as those of flags.
        place: says where a key of the file was written.
        given_at: says where a key of `given` was written.

    Raises:
        UserError: for any mistake.
    """
    check_keys(asked, place)
    in_file = kinds_in(asked)
    on_top: dict[str, Any] = {}
    for key, value in given.items():
        _put(on_top, key, value)
    check_keys(on_top, given_at)
    for key, value in given.items():
        _put(asked, key, value)

    def origin(key: str) -> str:
        return given_at(key) if key in given else place(key)

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
