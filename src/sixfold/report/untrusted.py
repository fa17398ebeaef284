"""Text that a model, a dataset or an exception wrote: made visible and inert before a person's terminal or browser sees it."""

from __future__ import annotations

import html
import re

# Bidirectional overrides reorder the line they stand in, zero-width characters hide in it, and lone surrogates cannot be written as UTF-8.
_CONTROLS = "\x00-\x08\x0b-\x1f\x7f-\x9f"
_REORDERING_AND_HIDDEN = "\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff\U000e0000-\U000e007f"
_SURROGATES = "\ud800-\udfff"
_INVISIBLE = re.compile(f"[{_CONTROLS}{_REORDERING_AND_HIDDEN}{_SURROGATES}]")


def visible(text: str) -> str:
    """`text` with every control, reordering, zero-width and surrogate character spelled out; newlines and tabs stay.

    Escape sequences cannot reach the terminal through it: ESC becomes the picture ␛.
    """
    return _INVISIBLE.sub(_spell, text)


def one_line(text: str, limit: int = 120) -> str:
    """`visible` text on one line, cut to `limit` characters with an ellipsis."""
    line = visible(text).replace("\n", "⏎").replace("\t", "→")
    return line if len(line) <= limit else line[: limit - 1] + "…"


def escape(value: object) -> str:
    """`str(value)` as HTML text or attribute value: visible, and with <, >, &, " and ' as entities."""
    return html.escape(visible(str(value)), quote=True)


def _spell(match: re.Match[str]) -> str:
    code = ord(match.group())
    if code < 0x20:
        return chr(0x2400 + code)
    return "␡" if code == 0x7F else f"⟨U+{code:04X}⟩"
