"""Make text from a model, a dataset or an exception safe to show on a terminal or in a browser."""

from __future__ import annotations

import html
import re

# Bidirectional overrides reorder their line, zero-width characters hide in it, and lone surrogates
# cannot be written as UTF-8.
_CONTROLS = "\x00-\x08\x0b-\x1f\x7f-\x9f"
_REORDERING_AND_HIDDEN = (
    "\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff\U000e0000-\U000e007f"
)
_SURROGATES = "\ud800-\udfff"
_INVISIBLE = re.compile(f"[{_CONTROLS}{_REORDERING_AND_HIDDEN}{_SURROGATES}]")


def visible(text: str) -> str:
    """`text` with control, reordering, zero-width and surrogate characters spelled out.

    Newlines and tabs stay. Escape sequences cannot reach the terminal: ESC becomes the picture ␛.
    """
    return _INVISIBLE.sub(_spell, text)


def one_line(text: str, limit: int = 120) -> str:
    """`visible` text on one line, cut to `limit` characters with an ellipsis."""
    line = visible(text).replace("\n", "⏎").replace("\t", "→")
    return line if len(line) <= limit else line[: limit - 1] + "…"


def escape(value: object) -> str:
    """`str(value)` as HTML text or attribute value.

    Invisible characters are spelled out (`visible`); <, >, &, " and ' become entities.
    """
    return html.escape(visible(str(value)), quote=True)


def _spell(match: re.Match[str]) -> str:
    code = ord(match.group())
    if code < 0x20:
        return chr(0x2400 + code)
    return "␡" if code == 0x7F else f"⟨U+{code:04X}⟩"
