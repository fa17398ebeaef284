"""Check the keys of a recipe: every leaf is a setting, every table a section. No torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from ..errors import UserError, nearest
from .knobs import Knob, kind_knobs, knobs, sections

_SECRET = re.compile(
    r"(^|[_-])(token|api[_-]?key|secret|password|passwd|credentials?)$", re.IGNORECASE
)


def check_keys(tree: Mapping[str, Any], place: Callable[[str], str], prefix: str = "") -> None:
    """Check that every leaf is a setting and every table a section.

    Values are not shown in these errors, because a misplaced key may be a secret.

    Raises:
        UserError: with the nearest valid name.
    """
    for name, value in tree.items():
        key = prefix + name
        if key in sections():
            if not isinstance(value, dict):
                raise UserError(f"{_value_for_section(key, value)} ({place(key)})")
            check_keys(value, place, key + ".")
        elif key not in knobs():
            raise UserError(f"{_unknown_key(key, value)} ({place(key)})")
        elif isinstance(value, dict):
            wanted = knobs()[key].accepts
            raise UserError(f"{key}: expected {wanted}, got a table ({place(key)})")
        elif knobs()[key].fields and isinstance(value, list):
            _check_tables(knobs()[key], value, place)


def _value_for_section(key: str, value: Any) -> str:
    """Error message for a section that is written like a setting."""
    kind = kind_knobs().get(key)
    if kind is None:
        example = next(k for k in knobs() if k.startswith(key + "."))
        return f"'{key}' is a section, not a setting. Set one of its settings, e.g. {example}"
    meant = next((c for c in kind.choices if str(value).partition(":")[0] == c), "")
    fields = [k.key for k in knobs().values() if k.section == key and meant in k.kinds]
    more = f" and, for example, {fields[0]}" if fields else ""
    example = f"{kind.key} = '{meant or kind.choices[0]}'{more}"
    return f"'{key}' is a section, not a setting. Set {example}"


def _check_tables(knob: Knob, tables: Sequence[Any], place: Callable[[str], str]) -> None:
    """Check that each item of a list of tables is a table with known names.

    Raises:
        UserError: if it is not.
    """
    for number, table in enumerate(tables, start=1):
        if not isinstance(table, dict):
            raise UserError(
                f"{knob.key}: entry {number} is {shown(table)}, expected a table such as"
                f" [[{knob.key}]] ({place(knob.key)})"
            )
        for name in table:
            if name not in knob.fields:
                raise UserError(
                    f"unknown key '{name}' in {knob.key}, entry"
                    f" {number}.{nearest(name, list(knob.fields))} ({place(f'{knob.key}.{name}')})"
                )


def _unknown_key(key: str, value: Any) -> str:
    """Error message for an unknown key."""
    name = key.rpartition(".")[2]
    if isinstance(value, str) and _SECRET.search(name):
        variable = name.upper().replace("-", "_")
        return (
            f"'{key}' looks like a secret, and a recipe must not contain secrets (value not"
            f" shown). Set the environment variable {variable}"
        )
    homes = [knob for knob in knobs().values() if knob.name == name]
    if homes:
        return f"'{key}' belongs under " + " or ".join(
            f"'{knob.section}' ({knob.key})" for knob in homes
        )
    parents = [s.rpartition(".")[0] for s in sorted(sections()) if s.rpartition(".")[2] == name]
    if parents and all(parents):
        return f"section '{key}' belongs under " + " or ".join(
            f"'{parent}' ({parent}.{name})" for parent in parents
        )
    section = key.rpartition(".")[0]
    kind = kind_knobs().get(section)
    if kind is not None and value in kind.choices:
        return f"unknown key '{key}'. Write {kind.key} = '{value}'"
    takers = [
        knob.key
        for knob in knobs().values()
        if name in knob.choices
        and (
            knob.section == section
            or (knob.name == "kind" and knob.section.rpartition(".")[0] == section)
        )
    ]
    if takers:
        return f"unknown key '{key}': '{name}' is a value of {takers[0]}"
    # Compare names without their section: a long shared prefix would make all keys look similar.
    everywhere = {knob.name: knob.key for knob in reversed(list(knobs().values()))}
    siblings = {
        child.rpartition(".")[2]: child
        for child in [*knobs(), *sorted(sections())]
        if child.rpartition(".")[0] == key.rpartition(".")[0]
    }
    near = [
        names[n] for names in (siblings, everywhere) for n in get_close_matches(name, names, n=1)
    ]
    if near:
        return f"unknown key '{key}'. Did you mean '{near[0]}'?"
    what = f"The settings of '{section}'" if section else "The sections of a recipe"
    return f"unknown key '{key}'. {what} are {', '.join(siblings)}"


def shown(value: Any) -> str:
    """A value in one short line."""
    if isinstance(value, dict):
        return "a table"
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def bad_value(knob: Knob, asked: Mapping[str, Any]) -> str:
    """Error message for a value that a setting does not accept."""
    value: Any = asked
    for part in knob.key.split("."):
        value = value[part]
    wrong = [
        item
        for item in (value if isinstance(value, list) else [value])
        if isinstance(item, str) and item not in knob.choices
    ]
    near = nearest(wrong[0], list(knob.choices)) if wrong else ""
    return f"{knob.key}: expected {knob.accepts}, got {shown(value)}{near and '.' + near}"
