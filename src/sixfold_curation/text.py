"""One form of text for all comparisons: tokens without case, spacing, punctuation or LaTeX layout.

Two prompts with the same tokens ask the same. Numbers, operators, letters that stand for quantities
and words such as "largest" decide what is asked, so they are marked: two prompts that differ in one
of them are different tasks, however many other words they share.
"""

from __future__ import annotations

import re
import tomllib
import unicodedata
from fractions import Fraction
from functools import lru_cache
from importlib.resources import files
from typing import Any

from sixfold_environments.maths.numbers import exact_number
from sixfold_environments.maths.spelling import normalise

_TABLES: dict[str, Any] = tomllib.loads(files(__package__).joinpath("text.toml").read_text())
_LATEX: dict[str, str] = _TABLES["latex"] | dict.fromkeys(_TABLES["layout"].split(), "")
_NUMBERS: dict[str, str] = _TABLES["numbers"]
DECIDING: frozenset[str] = frozenset(_TABLES["deciding"].split())
"""Words that decide the answer by themselves."""
DECIDING_CHARACTERS: frozenset[str] = frozenset(_TABLES["deciding_characters"].split())
"""Characters that decide in scripts without spaces: numerals, negations, and parts of words for
quantities.
"""
FILLERS: frozenset[str] = frozenset(_TABLES["fillers"].split())
"""Words that do not say what a prompt asks for: grammar, and how to solve and answer it."""
UNTELLING: frozenset[str] = frozenset(_TABLES["untelling"].split())
"""Answers, as `answer_key` gives them, that questions of all kinds have."""
CHARACTERS_PER_WORD = 2
"""Of scripts without spaces."""

_COMMAND = re.compile(r"\\([A-Za-z]+)\*?")
_LATEX_SPACE = re.compile(r"\\[,;:!> ]|\\\\(?:\[[^\]]*\])?|(?<!\\)~")
_SHORT_FRACTION = re.compile(r"\\[dtc]?frac\s*(\d)\s*(\d)")
_DELIMITER = re.compile(r"\\[()\[\]]|\\(?=[$%{}#&_])|(?<!\\)\$")
_THOUSANDS = re.compile(r"(?<![\d,.])\d{1,3}(?:(?:,|\{,\})\d{3})+(?![\d,]*\d)")
_SUPERSCRIPT = re.compile(r"(?<=[\w)\]}|])[⁺⁻]?[⁰¹²³⁴-⁹ⁿ]+")
_MIXED = re.compile(r"(?<=\d)(?=[¼-¾⅐-⅞])")
_OTHER = [chr(code) for code in range(0x80, 0x3100)]
_MARKS = "".join(sign for sign in _OTHER if unicodedata.category(sign)[0] == "M")
"""Vowel signs and accents, which belong to the letter before them."""
_PUNCTUATION = dict.fromkeys(
    (sign for sign in _OTHER if unicodedata.category(sign)[0] == "P" and sign not in "‖‰"), " "
)
_INVISIBLE = dict.fromkeys(
    (sign for sign in (*_OTHER, "\ufeff") if unicodedata.category(sign) == "Cf"), ""
)
"""Marks of format, such as spaces of no width and soft hyphens."""
_SYMBOLS = str.maketrans(_PUNCTUATION | _INVISIBLE | _TABLES["symbols"])
_UNSPACED = (
    "\u0e00-\u0edf\u0f00-\u109f\u1780-\u17ff\u3005-\u3007\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff"
    "\uf900-\ufaff\U00020000-\U000323af"
)
"""Scripts without spaces between words: Thai, Lao, Tibetan, Burmese, Khmer, kana and Han."""
_LETTER = r"[^\W\d_]"
_SPACED = rf"[^\W\d_{_UNSPACED}](?:[^\W\d_{_UNSPACED}]|[{_MARKS}])*"


def _tokens_of(word: str) -> re.Pattern[str]:
    """Pattern of tokens.

    Args:
        word: pattern of a word.
    """
    return re.compile(
        rf"\d+(?:\.\d+)?|{word}|<=|>=|!=|\*\*|\.{{3}}|(?:(?<=[\d)])|(?<=\b\w))!"
        r"|[-+*/^=<>|%()\[\]]"
        r"|(?:(?<=^\w)|(?<=[^\w'\"]\w))'+(?!\w)"
        rf"|(?<={_LETTER})#|#(?={_LETTER})|[~!](?={_LETTER}|\()"
        r"|[^\w\s.,;:!?'\"{}\\$&#~_]"
    )


_ASCII_TOKEN = _tokens_of(r"[^\W\d_]+(?:'[^\W\d_]+)*")
_TOKEN = _tokens_of(rf"{_SPACED}(?:'{_SPACED})*|(?={_LETTER})[{_UNSPACED}][{_MARKS}]*")


def plain(text: str) -> str:
    """The text without LaTeX layout, in one form of Unicode and case."""
    if not text.isascii():  # the form of x² is x2, and that of 3½ is 31/2
        text = _SUPERSCRIPT.sub(r"^\g<0>", text)
        text = unicodedata.normalize("NFKC", _MIXED.sub(" ", text))
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

    A character of a script without spaces counts as a word. Punctuation, hyphens between words, and
    brackets around one token, as in "(a)", are left out.
    """
    text = plain(text)
    found = (_ASCII_TOKEN if text.isascii() else _TOKEN).findall(text)
    return [
        _NUMBERS.get(token, token)
        for at, token in enumerate(found)
        if token not in _SIGNS or not _is_layout(found, at)
    ]


def tokens_per_word(text: str) -> float:
    """1 for a text with spaces, up to CHARACTERS_PER_WORD for one without."""
    found = tokens(text)
    characters = sum(map(is_unspaced, found))
    words = len(found) - characters + characters / CHARACTERS_PER_WORD
    return len(found) / words if found else 1.0


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
    return (len(token) > 1 and token[0].isalpha()) or is_unspaced(token)


_IS_UNSPACED = re.compile(f"[{_UNSPACED}]")


def is_unspaced(token: str) -> bool:
    """Whether a token is a character of a script without spaces: a part of a word."""
    return not token.isascii() and bool(_IS_UNSPACED.match(token))


@lru_cache(maxsize=1 << 18)
def decides(token: str) -> bool:
    """Whether another token in its place makes another task: numbers, letters, operators, ..."""
    if is_unspaced(token):
        return token in DECIDING_CHARACTERS
    if len(token) == 1:
        return token not in "ai"
    return not token[0].isalpha() or token in DECIDING


_BOXED = re.compile(r"\\(?:boxed|fbox)\s*\{")
_FINAL = re.compile(
    r"####\s*(.+)|(?:final answer|answer)(?: is)?\s*[:=]?\s*([^\n]+?)\.?\s*$", re.IGNORECASE
)
_DECIMAL = re.compile(r"[-+]?\d*\.?\d+")
_RATIO = re.compile(r"\d\s*/|frac")
_BETWEEN_DIGITS = re.compile(
    r"\\[,!;: ]|\\?\$|(?<=\d),(?=\d{3}(?!\d))|(?<=\d)\s(?=\d{3}(?!\d))|\{,\}|(?<=[-+])\s+"
)
"""What numbers have beside their digits: dollar signs, and separators of thousands."""
_FRACTION = re.compile(r"frac (\d+) (\d+)")

LONGEST_ANSWER = 200
"""Characters of the longest answer that is compared. A longer text is a worked solution or a reply,
of which two may both be right."""


@lru_cache(maxsize=1 << 16)
def answer_key(answer: str) -> str | None:
    r"""One form of an answer, equal for answers that are plainly equal: 1.0 and 1, \boxed{x} and x,
    1/2 and \frac{1}{2} and 0.5.

    Returns:
        None if there is no answer, or it is a text that has no single right form.
    """
    text = _final_part(answer)
    if not text or len(text) > LONGEST_ANSWER:
        return None
    number = _BETWEEN_DIGITS.sub("", text.replace("−", "-")).strip().rstrip(".")
    if _DECIMAL.fullmatch(number):
        return str(Fraction(number))
    if _RATIO.search(number) and (value := exact_number(normalise(number))) is not None:
        return str(value)
    key = " ".join(tokens(text)) or text.strip()
    # Without the brackets, quotes and markup that the token list leaves out: \(0.5\), **1/2**, ½.
    bare = _FRACTION.sub(r"\1/\2", key.removeprefix("= ").replace(" / ", "/"))
    listed = " " in bare and "," in text  # "1, 1/2" is not 1 1/2
    value = None if listed else exact_number(bare)
    return key if value is None else str(value)


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
