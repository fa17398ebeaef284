"""From tokens to text as they come: text that later tokens can change is held back, and so is what may turn out to be a stop string.

Whatever the pieces the tokens come in, the texts given out add up to the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

WINDOW = 64
"""Tokens decoded together at most before the older ones are let go."""
CONTEXT = 16
"""Tokens kept then: what a token looks like may depend on those before it."""
REPLACEMENT = "\ufffd"


class TextStream:
    """Incremental decoding. decode: token ids -> text; all tokens decoded at once give the same text."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._given = 0
        self._waiting = 0

    def push(self, tokens: Sequence[int]) -> str:
        """The text that these tokens settle."""
        self._window += tokens
        text = self._decode(self._window)
        settled = max(self._given, len(text) - self._unsettled(text, len(tokens)))
        new = text[self._given : settled]
        self._given = settled
        if len(self._window) > WINDOW:
            self._shorten(text)
        return new

    def finish(self) -> str:
        """What was held back."""
        return self._decode(self._window)[self._given :]

    def _unsettled(self, text: str, tokens: int) -> int:
        """Characters at the end that the next token may change: replacement characters, while a character of four bytes may still be under way.

        Until its last byte is there, decoders with a token a byte (Llama 2, Gemma) show replacement characters for all bytes before it too.
        """
        unsettled = len(text) - len(text.rstrip(REPLACEMENT))
        self._waiting = self._waiting + tokens if unsettled else 0
        if self._waiting > 3:
            unsettled = min(unsettled, 3)
        return unsettled

    def _shorten(self, text: str) -> None:
        """Let old tokens go, at a place where what is left still decodes to the end of the text: not inside a character."""
        pending = len(text) - self._given
        for size in range(CONTEXT, CONTEXT + 4):
            tail = self._decode(self._window[-size:])
            if text.endswith(tail) and len(tail) >= pending:
                self._window, self._given = self._window[-size:], len(tail) - pending
                return


class StopStrings:
    """Cuts a text before the stop string that is completed first."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """(text that no stop string can reach back into any more, whether one is complete: then the text ends there)."""
        held = self._held + text
        ends = [(at + len(stop), at) for stop in self._stops if (at := held.find(stop)) >= 0]
        if ends:
            self._held = ""
            return held[: min(ends)[1]], True
        keep = max((_overlap(held, stop) for stop in self._stops), default=0)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep], False

    def finish(self) -> str:
        """What was held back: the start of a stop string that never came to its end."""
        return self._held


class CompletionText:
    """Text of a completion as its tokens come, cut before the first stop string.

    Training and the server both end completions by it.

    Args:
        decode: token ids -> text.
        stops: the stop strings; empty for none.

    Attributes:
        text: what is settled so far.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str]) -> None:
        self.text = ""
        self._stream = TextStream(decode)
        self._stops = StopStrings(stops)
        self._one_by_one = bool(stops)

    def push(self, tokens: Sequence[int]) -> int | None:
        """Take new tokens in.

        Returns:
            How many of them the completion has if a stop string ends it; the last of these completes the stop
            string. None if it goes on.
        """
        for used, piece in enumerate([[token] for token in tokens] if self._one_by_one else [tokens], start=1):
            settled, stopped = self._stops.push(self._stream.push(piece))
            self.text += settled
            if stopped:
                return used
        return None

    def finish(self) -> bool:
        """Settle what was held back, as no token follows. True if that completes a stop string."""
        settled, stopped = self._stops.push(self._stream.finish())
        self.text += settled + ("" if stopped else self._stops.finish())
        return stopped


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper prefix of `stop` that `text` ends with.

    Only places where the first character of `stop` stands are compared: a stop string may have 1,000
    characters, and this runs for every sampled token.
    """
    at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while at >= 0:
        if stop.startswith(text[at:]):
            return len(text) - at
        at = text.find(stop[0], at + 1)
    return 0
