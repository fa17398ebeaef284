"""Parse criteria and principles of the form "NAME: TEXT" or "NAME * WEIGHT: TEXT"."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

_NAMED = re.compile(r"\s*([^\W\d][\w-]{0,39})\s*(?:\*\s*(\d+(?:\.\d+)?)\s*)?:\s+(.+)", re.DOTALL)


class NamedText(NamedTuple):
    """One criterion or principle.

    Attributes:
        name: its key in the judge's reply.
        text: what it requires of an answer.
    """

    name: str
    text: str
    weight: float


def named_texts(given: Any, what: str, source: str) -> list[NamedText]:
    """Parse criteria or principles. The second one gets the name "principle_2" if it has none.

    Args:
        source: where they come from, for messages.

    Raises:
        ValueError: if `given` is not a list of texts or is empty, if two entries have the same
            name, or if all weights are 0.
    """
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise ValueError(f"{source} must be a list of texts, not {type(given).__name__}")
    if not given:
        raise ValueError(f"{source} is empty: at least one {what} is needed")
    found = []
    for number, line in enumerate(given, 1):
        if not isinstance(line, str) or not line.strip():
            raise ValueError(f"{source}: entry {number} is empty or not a text")
        match = _NAMED.fullmatch(line)
        name, weight, text = match.groups() if match else (f"{what}_{number}", None, line)
        weight = 1.0 if weight is None else float(weight)
        found.append(NamedText(name, " ".join(text.split()), weight))
    names = [each.name for each in found]
    for name in names:
        if names.count(name) > 1 or name in ("nonce", "reason"):
            raise ValueError(f"{source}: the name {name!r} is already used. Choose another name")
    if not any(each.weight for each in found):
        raise ValueError(f"{source}: all weights are 0")
    return found
