r"""Answers that state a value by an equation: `x = 5`, `5 = x`, `17 \cdot 23 = 391`."""

from __future__ import annotations

import re
from typing import NamedTuple

from .numbers import exact_number

MAX_MEMBERS = 12

_RELATION = re.compile(r"[<>]|\\(?:ne|neq|le|ge|lt|gt|approx|equiv|sim|in|mid)(?![A-Za-z])")
_OPERATION = re.compile(
    r"[+*/^!-]|\\(?:frac|sqrt|cdot|times|div|pm|mp|ln|log|exp|binom|sum|prod|int)(?![A-Za-z])"
)
_LINK = re.compile(
    r"\\text\s*\{\s*(?:or|and)\s*\}|(?<![A-Za-z\\])(?:or|and)(?![A-Za-z])|\\l(?:or|and)\b"
)
_ABSOLUTE = re.compile(r"\|\s*[a-z]\s*\|")
_ARGUMENTS = re.compile(r"\([^()=]*\)")
_COMMAND = re.compile(r"\\[A-Za-z]+")


class Stated(NamedTuple):
    """A value that an equation states.

    Attributes:
        name: what has the value, such as `x` or `f(2)`. Empty for an equation between numbers.
        others: members without a name that must equal the value: `6/2` in `x = 6/2 = 3`.
    """

    name: str
    value: str
    others: tuple[str, ...]


def stated_value(text: str, prompt: str = "") -> Stated | None:
    """The value that an equation states, or None if the text is no equation of this kind.

    The left side is a name (`x`, `f(2)`, `|AB|`), an expression of several names (`x + y`), or an
    expression that the question has. So `2x = 5` does not state 5, unless the question asks for 2x.

    Args:
        text: normalised answer.
    """
    members = [member.strip() for member in split_at(text, "=")]
    if not 2 <= len(members) <= MAX_MEMBERS or not all(members) or _RELATION.search(text):
        return None
    if any(len(split_at(member, ",;")) > 1 or _LINK.search(member) for member in members[:-1]):
        return None  # several equations
    if len(members) == 2 and is_name(members[1]) and not _letters(members[0]):
        return Stated(members[1], members[0], ())
    first, *middle, value = members
    named = _letters(first) != ""
    several = len(set(_letters(first))) > 1 and not first[0].isdigit()
    if named and not (is_name(first) or several or _in_question(first, prompt)):
        return None
    others = tuple(m for m in ([] if named else [first]) + middle if not _letters(m))
    return Stated(first if named else "", value, others)


def split_at(text: str, separators: str) -> list[str]:
    """Parts of a text between characters of `separators` that are outside of brackets."""
    parts, depth, start = [], 0, 0
    for position, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if depth == 0 and character in separators:
            parts.append(text[start:position])
            start = position + 1
    return [*parts, text[start:]]


def is_name(text: str) -> bool:
    """True for a name, also of a function value or a length: `x`, `a_n`, `f(2)`, `|AB|`."""
    bare = _ARGUMENTS.sub("", text)
    return (
        bool(_letters(text))
        and not bare[:1].isdigit()
        and "," not in bare
        and not _OPERATION.search(bare)
        and not _ABSOLUTE.fullmatch(text)
        and exact_number(text) is None
    )


def _letters(text: str) -> str:
    r"""Names of variables in an expression. \pi, e and i are numbers."""
    greek = "".join(
        name[1]
        for name in _COMMAND.findall(text)
        if name not in ("\\pi", "\\frac", "\\sqrt", "\\cdot", "\\times", "\\text", "\\infty")
    )
    return re.sub(r"[^A-Za-z]|(?<![A-Za-z])[ei](?![A-Za-z])", "", _COMMAND.sub(" ", text)) + greek


def _in_question(expression: str, prompt: str) -> bool:
    """True if the question has the expression, but not as a side of an equation."""
    characters = re.sub(r"[\s{}$]", "", expression)
    spaced = r"\s*".join(map(re.escape, characters))
    sides = r"A-Za-z0-9+*/^=\\-"
    found = re.search(
        rf"(?<![{sides}]){spaced}(?!\s*[{sides}])|(?<=\s){spaced}(?=\s|$)",
        re.sub(r"[{}$]", "", prompt),
    )
    return bool(characters) and found is not None
