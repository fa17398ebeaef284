"""Normalise an answer to comparable text, and parse it as an exact number with a unit.

No CAS and no floats are used. Invariant: whitespace between digits is never dropped: "1 2" is not
12. Only thousands separators are removed, where groups have three digits.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from fractions import Fraction

_SUPERSCRIPT = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ", "0123456789-+n", strict=True))
_SUBSCRIPT = dict(zip("₀₁₂₃₄₅₆₇₈₉", "0123456789", strict=True))
_SYMBOLS = str.maketrans(
    {
        "−": "-",
        "–": "-",
        "×": r"\times ",
        "·": r"\cdot ",
        "⋅": r"\cdot ",
        "÷": "/",
        "π": r"\pi ",
        "∞": r"\infty ",
        "∪": r"\cup ",
        "∩": r"\cap ",
    }
    | {
        "≤": r"\le ",
        "≥": r"\ge ",
        "≠": r"\ne ",
        "±": r"\pm ",
        "°": r"^\circ",
        "∅": r"\emptyset ",
        "∈": r"\in ",
        "\u2009": r"\,",
        "\u202f": r"\,",
    }
)
_SUPERSCRIPTS = re.compile(f"[{''.join(_SUPERSCRIPT)}]+")
_SUBSCRIPTS = re.compile(f"[{''.join(_SUBSCRIPT)}]+")
_RADICAL = re.compile(r"√\s*(\d+|[A-Za-z]|\([^()]*\))")

# The order matters: remove thousands separators before the spacing commands that look like them
# become spaces. A backslash after another backslash belongs to a row break of a matrix, not to a
# spacing command.
_REWRITES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"(?<=\d)(?:\\[,!]|\{,\})(?=\d{3}(?!\d))", ""),
        (r"\\(?:left|right|bigl|bigr|Bigl|Bigr|big|Big|displaystyle|limits)(?![A-Za-z])", ""),
        (r"(?<!\\)\\!", ""),
        (r"(?<!\\)\\[,;: \n]|~|\\q?quad(?![A-Za-z])", " "),
        (r"(?<!\\)\\[()\[\]]", ""),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (
            r"\\(?:mathrm|mathbf|mathit|textbf|textit|textrm|textnormal|mbox|operatorname)(?=\s*\{)",
            r"\\text",
        ),
        (r"^\s*\\text\s*\{([^{}]*\d[^{}]*)\}\s*$", r"\1"),
        (r"\\varnothing", r"\\emptyset"),
        (r"\\%", "%"),
        (r"\\(?:leq|leqslant)(?![A-Za-z])", r"\\le"),
        (r"\\(?:geq|geqslant)(?![A-Za-z])", r"\\ge"),
        (r"_\{(\w)\}", r"_\1"),
        (r"\s+", " "),
    )
]

_SIGN = r"[+-]?"
_DECIMAL = r"(?:\d{1,3}(?:,\d{3})+(?:\.\d*)?|\d+\.?\d*|\.\d+)"
_PLAIN = re.compile(rf"{_SIGN}{_DECIMAL}")
_SCIENTIFIC = re.compile(
    rf"({_SIGN}{_DECIMAL})(?:[eE]([+-]?\d{{1,3}})|\s*(?:\\times|\\cdot|\*|x)\s*10\^(?:\{{([+-]?\d{{1,3}})\}}|(\d)))"
)
_POWER = re.compile(r"([+-]?)(\d{1,6})\^(?:\{([+-]?\d{1,3})\}|(\d))")
_RATIO = re.compile(
    rf"({_SIGN})\\frac\s*(?:\{{\s*({_SIGN}\s*{_DECIMAL})\s*\}}|(\d))\s*(?:\{{\s*({_SIGN}\s*{_DECIMAL})\s*\}}|(\d))"
)
_SLASH = re.compile(rf"({_SIGN}{_DECIMAL})\s*/\s*({_SIGN}{_DECIMAL})")
_MIXED = re.compile(rf"({_SIGN})(\d+)(?:\s*\\frac\s*\{{(\d+)\}}\s*\{{(\d+)\}}|\s+(\d+)/(\d+))")

_TEXT_UNIT = re.compile(
    r"^(?P<body>.+?)\s*\\text\s*\{(?P<unit>[^{}]*)\}\s*(?P<power>(?:\^\s*\{?\s*[23]\s*\}?)?)$"
)
_WORD_UNIT = re.compile(
    r"^(?P<body>[^A-Za-z]*\d[^A-Za-z]*?)(?P<gap>\s*)(?P<unit>[A-Za-z]{2,}(?:"
    r" [A-Za-z]{2,}){0,2})(?P<power>(?:\^\{?[23]\}?)?)$"
)
_DEGREES = re.compile(
    r"^(?P<body>(?!.*\\(?:a?(?:rc)?(?:sin|cos|tan)|sec|csc|cot|log|ln|exp)).+?)\s*\^\s*(?:\\circ|\{\s*\\circ\s*\})$"
)
_MONEY_SYMBOLS = r"\\?\$|US\s?\\?\$|€|£|¥|₹|¢|\\(?:euro|pounds|yen|textdollar|texteuro)\b"
_MONEY_NAMES = r"USD|EUR|GBP|JPY|CNY|INR|Rs\.?"
_MONEY = (
    rf"{_MONEY_SYMBOLS}|{_MONEY_NAMES}|\\text\s*\{{\s*(?:{_MONEY_SYMBOLS}|{_MONEY_NAMES})\s*\}}"
)
_CURRENCY = re.compile(rf"^(?P<sign>-?)\s*(?P<unit>{_MONEY})\s*(?P<body>-?[\d.].*)$")
_CURRENCY_AFTER = re.compile(
    r"^(?P<body>-?[\d.,]*\d)\s*(?P<unit>\\?\$|€|\\euro\b|£|\\pounds\b|¥|₹|¢)$"
)
_CURRENCY_NAMES = {
    "us": "$", "usd": "$", "textdollar": "$", "euro": "€", "eur": "€", "texteuro": "€",
    "pounds": "£", "gbp": "£", "yen": "¥", "jpy": "¥",
    "cny": "yuan", "inr": "₹", "rs": "₹", "": "$",
}  # fmt: skip
_ORDINAL = re.compile(
    r"^(?:the\s+)?(?P<body>\d+)\s*(?:\^\s*)?(?:\\text\s*)?\{?\s*(?:\\text\s*\{)?\s*(?P<suffix>st|nd|rd|th)\s*\}{0,2}(?P<noun>(?:\s+[A-Za-z]{2,}){0,2})$"
)
_TEXT_ONLY = re.compile(r"\\text\s*\{([^{}]*)\}")
_ORDINAL_NAMES = """
    zeroth first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth
    thirteenth fourteenth fifteenth sixteenth seventeenth eighteenth nineteenth twentieth
"""
_ORDINAL_WORDS = _ORDINAL_NAMES.split()

_WORDS_NO_UNIT = """
    or and not no maybe possibly either about approximately approx wrong incorrect false plus minus
    times over hundred thousand million billion trillion dozen percent pi sin cos tan cot sec csc
    log ln exp sqrt inf infinity infty mod divided by
"""
_NOT_UNITS = frozenset(_WORDS_NO_UNIT.split())
_SHORT_UNIT_NAMES = """
    mm cm dm km mg kg ml mph kph hz ft yd mi lb lbs oz hr hrs min sec ms kj kw mol rad deg psi
"""
_SHORT_UNITS = frozenset(_SHORT_UNIT_NAMES.split())
_SAME_UNIT = {
    **dict.fromkeys(["dollar", "usd", "buck"], "$"),
    **dict.fromkeys(["centimeter", "centimetre"], "cm"),
    **dict.fromkeys(["meter", "metre"], "m"),
    **dict.fromkeys(["kilometer", "kilometre"], "km"),
    **dict.fromkeys(["millimeter", "millimetre"], "mm"),
    **dict.fromkeys(["hr", "hour"], "h"),
    **dict.fromkeys(["minute"], "min"),
    **dict.fromkeys(["second", "sec"], "s"),
    **dict.fromkeys(["gram"], "g"),
    **dict.fromkeys(["kilogram"], "kg"),
    **dict.fromkeys(["liter", "litre"], "l"),
    **dict.fromkeys(["foot", "feet"], "ft"),
    **dict.fromkeys(["deg", "degree"], "°"),
    **dict.fromkeys(["rad", "radian"], "rad"),
    **dict.fromkeys(["euro", "eur"], "€"),
    **dict.fromkeys(["pound sterling", "gbp"], "£"),
    **dict.fromkeys(["yen", "jpy"], "¥"),
    **dict.fromkeys(["rupee", "inr"], "₹"),
    **dict.fromkeys(["cent"], "¢"),
    **dict.fromkeys(["rmb", "cny"], "yuan"),
}
_SYNONYMS = {frozenset(pair) for pair in (("pound", "£"), ("pound", "lb"), ("yuan", "¥"))}


@dataclass(frozen=True)
class Quantity:
    """A number or expression with a unit.

    Attributes:
        body: the expression without its unit.
        value: exact value of the body. None if it is not a plain number.
        unit: canonical unit, "" for none.
    """

    body: str
    value: Fraction | None
    unit: str


def normalise(text: str) -> str:
    """Give one spelling to text that is typeset alike.

    This covers LaTeX spacing, delimiters, and Unicode digits and signs. The result is still LaTeX,
    and spaces are kept.
    """
    text = text if text.isascii() else _ascii_maths(text)
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    text = text.strip().strip("*").strip()
    if text.startswith("$") and text.endswith("$") and len(text) > 1:
        text = text.strip("$").strip()
    return text.rstrip(".,;: ").lstrip()


def quantity(text: str) -> Quantity:
    """Split a normalised answer into number and unit.

    "%" and powers of units such as "^2" belong to the unit. Hedging words ("7 or 8") are not units.
    """
    if text.endswith("%"):
        body = text[:-1].rstrip()
        return Quantity(body, exact_number(body), "%")
    currency = _CURRENCY.match(text)
    if currency:
        body = currency["sign"] + currency["body"]
        return Quantity(body, exact_number(body), _currency(currency["unit"]))
    if currency := _CURRENCY_AFTER.match(text):
        return Quantity(
            currency["body"], exact_number(currency["body"]), _currency(currency["unit"])
        )
    number = ordinal(text)
    if number is not None:
        return Quantity(str(number), Fraction(number), "ordinal")
    for pattern in (_TEXT_UNIT, _WORD_UNIT, _DEGREES):
        match = pattern.match(text)
        if match is None:
            continue
        parts = match.groupdict()
        unit = _unit(parts.get("unit", "deg"), parts.get("gap", " "), plain=pattern is _WORD_UNIT)
        if unit is not None and re.search(r"\d|\\pi", parts["body"]):
            return Quantity(
                parts["body"],
                exact_number(parts["body"]),
                unit + re.sub(r"[^23]", "", parts.get("power", "")),
            )
    return Quantity(text, exact_number(text), "")


def same_unit(left: str, right: str) -> bool:
    """True if two canonical units can be the same. "pound" is both a currency and a mass."""
    return left == right or frozenset((left, right)) in _SYNONYMS


def ordinal(text: str, words: bool = False) -> int | None:
    r"""The number of `3rd`, `3^{\text{rd}}` or `the 21st place`, or None.

    A wrong suffix gives None. With `words`, `third` counts too.
    """
    match = _ORDINAL.match(text)
    if match:
        number = int(match["body"])
        suffix = (
            "th" if number // 10 % 10 == 1 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
        )
        return number if match["suffix"] == suffix else None
    word = re.sub(r"^the\s+", "", _TEXT_ONLY.sub(r"\1", text).strip().casefold())
    return _ORDINAL_WORDS.index(word) if words and word in _ORDINAL_WORDS else None


def _currency(symbol: str) -> str:
    """The canonical symbol of a currency."""
    name = re.sub(r"\\text\b|[\\{}$.\s]", "", symbol).casefold()
    return _CURRENCY_NAMES.get(name, name)


def exact_number(text: str) -> Fraction | None:
    r"""The value of a literal, or None if the text is not one (also for n/0).

    Literals are 12, -0.5, 1,000, 3/4, \frac{3}{4}, 1\frac{1}{2}, 1.5e3, 1.5\times 10^3 and
    10^{-9}.
    """
    text = text.strip()
    if text.startswith("{") and text.endswith("}"):
        text = text[1:-1].strip()
    if re.match(r"[+-]\s+[\d.\\]", text):
        text = text[0] + text[1:].lstrip()
    if _PLAIN.fullmatch(text):
        return _fraction(text)
    if m := _SCIENTIFIC.fullmatch(text):
        return _fraction(m[1]) * Fraction(10) ** int(m[2] or m[3] or m[4])
    if m := _POWER.fullmatch(text):
        base, exponent = int(m[2]), int(m[3] or m[4])
        return (
            None
            if base == 0 and exponent <= 0
            else Fraction(f"{m[1]}1") * Fraction(base) ** exponent
        )
    if m := _RATIO.fullmatch(text):
        return _ratio(Fraction(f"{m[1]}1"), m[2] or m[3], m[4] or m[5])
    if m := _SLASH.fullmatch(text):
        return _ratio(Fraction(1), m[1], m[2])
    if m := _MIXED.fullmatch(text):
        part = _ratio(Fraction(1), m[3] or m[5], m[4] or m[6])
        return None if part is None else Fraction(f"{m[1]}1") * (int(m[2]) + part)
    return None


def _ratio(sign: Fraction, numerator: str, denominator: str) -> Fraction | None:
    bottom = _fraction(denominator)
    return sign * _fraction(numerator) / bottom if bottom else None


def _fraction(literal: str) -> Fraction:
    literal = literal.replace(",", "").replace(" ", "")
    return Fraction(literal + "0" if literal.endswith(".") else literal)


def _unit(words: str, gap: str, plain: bool) -> str | None:
    """Canonical name of a unit, or None if `words` are not a unit.

    For example, "5 xy" is a product and "5 million" a number.
    """
    names = words.lower().split()
    if (
        not names
        or len(names) > 3
        or _NOT_UNITS.intersection(names)
        or not all(re.fullmatch(r"[a-z/.°]+", name) for name in names)
    ):
        return None
    if plain and names[0] not in _SHORT_UNITS and (not gap or len(names[0]) < 3):
        return None
    singular = [name[:-1] if len(name) > 2 and name.endswith("s") else name for name in names]
    return " ".join(_SAME_UNIT.get(name, name) for name in singular)


def _ascii_maths(text: str) -> str:
    """Unicode mathematics as LaTeX.

    This runs before NFKC, which would turn 5² into 52 and 3½ into 31/2.
    """
    text = _SUPERSCRIPTS.sub(lambda m: "^{" + "".join(_SUPERSCRIPT[c] for c in m[0]) + "}", text)
    text = _SUBSCRIPTS.sub(lambda m: "_{" + "".join(_SUBSCRIPT[c] for c in m[0]) + "}", text)
    text = _RADICAL.sub(lambda m: r"\sqrt{" + m[1].strip("()") + "}", text).translate(_SYMBOLS)
    return "".join(_ascii_character(c) for c in text)


def _ascii_character(character: str) -> str:
    if character.isascii():
        return character
    category = unicodedata.category(character)
    if category == "Cf":  # zero-width space and similar characters
        return ""
    if category == "Nd":
        return str(unicodedata.decimal(character))
    folded = unicodedata.normalize("NFKC", character)
    if "\N{FRACTION SLASH}" in folded:
        numerator, denominator = folded.split("\N{FRACTION SLASH}")
        return rf"\frac{{{numerator}}}{{{denominator}}}"
    return folded.replace("\N{MINUS SIGN}", "-")
