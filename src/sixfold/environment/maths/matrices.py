"""Matrices, entry by entry: pmatrix and bmatrix are the same matrix, vmatrix is a determinant."""

from __future__ import annotations

import re
from collections.abc import Callable

_MATRIX = re.compile(
    r"[\[(]?\s*\\begin\s*\{(?P<kind>[pbB]?matrix|smallmatrix|array)\}\s*(?:\{[lcr| ]+\})?"
    r"(?P<body>.*)\\end\s*\{(?P=kind)\}\s*[\])]?"
)
_ROW = re.compile(r"\\\\(?:\[[^\]]*\])?")
MAX_ENTRIES = 100


def same_matrix(answer: str, gold: str, equal: Callable[[str, str], bool]) -> bool | None:
    """True if two matrices have the same shape and equal entries. None unless both are matrices.

    Args:
        answer: normalised answer.
        gold: normalised reference answer.
        equal: tells whether two entries are equal.
    """
    left, right = _rows(answer), _rows(gold)
    if left is None or right is None:
        return None
    if [len(row) for row in left] != [len(row) for row in right]:
        return False
    return all(
        equal(a, b)
        for mine, theirs in zip(left, right, strict=True)
        for a, b in zip(mine, theirs, strict=True)
    )


def _rows(text: str) -> list[list[str]] | None:
    match = _MATRIX.fullmatch(text)
    if match is None or "\\begin" in match["body"]:
        return None
    rows = _ROW.split(match["body"])
    if len(rows) > 1 and not rows[-1].strip():
        rows.pop()
    entries = [[entry.strip() for entry in row.split("&")] for row in rows]
    return entries if sum(map(len, entries)) <= MAX_ENTRIES else None
