"""One form of text for all comparisons: tokens without case, spacing, punctuation or LaTeX layout.

Two prompts with the same tokens ask the same. Numbers, operators, letters that stand for quantities
and words such as "largest" decide what is asked, so they are marked: two prompts that differ in one
of them are different tasks, however many other words they share.
"""

from __future__ import annotations

import re
import tomllib
import unicodedata
from functools import lru_cache
from importlib.resources import files
from typing import Any

_TABLES: dict[str, Any] = tomllib.loads(files(__package__).joinpath("text.toml").read_text())
_LATEX: dict[str, str] = _TABLES["latex"] | dict.fromkeys(_TABLES["layout"].split(), "")
_NUMBERS: dict[str, str] = _TABLES["numbers"]
DECIDING: frozenset[str] = frozenset(_TABLES["deciding"].split())
"""Words that decide the answer by themselves."""

_COMMAND = re.compile(r"\\([A-Za-z]+)\*?")
_LATEX_SPACE = re.compile(r"\\[,;:!> ]|\\\\(?:\[[^\]]*\])?|(?<!\\)~")
_SHORT_FRACTION = re.compile(r"\\[dtc]?frac\s*(\d)\s*(\d)")
_DELIMITER = re.compile(r"\\[()\[\]]|\\(?=[$%{}#&_])|(?<!\\)\$")
_THOUSANDS = re.compile(r"(?<![\d,.])\d{1,3}(?:(?:,|\{,\})\d{3})+(?![\d,]*\d)")
_SYMBOLS = str.maketrans(_TABLES["symbols"])
_TOKEN = re.compile(
    r"\d+(?:\.\d+)?|[^\W\d_]+(?:'[^\W\d_]+)*|<=|>=|!=|\*\*|\.{3}|(?:(?<=[\d)])|(?<=\b\w))!"
    r"|[-+*/^=<>|%()\[\]]"
    r"|(?:(?<=^\w)|(?<=[^\w'\"]\w))'+(?!\w)|(?<=[^\W\d_])#|#(?=[^\W\d_])|[~!](?=[^\W\d_]|\()"
    r"|[^\w\s.,;:!?'\"{}\\$&#~_]"
)


def plain(text: str) -> str:
    """The text without LaTeX layout, in one form of Unicode and case."""
    text = unicodedata.normalize("NFKC", text) if not text.isascii() else text
    if "\\" in text:
        text = _LATEX_SPACE.sub(" ", text)
        text = _DELIMITER.sub(" ", text)
        text = _SHORT_FRACTION.sub(r" frac \1 \2", text)
        text = _COMMAND.sub(_command, text)
    elif "$" in text:
        text = text.replace("$", " ")
    if not text.isascii():
        text = text.translate(_SYMBOLS)
    if "," in text:
        text = _THOUSANDS.sub(lambda found: re.sub(r"[,{}]", "", found.group()), text)
    return text.casefold()


def _command(found: re.Match[str]) -> str:
    return f" {_LATEX.get(found[1], found[1])} "


def tokens(text: str) -> list[str]:
    """Words, numbers and operators, in order. "five" is 5.

    Punctuation, hyphens between words, and brackets around one token, as in "(a)", are left out.
    """
    found = _TOKEN.findall(plain(text))
    return [
        _NUMBERS.get(token, token)
        for at, token in enumerate(found)
        if token not in _SIGNS or not _is_layout(found, at)
    ]


_SIGNS = frozenset(("-", "/", "(", ")", "[", "]", "*", "**", ">", "|"))


def _is_layout(found: list[str], at: int) -> bool:
    """Whether a sign belongs to prose or markdown, not to a formula."""
    token = found[at]
    before = found[at - 1] if at else ""
    after = found[at + 1] if at + 1 < len(found) else ""
    if token in ("-", "/"):
        return _is_prose(before) and (_is_prose(after) or not before or not after)
    if token in ("*", "**", ">", "|"):
        return not before or not after or _is_prose(before) or _is_prose(after)
    if token in ("(", "["):
        return _is_prose(after) or found[at + 2 : at + 3] in ([")"], ["]"])
    return _is_prose(before) or (at >= 2 and found[at - 2] in ("(", "["))


def _is_prose(token: str) -> bool:
    return len(token) > 1 and token[0].isalpha()


@lru_cache(maxsize=1 << 18)
def decides(token: str) -> bool:
    """Whether another token in its place makes another task: numbers, letters, operators, ..."""
    if len(token) == 1:
        return token not in "ai"
    return not token[0].isalpha() or token in DECIDING


_BOXED = re.compile(r"\\(?:boxed|fbox)\s*\{")
_FINAL = re.compile(
    r"####\s*(.+)|(?:final answer|answer)(?: is)?\s*[:=]?\s*([^\n]+?)\.?\s*$", re.IGNORECASE
)
_DECIMAL = re.compile(r"[-+]?\d*\.?\d+")

LONGEST_ANSWER = 200
"""Characters of the longest answer that is compared. A longer text is a worked solution or a reply,
of which two may both be right."""


@lru_cache(maxsize=1 << 16)
def answer_key(answer: str) -> str | None:
    r"""One form of an answer, equal for answers that are plainly equal: 1.0 and 1, \boxed{x} and x.

    Returns:
        None if there is no answer, or it is a text that has no single right form.
    """
    text = _final_part(answer)
    if not text or len(text) > LONGEST_ANSWER:
        return None
    number = re.sub(r"\\[,!;: ]|[$\s]|(?<=\d),(?=\d{3}(?!\d))|\{,\}", "", text).rstrip(".")
    number = number.replace("−", "-")
    if _DECIMAL.fullmatch(number):
        digits = number.lstrip("+-")
        digits = (digits.rstrip("0").rstrip(".") if "." in digits else digits).lstrip("0")
        digits = f"0{digits}" if digits[:1] in ("", ".") else digits
        return f"-{digits}" if number.startswith("-") and digits != "0" else digits
    return " ".join(tokens(text)) or text.strip()


def _final_part(answer: str) -> str:
    boxes = list(_BOXED.finditer(answer))
    if boxes:
        return _until_closed(answer, boxes[-1].end()).strip()
    last = answer.rpartition("####")[2].strip() if "####" in answer else answer.strip()
    if len(last) > LONGEST_ANSWER or "\n" in last:
        found = _FINAL.search(last)
        last = (found[1] or found[2]).strip() if found else last
    return last


def _until_closed(text: str, start: int) -> str:
    depth = 1
    for at in range(start, len(text)):
        depth += (text[at] == "{") - (text[at] == "}")
        if not depth:
            return text[start:at]
    return text[start:]
