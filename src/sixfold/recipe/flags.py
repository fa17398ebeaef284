"""Parse `--section.key value` flags into TOML values. No torch."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from typing import Any

from ..errors import UserError
from .knobs import Knob, knobs


def parse_flags(flags: Sequence[str]) -> dict[str, Any]:
    """Parse `--a.b value` and `--a.b=value` into values by dotted key."""
    given: dict[str, Any] = {}
    rest = iter(flags)
    for flag in rest:
        if not flag.startswith("--") or flag == "--":
            raise UserError(
                f"unexpected argument '{flag}'; settings are written --section.key value"
            )
        key, equals, raw = flag[2:].partition("=")
        value = raw if equals else next(rest, None)
        if value is None or (not equals and value.startswith("--")):
            knob = _knob(key)
            wanted = f": {knob.accepts}" if knob else ""
            raise UserError(
                f"--{key} needs a value{wanted} (one that starts with -- is written --{key}=VALUE)"
            )
        if key in given:
            raise UserError(f"--{key} is given twice")
        given[key] = _flag_value(key, value)
    return given


def _knob(key: str) -> Knob | None:
    """The setting that a flag names, also for one stage: `stages.NAME.KEY`. None if unknown."""
    if not key.startswith("stages."):
        return knobs().get(key)
    parts = key.split(".")  # a name may have dots
    rest = (".".join(parts[at:]) for at in range(2, len(parts)))
    return next((knobs()[name] for name in rest if name in knobs()), None)


def _flag_value(key: str, raw: str) -> Any:
    """Parse the text of a flag into a TOML value.

    Strings need no quotes, and lists may be separated by commas. Anything else is TOML.
    """
    if any("\ud800" <= c <= "\udfff" for c in raw):  # Python passes invalid UTF-8 this way
        raise UserError(f"--{key}: the value is not valid UTF-8")
    knob = _knob(key)
    value = _toml_value(raw)
    if knob is None:
        return value
    if knob.kind == "string":
        return value if isinstance(value, str) else raw
    if knob.kind == "number" and isinstance(value, str):
        return _number(value)
    if knob.kind == "array" and not isinstance(value, list):
        items = [item.strip() for item in raw.split(",")] if raw.strip() else []
        return [_number(item) for item in items] if knob.item == "number" else items
    return value


def _number(raw: str) -> float | str:
    """Parse a number, including .1 and 5., which TOML does not allow.

    Text that is not a number is returned unchanged and refused later.
    """
    try:
        return float(raw)
    except ValueError:
        return raw


def _toml_value(raw: str) -> Any:
    """Parse `raw` as one TOML value. If that fails, return `raw` itself."""
    try:
        parsed = tomllib.loads(f"value = {raw}")
    except (ValueError, RecursionError):
        return raw
    # A line break in `raw` could add a second key.
    return parsed["value"] if len(parsed) == 1 else raw
