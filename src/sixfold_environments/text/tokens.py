r"""Words, numbers and signs of a short answer, in one spelling.

Signs beside words count: `A-` is not `A+`, `C` is not `C++`, `x < 3` is not `x > 3`. Other ways to
write the same are made equal: full-width letters, accents of Latin letters, `<=` and `≤`, `50 %`
and `50 percent`, `5²` and `5^2`, Markdown, quotation marks, and signs as LaTeX writes them.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from typing import NamedTuple

from .marks import visible


class Token(NamedTuple):
    """A word, number or sign.

    Attributes:
        text: its one spelling, in lower case. "A" and "I" are capitals if they are a letter, and
            not an article or pronoun.
        named: True for a word with a capital, and for a number.
        sign: True for a sign that is not also a word, as "%" is.
    """

    text: str
    named: bool = False
    sign: bool = False


def _by_member(groups: Mapping[str, str]) -> dict[str, str]:
    """Key of each word in the values."""
    return {word: key for key, words in groups.items() for word in words.split()}


_MONEY = ("$", "€", "£", "¥")
_UNIT = _by_member(
    {
        "%": "percent percentage pct", "$": "dollar dollars usd", "€": "euro euros eur",
        "£": "pound pounds gbp", "¥": "yen jpy", "¢": "cent cents", "°": "degree degrees deg",
    }
)  # fmt: skip
_UNITS = {*_UNIT.values(), "‰"}
_SCALES = {"celsius": "c", "centigrade": "c", "fahrenheit": "f", "kelvin": "k"}
_SIGN = _by_member(
    {
        "≤": "<= =< ⩽ ≦", "≥": ">= ⩾ ≧", "≠": "!= <> =/= /=", "=": "== :=", "∧": "&&", "∨": "||",
        "→": "-> --> => ==> ⇒ ⟶", "←": "<- <-- ⇐ ⟵", "↔": "<-> <=> ⇔ ⟷", "×": "* · ⋅ ∗",
        "/": "÷ ∕", "¬": "!", "^": "**", "±": "+/- +-",
    }
)  # fmt: skip
_LATEX = _by_member(
    {
        "≤": "le leq leqslant", "≥": "ge geq geqslant", "≠": "ne neq", "<": "lt", ">": "gt",
        "±": "pm", "×": "times cdot", "/": "div", "→": "to rightarrow Rightarrow implies",
        "←": "leftarrow Leftarrow", "↔": "leftrightarrow iff", "∧": "land wedge", "∨": "lor vee",
        "¬": "neg lnot", "≈": "approx", "∞": "infty", "∈": "in", "∉": "notin", "∪": "cup",
        "∩": "cap", "⊂": "subset", "⊃": "supset", "∀": "forall", "∃": "exists", "": "left right",
    }
)  # fmt: skip
_CHARACTERS = str.maketrans(
    dict.fromkeys("‐‑‒–−﹣", "-") | dict.fromkeys("‘’‛ʼ′", "'") | dict.fromkeys("“”„«»「」″", '"')
    | {"。": ". ", "।": ". ", "、": ", ", "⁄": "/"}
)  # fmt: skip
_FOLDED = ("LATIN", "GREEK", "HEBREW", "ARABIC")
"""Scripts whose accents or points may be left out."""

_RAISED = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻]+")
_DRESSING = [
    (re.compile(pattern, re.MULTILINE), replacement)
    for pattern, replacement in (
        (r"(?<![\\\w$])\$(?=[^\s$])([^$\n]*[^\s$\\])\$(?![\d$])", r" \1 "),  # a formula, not money
        (r"\^\s*\{?\s*\\circ(?![A-Za-z])\s*\}?", "°"),
        (r"\\[()\[\]]|```\w*|`", " "),
        (r"\\([%$#&{}])", r"\1"),
        (r"^[ \t]*(?:[-*+•][ \t]+|#{1,6}[ \t]+|>[ \t]+(?=[^\W\d]{2}))", " "),
        (r"(?<![\w*])(\*{1,3}|__)(?=[^\s*_])([^*\n]*?[^\s*])\1(?![\w*])", r" \2 "),
        (r"(?<![\w'])(['\"])(?=\S)([^'\"\n]*[^'\"\s])\1(?!\w)", r" \2 "),
        (r"(?<=\d) - (?=\d)|(?<=\d)—(?=\d)", "-"),
    )
]
_COMMAND = re.compile(r"\\([A-Za-z]+)")
_LETTER = (
    "(?:[^\\W\\d_]|(?!\\d)[\u0900-\u0dff\u0e31-\u0e4e\u0eb1-\u0ecd\u102b-\u103e\u17b6-\u17d3])"
)
"""A letter, or a mark that is part of one: a vowel sign or a tone."""

_TOKEN = re.compile(
    rf"""
    (?P<number>(?:(?<![\w.,:/)\]'-])[-+])?(?:\d+(?:[.,:/-]\d+)*|(?<![\w.])\.\d+)(?:[eE][-+]?\d+)?
        (?:[-+](?![\w+=>-]))?)
    |(?P<word>(?:(?<![\w.])[.@#](?=[^\W\d_])|(?<![\w-])--(?=\w)|(?<![\w-])-(?=[^\W\d_]\b))?
        {_LETTER}+(?:'[^\W\d_]+)?
        (?:\+\+|--(?!\w)|\+(?![\w+=])|[#♯♭](?!\w)|(?:(?<=[A-Z])|(?<=\b[a-z]))-(?![\w+>-])
        |(?<=\b[A-Za-z])(?:'+(?!\w)|\*(?![\w*])))?)
    |(?P<sign><-->|<->|<=>|<--|==>|-->|=/=|\+/-|<-(?!\s*\d)|<=|=<|>=|!=|<>|/=|:=|==|->|=>|&&
        |\|\||\*\*|\+-|[-+*/^~<>=&|@!'"%$]|[^\w\s\x00-\x7f])
    """.replace("#", r"\#"),
    re.VERBOSE,
)
_LEFT = re.compile(r"(?:\d|\)|(?<![^\W\d_])[A-Za-z])'?\s?$")
_RIGHT = re.compile(r"\s?(?:[-+.]?\d|\(|[A-Za-z](?![^\W\d_]))")
_LISTED = re.compile(r"([(\[{])\s*([^()\[\]{}\n]{1,200}?)\s*([)\]}])")
_MEMBER = re.compile(r"\s*[-+]?(?:[\d.,/]+|[A-Za-z]|∞|inf(?:inity)?)\s*")
_SEPARATOR = re.compile(r"(?<![,;])\s*[,;]\s*(?!\d{3}(?!\d))")
_DIGITS = re.compile(r"\d[\d,.]*")
_GROUPED = re.compile(r"\d{1,3}(?:,\d{3})+(?:\.\d+)?")
_CONTEXT = 8


def normalise_spelling(text: str) -> str:
    """The text with one spelling of its characters, without Markdown, quotes and LaTeX."""
    text = visible(text)
    if not text.isascii():
        text = _RAISED.sub(_superscript, text)
        text = re.sub("(?<=\\d)(?=[¼-¾⅐-⅞])", " ", text)  # 3½ is not 31/2
        text = unicodedata.normalize("NFKC", text.translate(_CHARACTERS)).translate(_CHARACTERS)
        text = re.sub(r"\d", lambda digit: str(unicodedata.decimal(digit[0])), _fold_accents(text))
    for pattern, replacement in _DRESSING:
        text = pattern.sub(replacement, text)
    text = _COMMAND.sub(lambda command: _LATEX.get(command[1], command[0]), text)
    text = _LISTED.sub(lambda listed: _SEPARATOR.sub(", ", listed[0]), text)
    return _DIGITS.sub(_without_joined, text)


def tokens(text: str, every: bool = False) -> list[Token]:
    """Words, numbers and signs of a text from `normalise_spelling`.

    Args:
        every: signs that often decorate count too: pictures, and "!" at the end of a sentence.
    """
    found: list[Token] = []
    for match in _TOKEN.finditer(text):
        before = found[-1].text if found else ""
        if match.lastgroup == "number":
            found.append(Token(_number(match[0]), named=True))
            if before in _MONEY:  # $5 is 5 dollars
                found[-2:] = found[:-3:-1]
        elif match.lastgroup == "word":
            token = _word(match[0], text[match.end() : match.end() + 2], before == "°")
            if before == "°" and token.text in _SCALES.values():
                found.pop()
            found.append(token)
        elif match[0] == "&":
            found.append(Token("and"))
        elif _counts(match, text, every):
            sign = _SIGN.get(match[0], match[0])
            found.append(Token(sign, sign=sign not in _UNITS))
    return found


def has_decoration(text: str) -> bool:
    """True if a reference answer has signs that `tokens` takes for decoration."""
    return "!" in text or len(tokens(text, every=True)) > len(tokens(text))


def brackets(text: str) -> str:
    """The brackets around a list of numbers or letters, "[)" for [1, 2). "" without such a list."""
    for opening, inside, closing in _LISTED.findall(text):
        parts = re.split("[,;]", inside)
        if len(parts) > 1 and all(map(_MEMBER.fullmatch, parts)):
            return str(opening + closing)
    return ""


def _number(written: str) -> str:
    number = written.removeprefix("+").casefold()
    if _GROUPED.fullmatch(number.removeprefix("-")):
        number = number.replace(",", "")
    return re.sub(r"^(-?)\.", r"\g<1>0.", number)


def _word(written: str, after: str, of_degrees: bool) -> Token:
    word = written.casefold().replace("♯", "#")
    if of_degrees:
        word = _SCALES.get(word, word)
    elif word in ("a", "i") and not (after[:1].isspace() and after[1:].isalpha()):
        word = word.upper()
    unit = _UNIT.get(word)
    return Token(unit) if unit else Token(word, named=written.lstrip(".@#-")[:1].isupper())


def _counts(match: re.Match[str], text: str, every: bool) -> bool:
    """True if a sign is part of an answer, and not punctuation or decoration."""
    sign, end = match[0], match.end()
    before = text[max(0, match.start() - _CONTEXT) : match.start()]
    after = text[end : end + _CONTEXT]
    if not sign.isascii():
        category = unicodedata.category(sign)
        counts = category in ("Sm", "Sc") or sign in "°♭‰" or "\u2190" <= sign <= "\u21ff"
        return counts or (every and category == "So")
    if sign == "!":  # a factorial, or "not"
        if after[:1].isalnum():
            return not before[-1:].isalnum()
        ends = not after.strip() and " " in text[: match.start()].strip()
        return re.search(r"(?:\d|\)|\b[a-z])$", before) is not None and (every or not ends)
    if sign in "'\"":  # minutes, feet
        return before[-1:].isdigit() and not after[:1].isalnum()
    if sign == "-" and after[:1] in ("∞", "√", "("):
        return not before[-1:].isalnum()
    if sign in "-*/~|@":
        if sign in "~|@" and not after[:1].isdigit() and (before[-1:] + after[:1]).strip():
            return True
        return bool(_RIGHT.match(after) and _LEFT.search(before))
    return True


def _superscript(match: re.Match[str]) -> str:
    plain = unicodedata.normalize("NFKC", match[0]).replace("−", "-")
    return plain if plain[-1] in "+-" else f"^{plain}"


def _without_joined(match: re.Match[str]) -> str:
    """Numbers of a list without spaces, such as 8.1,12.8, with spaces between them."""
    digits = match[0].rstrip(",.")
    if "," not in digits or _GROUPED.fullmatch(digits):
        return match[0]
    return re.sub(r",(?=\d)", ", ", match[0])


def _fold_accents(text: str) -> str:
    """The text without accents and points, in the scripts that may leave them out."""
    kept: list[str] = []
    base = " "
    for character in unicodedata.normalize("NFD", text):
        if not unicodedata.combining(character):
            base = character
        elif unicodedata.name(base, "").startswith(_FOLDED):
            continue
        kept.append(character)
    return unicodedata.normalize("NFC", "".join(kept))
