"""Tool calls in the form that Hermes and Qwen models write them: <tool_call>{"name": ..., "arguments": {...}}</tool_call> in the text."""

from __future__ import annotations

import json
from dataclasses import dataclass

from ..rollout.text_stream import StopStrings

OPEN, CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True)
class ToolCall:
    """name: of the function. arguments: JSON of an object, as text."""

    name: str
    arguments: str


class ToolCallParser:
    """Splits a completion into text and calls as it comes. What looks like a call and is not one stays text: nothing the model said is lost but the
    white space around calls."""

    def __init__(self) -> None:
        self._mark = StopStrings([OPEN])
        self._call: str | None = None
        self._space = ""
        self._called = False

    def push(self, text: str) -> list[str | ToolCall]:
        """Texts and calls that are complete with this piece of text, in order."""
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
        """What was held back, as text: a call without its end is none."""
        rest = self._mark.finish() if self._call is None else OPEN + self._call
        if rest or not self._called:
            rest = self._space + rest
        return [rest] if rest else []

    def _before_a_call(self, text: str, found: list[str | ToolCall]) -> str:
        """Put plain text into `found`; gives back what follows an opening mark."""
        held = self._mark.finish()
        plain, opened = self._mark.push(text)
        self._add(found, plain)
        if not opened:
            return ""
        self._call = ""
        return (held + text)[len(plain) + len(OPEN) :]

    def _add(self, found: list[str | ToolCall], piece: str | ToolCall) -> None:
        """White space waits for the text that follows it; before or after a call it is layout."""
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
    """The call between two marks, or None when it is not JSON of that form."""
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", {})
    return ToolCall(call["name"], json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None
