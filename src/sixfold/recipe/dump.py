"""Write a recipe as TOML, and list its values by dotted key. No torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from .knobs import knobs
from .schema import Recipe


def flat(recipe: Recipe) -> dict[str, Any]:
    """Every value by dotted key, in the order of the schema.

    A section with several kinds has the settings of its kind.
    The tables of a list contain only values that differ from their defaults.
    """

    def walk(section: BaseModel, prefix: str) -> Iterator[tuple[str, Any]]:
        for name in type(section).model_fields:
            value = getattr(section, name)
            if isinstance(value, BaseModel):
                yield from walk(value, f"{prefix}{name}.")
            elif isinstance(value, tuple) and value and isinstance(value[0], BaseModel):
                yield (
                    prefix + name,
                    tuple(table.model_dump(exclude_defaults=True) for table in value),
                )
            else:
                yield prefix + name, value

    return dict(walk(recipe, ""))


def dump_recipe(recipe: Recipe) -> str:
    """TOML that loads back to an equal Recipe. Settings that are None are left out."""
    return toml_tables(flat(recipe))


def toml_tables(values: Mapping[str, Any]) -> str:
    """TOML of settings by dotted key. Those that are None are left out."""
    tables: dict[str, list[str]] = {}
    for knob in knobs().values():
        if values.get(knob.key) is None:
            continue
        lines = tables.setdefault(knob.section, [f"[{knob.section}]"])
        lines.append(f"{knob.name} = {toml_literal(values[knob.key])}")
    return "\n\n".join("\n".join(lines) for lines in tables.values()) + "\n"


def toml_literal(value: Any) -> str:
    """Value of a setting in TOML syntax."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace(
            "\x7f", "\\u007f"
        )  # JSON leaves DEL bare, TOML forbids it
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(toml_literal(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {toml_literal(item)}" for key, item in value.items()) + "}"
    return repr(value)
