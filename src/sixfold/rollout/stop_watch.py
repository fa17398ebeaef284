"""Stop strings under an engine that knows tokens only: which of its sequences have said one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..engine.sequence import Sequence as EngineSequence
from .text_stream import CompletionText


class StopWatch:
    """Reads the text of sequences as they grow, and cuts them at the token that completes a stop string.

    Args:
        decode: token ids -> text.
        stops: the stop strings. Nothing is decoded where there is none.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str]) -> None:
        self._decode = decode
        self._stops = tuple(stops)
        self._texts: dict[EngineSequence, tuple[CompletionText, int]] = {}
        self._ended: dict[EngineSequence, str] = {}

    def ends(self, sequence: EngineSequence) -> bool:
        """True if the sequence's new tokens complete a stop string. Tokens after that are cut off."""
        if sequence in self._ended:
            return True
        reader, seen = self._texts.pop(sequence) if sequence in self._texts else (CompletionText(self._decode, self._stops), 0)
        at = len(sequence.request.prompt) + seen
        new = sequence.tokens[at:]
        used = reader.push(new)
        if used is None:
            self._texts[sequence] = reader, seen + len(new)
            return False
        sequence.cut(at + used)
        self._ended[sequence] = reader.text
        return True

    def text(self, sequence: EngineSequence) -> str | None:
        """Text of a sequence that has ended, if a stop string ended it, else None.

        A sequence that ended by a token or its length may have completed a stop string in the same step: then
        its reason becomes "stop".
        """
        if not self._stops:
            return None
        if not self.ends(sequence):
            reader, _ = self._texts.pop(sequence)
            if not reader.finish():
                return None
            self._ended[sequence] = reader.text
        sequence.finish_reason = "stop"
        return self._ended.pop(sequence)


def cut_at_stop(tokens: Sequence[int], decode: Callable[[Sequence[int]], str], stops: Sequence[str]) -> tuple[int, str] | None:
    """Tokens and text of a whole completion up to its first stop string, or None where it has none."""
    if not stops:
        return None
    reader = CompletionText(decode, stops)
    used = reader.push(tokens)
    if used is None and not reader.finish():
        return None
    return len(tokens) if used is None else used, reader.text
