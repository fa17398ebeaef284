"""Parse tool calls in the format of Hermes and Qwen models.

A call is written as <tool_call>{"name": ..., "arguments": {...}}</tool_call> in the text.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from .text_stream import StopStrings

OPEN, CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True)
class ToolCall:
    """One call: the function's name, and its arguments as the text of a JSON object."""

    name: str
    arguments: str


class ToolCallParser:
    """Splits a growing completion into text and calls.

    A malformed call stays text. Nothing of the completion is lost except white space around calls.
    """

    def __init__(self) -> None:
        self._mark = StopStrings([OPEN])
        self._call: str | None = None
        self._space = ""
        self._called = False

    def push(self, text: str) -> list[str | ToolCall]:
        """Add text. Returns the texts and calls that are now complete, in order."""
        found: list[str | ToolCall] = []
        while text:
            if self._call is None:
                text = self._before_a_call(text, found)
                continue
            inner, closed, text = (self._call + text).partition(CLOSE)
            if not closed:
                self._call = inner
                break
            self._call = None
            self._add(found, read_call(inner) or OPEN + inner + CLOSE)
        return found

    def finish(self) -> list[str | ToolCall]:
        """The rest as text. A call without a closing mark becomes text too."""
        rest = self._mark.finish() if self._call is None else OPEN + self._call
        if rest or not self._called:
            rest = self._space + rest
        return [rest] if rest else []

    def _before_a_call(self, text: str, found: list[str | ToolCall]) -> str:
        """Append plain text to `found`. Returns the text after an opening mark, or ""."""
        held = self._mark.finish()
        plain, opened = self._mark.push(text)
        self._add(found, plain)
        if not opened:
            return ""
        self._call = ""
        return (held + text)[len(plain) + len(OPEN) :]

    def _add(self, found: list[str | ToolCall], piece: str | ToolCall) -> None:
        """Append a piece to `found`.

        White space is held back until text follows. White space before or after a call is dropped.
        """
        if isinstance(piece, ToolCall):
            self._space, self._called = "", True
            found.append(piece)
            return
        piece = self._space + piece
        text = piece.rstrip()
        self._space = piece[len(text) :]
        if text:
            found.append(text)


def read_call(text: str) -> ToolCall | None:
    """Parse the text between two marks. Returns None if it is not JSON of the right form."""
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", {})
    return (
        ToolCall(call["name"], json.dumps(arguments, ensure_ascii=False))
        if isinstance(arguments, dict)
        else None
    )
