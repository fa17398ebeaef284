"""JSON in data files, parsed more strictly than Python does. Each mistake gives a one-line error.

Python's `json` keeps the last of two equal keys, accepts NaN and 1e999, and raises a bare
ValueError for an integer of more than 4,300 digits. All of these are mistakes in a data file.
"""

from __future__ import annotations

import json
import math
from typing import Any

from ..errors import UserError

LONGEST_INTEGER = 4_300
"""Maximum digits. Rewards and logs convert integers to text, which fails for longer ones."""


class _Refused(ValueError):
    """A value that Python's parser accepts and a data file must not contain."""


def parse_json(where: str, text: str, hint: str = "") -> Any:
    """The value of a JSON text.

    Args:
        where: file and line, for error messages.
        hint: appended to the position in a syntax error, such as " (file truncated?)".

    Raises:
        UserError: if the text is not valid JSON, repeats a key, or contains a number that is not
            finite or too long.
    """
    try:
        return _DECODER.decode(text)
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if error.lineno > 1 else ""
        raise UserError(
            f"{where}: invalid JSON at {line}column {error.colno}{hint}: {error.msg}"
        ) from error
    except _Refused as error:
        raise UserError(f"{where}: {error}") from error
    except RecursionError as error:
        raise UserError(f"{where}: invalid JSON: nested too deeply") from error


def json_type(value: Any) -> str:
    """The type of a value in JSON terms: null, str, list, object, ..."""
    return {"NoneType": "null", "dict": "object"}.get(type(value).__name__, type(value).__name__)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise _Refused(f"duplicate key {repeated[:60]!r} in one object")
    return fields


def _integer(digits: str) -> int:
    if len(digits) > LONGEST_INTEGER:
        raise _Refused(
            f"an integer of {len(digits):,} digits (at most {LONGEST_INTEGER:,}); write it as text"
        )
    return int(digits)


def _real(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise _Refused(f"the number {digits[:40]} is too large for a float; write it as text")
    return value


def _constant(name: str) -> float:
    raise _Refused(f"{name} is not valid JSON; write null, or the word as text")


# One decoder for all lines: json.loads builds a new one for every call with hooks.
_DECODER = json.JSONDecoder(
    object_pairs_hook=_object, parse_int=_integer, parse_float=_real, parse_constant=_constant
)
