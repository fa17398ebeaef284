"""Numbers and expressions with a unit, a currency, a percent sign or an ordinal suffix."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from .numbers import exact_number

_TEXT_UNIT = re.compile(
    r"^(?P<body>.+?)\s*\\text\s*\{(?P<unit>[^{}^]*)(?:\^(?P<inner>[23]))?\s*\}\s*"
    r"(?P<power>(?:\^\s*\{?\s*[23]\s*\}?)?)$"
)
_WORD_UNIT = re.compile(
    r"^(?P<body>[^A-Za-z]*\d[^A-Za-z]*?)(?P<gap>\s*)"
    r"(?P<unit>(?:[A-Za-z]{2,}|[mgshlLNJWVKAC](?=[ /^]|$))"
    r"(?:/[A-Za-z]{1,4}|(?: [A-Za-z]{2,}){0,3}))(?P<power>(?:\^\s*\{?\s*[23]\s*\}?)?)$"
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
    if else but than then when where while unless assuming given except until between to from with
    without probability likely perhaps probably might could would should may guess sure unsure
    around roughly nearly almost most least less more is was were be are any all both neither never
    none correct right ignore reference gold answer
    e i x
    or and not no maybe possibly either about approximately approx wrong incorrect false plus minus
    times over hundred thousand million billion trillion dozen percent pi sin cos tan cot sec csc
    log ln exp sqrt inf infinity infty mod divided by
"""
_NOT_UNITS = frozenset(_WORDS_NO_UNIT.split())
_SHORT_UNIT_NAMES = """
    mm cm dm km mg kg ml mph kph hz ft yd mi lb lbs oz hr hrs min sec ms kj kw mol rad deg psi
    m g s h l n j w v k a c
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
    **dict.fromkeys(["inch", "inche"], "in"),
    **dict.fromkeys(["mile"], "mi"),
    **dict.fromkeys(["yard"], "yd"),
    **dict.fromkeys(["ounce"], "oz"),
    **dict.fromkeys(["milliliter", "millilitre"], "ml"),
    **dict.fromkeys(["milligram"], "mg"),
    **dict.fromkeys(["deg", "degree"], "°"),
    **dict.fromkeys(["rad", "radian"], "rad"),
    **dict.fromkeys(["euro", "eur"], "€"),
    **dict.fromkeys(["pound sterling", "gbp"], "£"),
    **dict.fromkeys(["yen", "jpy"], "¥"),
    **dict.fromkeys(["rupee", "inr"], "₹"),
    **dict.fromkeys(["cent"], "¢"),
    **dict.fromkeys(["rmb", "cny"], "yuan"),
}
_SAME_COMPOUND = {"mi/h": "mph", "kph": "km/h", "kmh": "km/h"}
_PER = re.compile(r"\s+per\s+")
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
                unit + (parts.get("inner") or re.sub(r"[^23]", "", parts.get("power", ""))),
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
    name = re.sub(r"\\text\b|[\\{}$.\s]", "", symbol).casefold()
    return _CURRENCY_NAMES.get(name, name)


def _unit(words: str, gap: str, plain: bool) -> str | None:
    """Canonical name of a unit, or None if `words` are not a unit.

    For example, "5 xy" is a product and "5 million" a number.
    """
    words = re.sub(r"^\s*\(([a-z .]+)\)\s*$", r"\1", words.lower())
    names = _PER.sub("/", words).split()
    if (
        not names
        or len(names) > 3
        or _NOT_UNITS.intersection(name.rstrip(".") for name in names)
        or not all(re.fullmatch(r"[a-z/.°]+", name) for name in names)
    ):
        return None
    first = names[0].split("/")[0]
    known = first in _SHORT_UNITS and (gap or len(first) > 1)
    if plain and not known and (not gap or len(first) < 3):
        return None
    if names[0].rstrip(".") in ("square", "sq", "cubic", "cu") and names[1:]:
        power = "2" if names[0].startswith("s") else "3"
        return " ".join(map(_canonical, names[1:])) + power
    unit = " ".join("/".join(map(_canonical, name.split("/"))) for name in names)
    return _SAME_COMPOUND.get(unit, unit)


def _canonical(name: str) -> str:
    singular = name[:-1] if len(name) > 2 and name.endswith("s") else name
    return _SAME_UNIT.get(singular, singular)


_INCH = Fraction(254, 10000)
_SIZES = {
    "length": {
        "mm": Fraction(1, 1000), "cm": Fraction(1, 100), "dm": Fraction(1, 10), "m": Fraction(1),
        "km": Fraction(1000), "in": _INCH, "ft": 12 * _INCH, "yd": 36 * _INCH,
        "mi": 63360 * _INCH,
    },
    "mass": {"mg": Fraction(1, 1000), "g": Fraction(1), "kg": Fraction(1000)},
    "time": {
        "ms": Fraction(1, 1000), "s": Fraction(1), "min": Fraction(60), "h": Fraction(3600),
        "day": Fraction(86400), "week": Fraction(604800),
    },
    "volume": {"ml": Fraction(1, 1000), "l": Fraction(1)},
}  # fmt: skip
_COMPOUND = {"mph": "mi/h"}


def same_size(left: Quantity, right: Quantity) -> bool:
    """True if two quantities with exact values have units of one kind, and are equal."""
    a, b = _size(left.unit), _size(right.unit)
    if a is None or b is None or a[0] != b[0] or left.value is None or right.value is None:
        return False
    return left.value * a[1] == right.value * b[1]


def _size(unit: str) -> tuple[str, Fraction] | None:
    """Kind of a canonical unit, and its size in the basic unit of the kind. None if unknown."""
    above, per, below = _COMPOUND.get(unit, unit).partition("/")
    if per:
        top, bottom = _size(above), _size(below)
        return (f"{top[0]}/{bottom[0]}", top[1] / bottom[1]) if top and bottom else None
    power = int(above[-1]) if above[-1:] in ("2", "3") else 1
    name = above.rstrip("23")
    for kind, sizes in _SIZES.items():
        if name in sizes:
            return f"{kind}{power}", sizes[name] ** power
    return None
