"""Read calls of Gemma models: `call:NAME{KEY:VALUE,KEY:VALUE}`.

A text value stands between two marks. Keys have no quotes. Objects and lists may be nested.
"""

from __future__ import annotations

import re
from typing import Any

from ..types import ToolCall
from .block_format import Read
from .json_calls import arguments_text, finite
from .tool_calls import Tools, Unreadable

MAX_DEPTH = 64

_CALL = re.compile(r"\s*call:\s*([\w.\-]+)\s*(?=\{)")
_NUMBER = re.compile(r"-?\d{1,400}(\.\d+)?([eE][+-]?\d{1,3})?")
_WORD = re.compile(r"true|false|null|True|False|None")
_KEY = re.compile(r"[^:,{}\[\]]+")
_SPACE = re.compile(r"\s*")
_WORDS = {"true": True, "false": False, "null": None}


def read_functions(quote: str) -> Read:
    """Reader of calls whose text values stand between two `quote` marks, see `Read`."""

    def read(text: str, tools: Tools) -> tuple[list[ToolCall], int]:
        head = _CALL.match(text)
        if not head:
            raise Unreadable("it does not begin with call:NAME{")
        values = _Values(text, head.end(), quote)
        arguments = values.read(0)
        return [ToolCall(head[1], arguments_text(head[1], arguments))], values.at

    return read


class _Values:
    """Reads the values of a text, starting at an index.

    Attributes:
        at: index of the next character.
    """

    def __init__(self, text: str, at: int, quote: str) -> None:
        self._text = text
        self.at = at
        self._quote = quote

    def read(self, depth: int) -> Any:
        """The value at the index.

        Raises:
            Unreadable: there is no value at the index.
        """
        if depth > MAX_DEPTH:
            raise Unreadable("it is nested too deeply")
        if self._skip("{"):
            return self._object(depth)
        if self._skip("["):
            return self._list(depth)
        if self._skip(self._quote):
            return self._string()
        if word := self._match(_WORD):
            return _WORDS.get(word[0], _WORDS.get(word[0].lower()))
        if number := self._match(_NUMBER):
            return finite(number[0]) if number[1] or number[2] else int(number[0])
        raise Unreadable(f"there is no value at its character {self.at}")

    def _object(self, depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        while not self._skip("}"):
            if found:
                self._expect(",")
            key = self._string() if self._skip(self._quote) else self._bare_key()
            if key in found:
                raise Unreadable(f"the key {key[:40]!r} is given twice")
            self._expect(":")
            found[key] = self.read(depth + 1)
        return found

    def _list(self, depth: int) -> list[Any]:
        found: list[Any] = []
        while not self._skip("]"):
            if found:
                self._expect(",")
            found.append(self.read(depth + 1))
        return found

    def _string(self) -> str:
        end = self._text.find(self._quote, self.at)
        if end < 0:
            raise Unreadable(f"a text is not closed by {self._quote}")
        found = self._text[self.at : end]
        self.at = end + len(self._quote)
        return found

    def _bare_key(self) -> str:
        key = self._match(_KEY)
        if not key:
            raise Unreadable(f"there is no key at its character {self.at}")
        return key[0].strip()

    def _match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        if found := pattern.match(self._text, self.at):
            self.at = found.end()
        return found

    def _skip(self, mark: str) -> bool:
        space = _SPACE.match(self._text, self.at)
        assert space is not None
        if self._text.startswith(mark, space.end()):
            self.at = space.end() + len(mark)
            return True
        return False

    def _expect(self, mark: str) -> None:
        if not self._skip(mark):
            raise Unreadable(f"there is no {mark!r} at its character {self.at}")
