"""Values of a row by column name. Nested values have dotted paths: "reward_model.ground_truth"."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import copy
from typing import Any

MISSING = object()
"""Returned by `lookup` for a path that the row does not have. None is a value."""


def lookup(fields: Mapping[str, Any], path: str) -> Any:
    """The value at `path`, or MISSING.

    A column named exactly `path` comes first. Otherwise each part of the path is a field of an
    object, or an index into a list, starting at 0: "answers.text.0".
    """
    if path in fields:
        return fields[path]
    value: Any = fields
    for part in path.split("."):
        if isinstance(value, Mapping) and part in value:
            value = value[part]
        elif isinstance(value, list) and part.isdecimal() and int(part) < len(value):
            value = value[int(part)]
        else:
            return MISSING
    return value


def with_value(fields: Mapping[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy of `fields` with another value at `path`, which `lookup` finds in it."""
    *parts, last = [path] if path in fields else path.split(".")
    changed: dict[str, Any] = dict(fields)
    holder: Any = changed
    for part in parts:
        key = int(part) if isinstance(holder, list) else part
        holder[key] = copy(holder[key])  # `fields` keeps its own objects and lists
        holder = holder[key]
    holder[int(last) if isinstance(holder, list) else last] = value
    return changed


def paths(fields: Mapping[str, Any], prefix: str = "", depth: int = 3) -> Iterator[str]:
    """Column names and dotted paths that `lookup` accepts, for hints in error messages.

    Args:
        prefix: put before every name.
        depth: maximum number of names in a path.
    """
    for name, value in fields.items():
        yield prefix + name
        if isinstance(value, Mapping) and depth > 1:
            yield from paths(value, f"{prefix}{name}.", depth - 1)
