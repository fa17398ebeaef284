r"""Multiple-choice options: `C`, `(C)`, `\textbf{(C) } 12`, `C. Paris`, `Option C`."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

_FORMS = [
    re.compile(pattern, re.DOTALL)
    for pattern in (
        r"\(\s*(?P<letter>[A-J])\s*\)\s*(?P<text>.*)",
        r"\\text\s*\{\s*\(?\s*(?P<letter>[A-J])\s*\)?\s*[.:]?\s*\}\s*[.:)]?\s*(?P<text>.*)",
        r"\\text\s*\{\s*(?:\(\s*(?P<letter>[A-J])\s*\)|(?P<letter2>[A-J])\s*[).:])(?P<text>.*)",
        r"(?P<letter>[A-J])\s*(?:\)|[.:](?!\d))\s*(?P<text>.*)",
        r"(?i:option|choice|answer)\s+\(?(?P<letter>[A-J])\)?\s*(?:[.:)]\s*(?P<text>.*))?",
        r"(?P<letter>[A-J])(?P<text>)",
    )
]
_WRAPPED_WORD = re.compile(r"\\text\s*\{\s*((?i:option|choice|answer)\s+\(?[A-J]\)?)\s*\}")
_SIGN = re.compile(r"\^|['#]|\+\+|[+-]$")
"""Beside a letter, the sign of a grade, a charge or a name: B+ is not option B."""
_ANOTHER = re.compile(
    r"\(\s*([A-Ja-j])\s*\)|(?<![A-Za-z\\])([B-HJ])(?![A-Za-z])|(?<![A-Za-z\\])(A)(?=\s*(?:[).:,;]|$))"
)
_OPTION_OF_PROMPT = (
    r"(?<![A-Za-z\\])\(?{letter}\s*[).:]\s*(?P<text>.+?)"
    r"(?=\s*(?:\\\\|\\q?quad|\n|\(?(?<![A-Za-z\\])[A-J]\s*[).:]\s|$))"
)


class Choice(NamedTuple):
    """An option.

    Attributes:
        text: text beside the letter, often empty.
    """

    letter: str
    text: str


@lru_cache(maxsize=1024)  # the K samples of a task share its reference answer
def choice(text: str) -> Choice | None:
    """The option that a normalised answer names, or None.

    The text beside the letter may name a second option; `same_choice` checks this.
    """
    text = _WRAPPED_WORD.sub(r"\1", text.replace("**", "")).strip()
    for form in _FORMS:
        match = form.fullmatch(text)
        if match:
            parts = match.groupdict()
            if _SIGN.match(parts["text"] or ""):
                return None
            letter = parts["letter"] or parts.get("letter2") or ""
            return Choice(letter, _plain(parts["text"] or ""))
    return None


def same_choice(answer: str, gold: str, prompt: str) -> bool | None:
    """True if both name the same option. None if one of them names none.

    A text beside the letter must not name a second option. It must not contradict the reference or
    the question if these give the text of the option.

    Args:
        gold: normalised reference answer.
    """
    wanted = choice(gold)
    given = choice(answer) if wanted else None
    if given is None or wanted is None:
        return None
    if given.letter != wanted.letter:
        return False
    if not given.text:
        return True
    if wanted.text:
        return squash(given.text) == squash(wanted.text)
    named = {letter.upper() for found in _ANOTHER.findall(given.text) for letter in found if letter}
    stated = re.search(_OPTION_OF_PROMPT.format(letter=given.letter), prompt, re.DOTALL)
    if stated and squash(stated["text"]):
        return squash(_plain(stated["text"])) == squash(given.text)
    return named <= {given.letter}


def squash(text: str) -> str:
    """Letters, digits and signs of a text, for comparing two spellings of one option."""
    text = re.sub(r"\\(?:text|dfrac|tfrac|left|right|mathrm|textbf|mathbf)(?![A-Za-z])", "", text)
    text = re.sub(r"(?<!\d)\.|\.(?!\d)|(?<=\d),(?=\d{3}(?!\d))", "", text.replace("\\frac", "/"))
    return re.sub(r"[\s\\{}()$_,;:]", "", text.casefold())


def _plain(text: str) -> str:
    return re.sub(r"\\text\s*|[{}$]|\\[ ,;]", " ", text).strip(" .")
