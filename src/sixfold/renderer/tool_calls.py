"""Tool calls in replies: the contract of call formats and their parsers.

A parser splits a growing completion into text and calls. The player parses whole replies with it,
and the server parses streams, so both find the same calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..types import ToolCall

Tools = Sequence[Mapping[str, Any]]
"""Descriptions of functions, as chat templates take them."""


class CallParser(Protocol):
    """Splits a growing completion into text and calls.

    Malformed calls and calls inside a thought stay text. Only the marks of calls and the white
    space around calls are dropped.

    Attributes:
        malformed: reason for each malformed call so far, in one line.
    """

    malformed: list[str]

    def push(self, text: str) -> list[str | ToolCall]:
        """Add text. Returns the texts and calls that have become complete, in order."""
        ...

    def finish(self) -> list[str | ToolCall]:
        """End the completion. Returns the texts and calls that were held back."""
        ...


class CallFormat(Protocol):
    """How a family of models writes calls."""

    @property
    def name(self) -> str:
        """Name of the family."""
        ...

    @property
    def needed(self) -> tuple[str, ...]:
        """Texts that occur in every chat template with this format."""
        ...

    @property
    def evidence(self) -> tuple[str, ...]:
        """Texts that speak for the format if a chat template has them."""
        ...

    def parser(self, tools: Tools = (), opened: str = "") -> CallParser:
        """Parser of one completion.

        Args:
            tools: the tools that may be called. Formats that write values without quotes read the
                types of arguments from their schemas.
            opened: think tag that the prompt leaves open, or "".
        """
        ...


class Unreadable(ValueError):
    """A block cannot be read as a call. The message says why, in one line."""


@dataclass(frozen=True)
class ReadReply:
    """A reply whose calls are separated from its text.

    Attributes:
        content: the text without the calls.
        calls: the calls, in order.
        malformed: reason for each malformed call.
    """

    content: str
    calls: tuple[ToolCall, ...]
    malformed: tuple[str, ...]


def read_reply(parser: CallParser, text: str) -> ReadReply:
    pieces = parser.push(text) + parser.finish()
    return ReadReply(
        "".join(piece for piece in pieces if isinstance(piece, str)),
        tuple(piece for piece in pieces if isinstance(piece, ToolCall)),
        tuple(parser.malformed),
    )


class Pieces:
    """Texts and calls of a completion, without the white space around calls.

    White space is held back until text follows.
    """

    def __init__(self) -> None:
        self._found: list[str | ToolCall] = []
        self._space = ""
        self._called = False

    def add(self, piece: str | ToolCall) -> None:
        if isinstance(piece, ToolCall):
            self._space, self._called = "", True
            self._found.append(piece)
            return
        piece = self._space + piece
        text = piece.rstrip()
        self._space = piece[len(text) :]
        if text:
            self._found.append(text)

    def take(self) -> list[str | ToolCall]:
        """The pieces since the last call."""
        found, self._found = self._found, []
        return found

    def flush(self) -> list[str | ToolCall]:
        """The last pieces, with the white space at the end of a completion without calls."""
        found = self.take()
        if self._space and not self._called:
            found.append(self._space)
        return found
