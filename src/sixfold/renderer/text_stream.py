"""Incremental conversion of tokens to text, with stop strings.

Text is held back while later tokens can still change it, or while it may be the start of a stop
string. The concatenated output does not depend on how the tokens are split into calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

WINDOW = 64
"""Maximum number of tokens that are decoded together. Older ones are dropped."""
CONTEXT = 16
"""Tokens kept when older ones are dropped: a token's text may depend on the tokens before it."""
REPLACEMENT = "\ufffd"


class TextStream:
    """Incremental decoding. The result equals decoding all tokens at once.

    Args:
        decode: token ids -> text.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._given = 0
        self._waiting = 0

    def push(self, tokens: Sequence[int]) -> str:
        """Add tokens. Returns the text that has become final."""
        self._window += tokens
        text = self._decode(self._window)
        settled = max(self._given, len(text) - self._unsettled(text, len(tokens)))
        new = text[self._given : settled]
        self._given = settled
        if len(self._window) > WINDOW:
            self._shorten(text)
        return new

    def finish(self) -> str:
        """The text that is still held back."""
        return self._decode(self._window)[self._given :]

    def _unsettled(self, text: str, tokens: int) -> int:
        """Number of characters at the end of `text` that the next token may change.

        These are replacement characters, as long as they may be the start of a 4-byte character.
        Decoders with one token per byte (Llama 2, Gemma) show a replacement character for every
        byte until the last byte has arrived.

        Args:
            text: text of the current window.
            tokens: number of new tokens.
        """
        unsettled = len(text) - len(text.rstrip(REPLACEMENT))
        self._waiting = self._waiting + tokens if unsettled else 0
        if self._waiting > 3:
            unsettled = min(unsettled, 3)
        return unsettled

    def _shorten(self, text: str) -> None:
        """Drop old tokens from the window.

        The remaining tokens must still decode to the end of the text. That fails if the window
        would start inside a character.
        """
        pending = len(text) - self._given
        for size in range(CONTEXT, CONTEXT + 4):
            tail = self._decode(self._window[-size:])
            if text.endswith(tail) and len(tail) >= pending:
                self._window, self._given = self._window[-size:], len(tail) - pending
                return


class StopStrings:
    """Cuts a growing text before the first complete stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Add text.

        Returns:
            The text that cannot be part of a stop string, and True if a stop string is complete.
            The text then ends before the stop string.
        """
        held = self._held + text
        ends = [(at + len(stop), at) for stop in self._stops if (at := held.find(stop)) >= 0]
        if ends:
            self._held = ""
            return held[: min(ends)[1]], True
        keep = max((overlap(held, stop) for stop in self._stops), default=0)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep], False

    def finish(self) -> str:
        """The text that is still held back, because it is the start of a stop string."""
        return self._held


class CompletionText:
    """Text of a growing completion, cut before the first stop string.

    Training and the server both use it to end completions.

    Args:
        decode: token ids -> text.
        stops: the stop strings; empty for none.

    Attributes:
        text: text that is final so far.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str]) -> None:
        self.text = ""
        self._stream = TextStream(decode)
        self._stops = StopStrings(stops)
        self._one_by_one = bool(stops)

    def push(self, tokens: Sequence[int]) -> int | None:
        """Add tokens.

        Returns:
            If a stop string ends the completion: how many of the new tokens belong to it. The last
            of them completes the stop string. None if no stop string is complete.
        """
        for used, piece in enumerate(
            [[token] for token in tokens] if self._one_by_one else [tokens], start=1
        ):
            settled, stopped = self._stops.push(self._stream.push(piece))
            self.text += settled
            if stopped:
                return used
        return None

    def finish(self) -> bool:
        """End the completion: the text that is held back becomes final.

        Returns:
            True if it completes a stop string.
        """
        settled, stopped = self._stops.push(self._stream.finish())
        self.text += settled + ("" if stopped else self._stops.finish())
        return stopped


def overlap(text: str, stop: str) -> int:
    """Length of the longest proper prefix of `stop` that `text` ends with.

    Only positions with the first character of `stop` are compared: a stop string may have 1,000
    characters, and this function runs for every sampled token.
    """
    at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while at >= 0:
        if stop.startswith(text[at:]):
            return len(text) - at
        at = text.find(stop[0], at + 1)
    return 0
