"""Sections with several kinds: check that the settings given belong to the kind. No torch."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from typing import Any

from ..errors import UserError
from .keys import bad_value
from .knobs import Knob, kind_knobs, knobs


def kinds_in(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Kind of every section with kinds: the given one, or the default.

    Args:
        asked: values by section, with known keys.
    """
    return {
        section: (_table(asked, section) or {}).get("kind", knob.default)
        for section, knob in kind_knobs().items()
    }


def settle_kinds(
    asked: dict[str, Any],
    in_file: Mapping[str, Any],
    flags: Container[str],
    place: Callable[[str], str],
) -> None:
    """Write the kind of every section that is given, and check its fields.

    A kind given by a flag replaces the kind of the file. Fields of the file's kind that the new
    kind lacks are removed, because a flag cannot unset them.

    Args:
        asked: values by section, of the file and the flags. Changed in place.
        in_file: `kinds_in` the file, without the flags.
        flags: dotted keys given as flags.
        place: says where a key was written, for error messages.

    Raises:
        UserError: if a kind does not exist, or a field belongs to another kind.
    """
    for section, knob in kind_knobs().items():
        table = _table(asked, section)
        if table is None:
            continue
        given = "kind" in table
        kind = table.setdefault("kind", knob.default)
        if kind not in knob.choices:
            raise UserError(f"{bad_value(knob, asked)} ({place(knob.key)})")
        for name in list(table):
            field = knobs()[f"{section}.{name}"]
            if not field.kinds or kind in field.kinds:
                continue
            if field.key not in flags and in_file[section] in field.kinds:
                del table[name]
                continue
            now = f"'{kind}'" if given else f"'{kind}' by default"
            raise UserError(
                f"{field.key} belongs to {_kinds(field)}, and {knob.key} is {now}. Set"
                f" {knob.key} = '{field.kinds[0]}', or remove {field.key} ({place(field.key)})"
            )


def _table(asked: Mapping[str, Any], section: str) -> Any:
    """Values of a section, or None if it is not given."""
    table: Any = asked
    for part in section.split("."):
        table = None if table is None else table.get(part)
    return table


def _kinds(field: Knob) -> str:
    """Kinds that have a field, as in "kind 'copy', 'int8' or 'fp8'"."""
    *first, last = (f"'{kind}'" for kind in field.kinds)
    return f"kind {', '.join(first)} or {last}" if first else f"kind {last}"
