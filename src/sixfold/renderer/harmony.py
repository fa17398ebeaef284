"""Read calls of gpt-oss: a reply is a sequence of messages, and a call is a message to a function.

A message is a header and a text, `HEADER<|message|>TEXT<|end|>`. The prompt ends inside the header
of the first message. The header of a call contains `to=functions.NAME`; its text is the arguments.
The end token `<|call|>` is not part of a reply's text, so a call may have no end mark.
"""

from __future__ import annotations

import re

from ..types import ToolCall
from .json_calls import arguments_text, decoded, inside_json
from .text_stream import overlap
from .tool_calls import Pieces, Tools, Unreadable

_START, _MESSAGE = "<|start|>", "<|message|>"
_MARKS = (_START, "<|end|>", "<|call|>", "<|return|>")
_END = re.compile("|".join(map(re.escape, _MARKS)))
_TO = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")


class Harmony:
    """Format of gpt-oss, see `CallFormat`."""

    name = "gpt-oss"
    needed = ("<|channel|>",)
    evidence = ("<|channel|>", _MESSAGE, *_MARKS)

    def parser(self, tools: Tools = (), opened: str = "") -> HarmonyParser:
        """Parser of one completion, see `CallFormat.parser`."""
        return HarmonyParser()


HARMONY = Harmony()


class HarmonyParser:
    """Parser of one reply, see `CallParser`. Other messages than calls stay text, with marks."""

    def __init__(self) -> None:
        self.malformed: list[str] = []
        self._pieces = Pieces()
        self._held = ""
        self._header: str | None = None  # header of the message that `_held` continues

    def push(self, text: str) -> list[str | ToolCall]:
        """Add text, see `CallParser.push`."""
        self._held += text
        while self._step(final=False):
            pass
        return self._pieces.take()

    def finish(self) -> list[str | ToolCall]:
        while self._step(final=True):
            pass
        if self._header is None:
            self._pieces.add(self._held)
        return self._pieces.flush()

    def _step(self, final: bool) -> bool:
        """Consume a part of the held text. Returns False if more text is needed."""
        if self._header is None:
            header, found, text = self._held.partition(_MESSAGE)
            if found:
                self._header, self._held = header, text
                if not _TO.search(header):
                    self._pieces.add(header + found)
            return bool(found)
        called = _TO.search(self._header)
        ends = [(found.start(), found[0]) for found in _END.finditer(self._held)]
        if called:  # a text value may spell a mark
            ends = [(at, mark) for at, mark in ends if not inside_json(self._held[:at])]
        if ends:
            at, mark = ends[0]
            # A message without an end ends where the next one starts.
            self._close(called, self._held[:at], "" if mark == _START else mark)
            self._held = self._held[at + (0 if mark == _START else len(mark)) :]
            return True
        if called:
            if final:
                self._close(called, self._held, "")
                self._held = ""
            return False
        keep = 0 if final else max(overlap(self._held, mark) for mark in _MARKS)
        self._pieces.add(self._held[: len(self._held) - keep])
        self._held = self._held[len(self._held) - keep :]
        return False

    def _close(self, called: re.Match[str] | None, text: str, end: str) -> None:
        """End the message."""
        header, self._header = self._header, None
        if called is None:
            self._pieces.add(text + end)
            return
        try:
            self._pieces.add(_call(called[1], text))
        except Unreadable as problem:
            self.malformed.append(str(problem))
            self._pieces.add(f"{header}{_MESSAGE}{text}{end}")


def _call(name: str, text: str) -> ToolCall:
    if not text.strip():
        return ToolCall(name, "{}")
    arguments, end = decoded(text, 0)
    if text[end:].strip():
        raise Unreadable("there is text after its arguments")
    return ToolCall(name, arguments_text(name, arguments))
