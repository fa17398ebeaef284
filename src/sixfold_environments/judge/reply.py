"""Read a judge's reply, which must be one JSON object with the nonce."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from sixfold.environment.answer_part import answer_part

from .prompts import Question

_FENCE = re.compile(r"\s*```(?:json)?\s*(.*?)\s*```\s*", re.DOTALL | re.IGNORECASE)

MAX_TEXT = 20_000
"""Maximum characters of a text in a reply."""


class Unreadable(ValueError):
    """The reply has no readable verdict. The message continues "the reply could not be read:"."""


def read_reply(content: str, question: Question, nonce: str) -> dict[str, Any]:
    """Parse and check a reply.

    A finished thought before the object and a code fence around it are allowed. Any other text is
    not: otherwise an object that the judge only quotes could be taken for its verdict.

    Args:
        nonce: number that the reply must repeat.

    Returns:
        The fields of the object.

    Raises:
        Unreadable: if the reply is not such an object.
    """
    text = answer_part(content)
    fenced = _FENCE.fullmatch(text)
    try:
        found = json.loads(fenced[1] if fenced else text, object_pairs_hook=_unique)
    except Unreadable:
        raise
    except (ValueError, RecursionError) as error:
        raise Unreadable("it is not one JSON object") from error
    if not isinstance(found, dict):
        raise Unreadable("it is not a JSON object")
    if found.get("nonce") != nonce:
        raise Unreadable("its nonce is not the one of the question")
    schema = question.schema
    expected = schema["properties"]
    for name in schema["required"]:
        # The reason is only for the judge's own use, so it may be missing.
        if name not in found and name != "reason":
            raise Unreadable(f"it has no {name!r}")
    if unknown := sorted(set(found) - set(expected)):
        raise Unreadable(f"it has an unknown key {unknown[0]!r}")
    for name, value in found.items():
        _check(name, value, expected[name])
    return found


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object. A repeated key is refused: a reply with two verdicts is ambiguous."""
    made = dict(pairs)
    if len(made) < len(pairs):
        raise Unreadable("it repeats a key")
    return made


def _check(name: str, value: Any, schema: Mapping[str, Any]) -> None:
    if schema["type"] == "string":
        allowed = schema.get("enum")
        if not isinstance(value, str):
            raise Unreadable(f"{name!r} is not a text")
        if any("\ud800" <= character <= "\udfff" for character in value):
            raise Unreadable(f"{name!r} has half of a surrogate pair")
        if len(value) > MAX_TEXT:
            raise Unreadable(f"{name!r} has more than {MAX_TEXT} characters")
        if allowed and value not in allowed:
            raise Unreadable(f"{name!r} is not one of {', '.join(map(repr, allowed))}")
        return
    whole = type(value) is int or (type(value) is float and value.is_integer())
    if not whole or not schema["minimum"] <= value <= schema["maximum"]:
        raise Unreadable(
            f"{name!r} is not an integer from {schema['minimum']} to {schema['maximum']}"
        )
