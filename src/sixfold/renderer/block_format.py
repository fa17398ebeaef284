"""Call formats with a mark before each block of calls and, in most model families, one after it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from ..types import ToolCall
from .json_calls import after_json, inside_json
from .text_stream import overlap
from .think import TAGS, closing_tag
from .tool_calls import Pieces, Tools, Unreadable

Read = Callable[[str, Tools], tuple[list[ToolCall], int]]
"""Reader of the calls at the start of a text.

Args:
    text: the text.
    tools: the tools that may be called.

Returns:
    The calls, and the index after the last one.

Raises:
    Unreadable: the text does not begin with a call.
"""

_MAY_BE_JSON = re.compile(r"\s*(?:[\[{]|\Z)")
_MEANT_AS_CALL = re.compile(r'\{\s*"(?:name|function|parameters|arguments)"')


def _never(block: str) -> bool:
    return False


@dataclass(frozen=True)
class BlockFormat:
    """A format whose calls are in marked blocks.

    Attributes:
        name: name of the family.
        mark: text before a block.
        close: text after a block. "": a block ends with its last call.
        read: reads the calls of a block.
        goes_on: called with the text of a block before a closing mark. Returns True if the mark is
            part of a value, so that the block continues.
        wrappers: marks around all blocks of a reply. They are dropped.
        elements: texts inside a block that formats with the same marks do not have.
        bare: True if a reply that begins with a JSON object is a block without a mark.
    """

    name: str
    mark: str
    close: str
    read: Read
    goes_on: Callable[[str], bool] = _never
    wrappers: tuple[str, ...] = ()
    elements: tuple[str, ...] = ()
    bare: bool = False

    @property
    def needed(self) -> tuple[str, ...]:
        return (self.mark, *self.elements)

    @property
    def evidence(self) -> tuple[str, ...]:
        return (self.mark, self.close, *self.wrappers, *self.elements)

    def parser(self, tools: Tools = (), opened: str = "") -> BlockParser:
        """Parser of one completion, see `CallFormat.parser`."""
        return BlockParser(self, tools, opened)


class BlockParser:
    """Parser of a `BlockFormat`, see `CallParser`.

    Marks and think tags inside the JSON value that a reply begins with are text.

    Args:
        form: the format.
        tools: the tools that may be called.
        opened: think tag that the prompt leaves open, or "".
    """

    def __init__(self, form: BlockFormat, tools: Tools, opened: str) -> None:
        self.malformed: list[str] = []
        self._form = form
        self._tools = tools
        self._pieces = Pieces()
        self._held = ""
        self._thought = closing_tag(opened.strip()) if opened.strip() else ""
        self._block: str | None = None  # the mark of the block that `_held` continues
        self._searched = 0
        self._opening: str | None = ""  # text since the start or a thought, if it may be JSON

    def push(self, text: str) -> list[str | ToolCall]:
        """Add text, see `CallParser.push`."""
        self._held += text
        while self._step(final=False):
            pass
        return self._pieces.take()

    def finish(self) -> list[str | ToolCall]:
        while self._step(final=True):
            pass
        return self._pieces.flush()

    def _step(self, final: bool) -> bool:
        """Consume a part of the held text.

        Args:
            final: True if no text follows.

        Returns:
            False if more text is needed.
        """
        if self._block is not None:
            return self._in_block(self._block, final)
        return self._in_thought(final) if self._thought else self._in_text(final)

    def _in_thought(self, final: bool) -> bool:
        before, closed, after = self._held.partition(self._thought)
        if closed:
            self._text(before + closed)
            self._held, self._thought, self._opening = after, "", ""
            return True
        return self._wait(() if final else (self._thought,))

    def _in_text(self, final: bool) -> bool:
        form, held = self._form, self._held
        if form.bare and self._opening is not None and not self._opening.strip():
            start = held.lstrip()
            if not start and not final:
                return False
            if start.startswith("{"):
                self._held, self._block, self._searched = start, "", 0
                return True
        marks = (form.mark, *form.wrappers, *TAGS)
        found = [(at, -len(mark), mark) for mark in marks if (at := held.find(mark)) >= 0]
        if not found:
            return self._wait(() if final else marks)
        at, _, mark = min(found)
        if (seen := self._json_around(at, final)) is not None:
            self._text(held[:seen])
            self._held = held[seen:]
            return bool(seen)
        self._text(held[:at])
        self._held = held[at + len(mark) :]
        if mark == form.mark:
            self._block, self._searched = mark, 0
        elif mark in TAGS:
            self._text(mark)
            self._thought = closing_tag(mark)
        return True

    def _json_around(self, at: int, final: bool) -> int | None:
        """Index in the held text after the JSON answer that contains index `at`.

        Returns:
            0 if this depends on the text that follows, None if there is no such answer.
        """
        opening = self._opening
        if opening is None or not inside_json(opening + self._held[:at]):
            return None
        new, self._searched = self._held[self._searched :], len(self._held)
        may_end = final or "}" in new or "]" in new
        end = after_json(opening + self._held) if may_end else 0
        if not end and not final:
            return 0
        self._searched = 0
        return end - len(opening) if end > len(opening) + at else None

    def _wait(self, marks: tuple[str, ...]) -> bool:
        """Release the held text, except the start of one of `marks` at its end."""
        keep = max((overlap(self._held, mark) for mark in marks), default=0)
        give = len(self._held) - keep
        self._text(self._held[:give])
        self._held = self._held[give:]
        return False

    def _in_block(self, mark: str, final: bool) -> bool:
        form, held = self._form, self._held
        end = form.close or form.mark
        while (at := held.find(end, self._searched)) >= 0:
            block = held[:at]
            try:
                return self._add_calls(block, at + len(form.close))
            except Unreadable as problem:
                if not form.goes_on(block):
                    return self._give_up(mark, at, str(problem))
            self._searched = at + len(end)
        self._searched = max(self._searched, len(held) - len(end) + 1)
        return final and self._end_of_text(mark)

    def _end_of_text(self, mark: str) -> bool:
        """Read a block at the end of the completion, which has no closing mark."""
        form, held = self._form, self._held
        if form.close:
            at = held.find(form.close)  # found before, but it seemed to belong to a value
            if at < 0:
                return self._give_up(mark, len(held), f"it is not closed by {form.close}")
            try:
                form.read(held[:at], self._tools)
                problem = "there is text after the call"
            except Unreadable as unread:
                problem = str(unread)
            return self._give_up(mark, at, problem)
        try:
            return self._add_calls(held, len(held))
        except Unreadable as unread:
            return self._give_up(mark, len(held), str(unread))

    def _add_calls(self, block: str, stop: int) -> bool:
        """Add the calls of a block.

        Args:
            block: the text after the opening mark.
            stop: index in the held text after the block and its closing mark.

        Raises:
            Unreadable: the block cannot be read.
        """
        calls, end = self._form.read(block, self._tools)
        if self._form.close and block[end:].strip():
            raise Unreadable("there is text after the call")
        for call in calls:
            self._pieces.add(call)
        self._opening = None
        after = "" if self._form.close else block[end:]
        self._held, self._block = after + self._held[stop:], None
        return True

    def _give_up(self, mark: str, at: int, problem: str) -> bool:
        """Count a block as malformed, and keep it as text."""
        form, block = self._form, self._held[:at]
        again = block.find(form.mark)
        if again >= 0:  # the next call begins before this one is closed
            at, problem = again, f"it is not closed by {form.close or form.mark}"
            block = block[:again]
        close = form.close if self._held.startswith(form.close, at) else ""
        if mark or _MEANT_AS_CALL.match(block):
            self.malformed.append(problem)
        self._text(mark + block + close)
        self._held, self._block, self._searched = self._held[at + len(close) :], None, 0
        return True

    def _text(self, text: str) -> None:
        if self._opening is not None:
            self._opening += text
            if not _MAY_BE_JSON.match(self._opening):
                self._opening = None
        self._pieces.add(text)
