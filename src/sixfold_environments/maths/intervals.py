r"""Sets of real numbers as answers spell them.

These are intervals, inequalities, unions and set-builder notation: `x > 3`, `(3, \infty)`, `x \in
(3, \infty)` and `\{x \mid x > 3\}` are the same region. Endpoints stay text; the caller of
`same_region` decides when endpoints are equal.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from .numbers import exact_number

_RELATIONS = {
    "<": "<",
    ">": ">",
    "\\le": "<=",
    "\\ge": ">=",
    "\\lt": "<",
    "\\gt": ">",
    "<=": "<=",
    ">=": ">=",
}
_RELATION = re.compile(r"(<=|>=|<|>|\\(?:le|ge|lt|gt)(?![A-Za-z]))")
_HINT = re.compile(r"[<>]|\\(?:le|ge|lt|gt|in|neq?|mid|mathbb|cup)(?![A-Za-z])|all real")
_OR = re.compile(
    r"\\cup(?![A-Za-z])|\\lor(?![A-Za-z])|\\text\s*\{\s*or\s*\}|(?<![A-Za-z\\])or(?![A-Za-z])"
)
_AND = re.compile(r"\\land(?![A-Za-z])|\\text\s*\{\s*and\s*\}|(?<![A-Za-z\\])and(?![A-Za-z])")
_BUILDER = re.compile(
    r"\\\{\s*(?P<name>\\?[A-Za-z]+)\s*(?:\\in\s*\\mathbb\s*\{?R\}?\s*)?(?:\\mid|\\vert|\||:)\s*(?P<condition>.+)\\\}"
)
_MEMBER = re.compile(r"(?P<name>\\?[A-Za-z]+)\s*\\in(?![A-Za-z])\s*(?P<set>.+)")
_ALL_REALS = re.compile(r"\\mathbb\s*\{?\s*R\s*\}?|\\?(?:text\s*\{\s*)?all real numbers(?:\s*\})?")
_ALL_BUT = re.compile(
    r"\\mathbb\s*\{?\s*R\s*\}?\s*(?:\\setminus|\\backslash|-)\s*\\\{(?P<point>[^{},]*(?:\{[^{}]*\}[^{},]*)*)\\\}"
)
_UNEQUAL = re.compile(r"(?P<name>[A-Za-z])\s*\\neq?(?![A-Za-z])\s*(?P<point>.+)")
_ABSOLUTE = re.compile(r"\|\s*(?P<name>[A-Za-z])\s*\|")
_INFINITY = re.compile(r"\+?\s*\\infty")
_MINUS_INFINITY = re.compile(r"-\s*\\infty")
_NAME = re.compile(r"[A-Za-z](?:_\w)?|\\(?:alpha|beta|gamma|theta|lambda|mu|phi|omega)")
_MAX_PIECES = 12


class Piece(NamedTuple):
    """One interval. An endpoint is "-inf", "inf" or text. An infinite end is open."""

    low: str
    high: str
    low_open: bool
    high_open: bool


class Region(NamedTuple):
    """A set of reals.

    Attributes:
        pieces: intervals in the order in which they are written.
        name: the variable, or "" if none is named.
        relation: False for a bare interval.
    """

    pieces: list[Piece]
    name: str
    relation: bool


def region(text: str) -> Region | None:
    """The region that a normalised answer describes, or None."""
    text, name, relation = text.strip(), "", False
    if match := _BUILDER.fullmatch(text):
        text, name, relation = match["condition"].strip(), match["name"], True
    elif match := _MEMBER.fullmatch(text):
        text, name, relation = match["set"].strip(), match["name"], True
    if len(parts := _OR.split(text)) > _MAX_PIECES:
        return None
    pieces: list[Piece] = []
    for part in parts:
        found = _alternative(part.strip())
        if found is None or (name and found.name and found.name != name):
            return None
        pieces += found.pieces
        name, relation = (
            name or found.name,
            relation or found.relation or (len(parts) > 1 and "\\cup" not in text),
        )
    return Region(pieces, name, relation)


def same_region(answer: str, gold: str, equal: Callable[[str, str], bool]) -> bool | None:
    """True if both describe the same set of reals.

    None unless both are regions and at least one of them is more than a bare interval. Unions of
    another number of bare intervals also give None: they may overlap.

    Args:
        gold: normalised reference answer.
        equal: tells whether two endpoints are equal.
    """
    if not (_HINT.search(answer) or _HINT.search(gold)):
        return None
    left, right = region(answer), region(gold)
    if left is None or right is None:
        return None
    bare = not (left.relation or right.relation)
    if bare and (len(left.pieces) == 1 or len(left.pieces) != len(right.pieces)):
        return None
    if (left.name and right.name and left.name != right.name) or len(left.pieces) != len(
        right.pieces
    ):
        return False
    missing = list(right.pieces)
    for piece in left.pieces:
        match = next((other for other in missing if _same_piece(piece, other, equal)), None)
        if match is None:
            return None if bare else False
        missing.remove(match)
    return True


def _same_piece(left: Piece, right: Piece, equal: Callable[[str, str], bool]) -> bool:
    def same_end(a: str, b: str) -> bool:
        return a == b or ({"inf", "-inf"}.isdisjoint((a, b)) and equal(a, b))

    same_openness = (left.low_open, left.high_open) == (right.low_open, right.high_open)
    return same_openness and same_end(left.low, right.low) and same_end(left.high, right.high)


def _alternative(text: str) -> Region | None:
    """One alternative of an "or": conditions joined by "and", or a single piece."""
    conditions = _AND.split(text)
    if len(conditions) == 1:
        return _single(text)
    found = [_single(condition.strip()) for condition in conditions]
    if (
        len(found) != 2
        or found[0] is None
        or found[1] is None
        or found[0].name != found[1].name
        or not found[0].name
    ):
        return None
    ends = found[0].pieces + found[1].pieces
    lows = [piece for piece in ends if piece.low != "-inf" and piece.high == "inf"]
    highs = [piece for piece in ends if piece.high != "inf" and piece.low == "-inf"]
    if len(ends) != 2 or len(lows) != 1 or len(highs) != 1:
        return None
    return _make_region(
        Piece(lows[0].low, highs[0].high, lows[0].low_open, highs[0].high_open), found[0].name, True
    )


def _single(text: str) -> Region | None:
    if _ALL_REALS.fullmatch(text):
        return Region([Piece("-inf", "inf", True, True)], "", True)
    if match := _ALL_BUT.fullmatch(text):
        return _all_but(match["point"], "")
    if match := _UNEQUAL.fullmatch(text):
        return _all_but(match["point"], match["name"])
    return (
        _interval(text) if text[:1] in ("(", "[") and text[-1:] in (")", "]") else _inequality(text)
    )


def _all_but(point: str, name: str) -> Region | None:
    point = point.strip()
    if not _is_endpoint(point, name):
        return None
    return Region([Piece("-inf", point, True, True), Piece(point, "inf", True, True)], name, True)


def _interval(text: str) -> Region | None:
    depth, commas = 0, []
    for position, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if depth == 0 and position < len(text) - 1:
            return None  # the outer brackets are not a pair
        if character == "," and depth == 1:
            commas.append(position)
    if len(commas) != 1:
        return None
    low, high = _end(text[1 : commas[0]]), _end(text[commas[0] + 1 : -1])
    if low in ("", "inf") or high in ("", "-inf"):
        return None
    return _make_region(
        Piece(low, high, text[0] == "(" or low == "-inf", text[-1] == ")" or high == "inf"),
        "",
        False,
    )


def _inequality(text: str) -> Region | None:
    r"""`x < a`, `a < x`, `a < x \le b`, `|x| < a`: one variable that stands alone."""
    parts = [part.strip() for part in _RELATION.split(text)]
    signs = [_RELATIONS[sign] for sign in parts[1::2]]
    terms = parts[0::2]
    if len(terms) == 2:
        names = [number for number, term in enumerate(terms) if _NAME.fullmatch(term)]
        if len(names) == 1:
            sign = signs[0] if names == [0] else signs[0].translate(str.maketrans("<>", "><"))
            return _half_line(terms[names[0]], sign, _end(terms[1 - names[0]]))
        if match := _ABSOLUTE.fullmatch(terms[0]):
            return _absolute(match["name"], signs[0], terms[1])
    if (
        len(terms) == 3
        and _NAME.fullmatch(terms[1])
        and {sign[0] for sign in signs} in ({"<"}, {">"})
    ):
        if signs[0][0] == ">":
            terms, signs = terms[::-1], signs[::-1]
        low, high = _end(terms[0]), _end(terms[2])
        if (
            not low
            or not high
            or not (_is_endpoint(low, terms[1]) and _is_endpoint(high, terms[1]))
        ):
            return None
        return _make_region(
            Piece(
                low,
                high,
                "=" not in signs[0] or low == "-inf",
                "=" not in signs[1] or high == "inf",
            ),
            terms[1],
            True,
        )
    return None


def _half_line(name: str, sign: str, end: str) -> Region | None:
    if not end or not _is_endpoint(end, name) or end in ("inf", "-inf"):
        return None
    is_open = "=" not in sign
    piece = (
        Piece("-inf", end, True, is_open) if sign[0] == "<" else Piece(end, "inf", is_open, True)
    )
    return Region([piece], name, True)


def _absolute(name: str, sign: str, bound: str) -> Region | None:
    value = exact_number(bound)
    if value is None or value <= 0:
        return None
    is_open = "=" not in sign
    if sign[0] == "<":
        return Region([Piece(f"-{bound}", bound, is_open, is_open)], name, True)
    return Region(
        [Piece("-inf", f"-{bound}", True, is_open), Piece(bound, "inf", is_open, True)], name, True
    )


def _make_region(piece: Piece, name: str, relation: bool) -> Region | None:
    """The region of one piece, or None if its ends are in the wrong order."""
    low, high = exact_number(piece.low), exact_number(piece.high)
    if (
        low is not None
        and high is not None
        and (low > high or (low == high and (piece.low_open or piece.high_open)))
    ):
        return None
    return Region([piece], name, relation)


def _end(text: str) -> str:
    text = text.strip()
    if _INFINITY.fullmatch(text):
        return "inf"
    return "-inf" if _MINUS_INFINITY.fullmatch(text) else text


def _is_endpoint(text: str, name: str) -> bool:
    """True if `text` can be a number.

    It must have no relation, no comma, and no other variable standing alone, and must not contain
    the variable itself.
    """
    if text in ("inf", "-inf"):
        return True
    letters = re.sub(r"\\[A-Za-z]+", "", text)
    return (
        bool(text)
        and not re.search(r"[,<>=]", text)
        and not (name and name in letters)
        and not re.search(r"\\(?:le|ge|in|cup)(?![A-Za-z])", text)
    )
