"""Stop strings for an engine that only knows tokens."""

from __future__ import annotations

from collections.abc import Sequence

from ..engine.sequence import Sequence as EngineSequence
from .renderer.renderer import Renderer
from .renderer.text_stream import CompletionText


class StopWatch:
    """Decodes running sequences and cuts each after the token that completes a stop string.

    Args:
        renderer: decodes tokens.
        stops: the stop strings. If there are none, nothing is decoded.
    """

    def __init__(self, renderer: Renderer, stops: Sequence[str]) -> None:
        self._renderer = renderer
        self._stops = tuple(stops)
        self._texts: dict[EngineSequence, tuple[CompletionText, int]] = {}
        self._ended: dict[EngineSequence, str] = {}

    def ends(self, sequence: EngineSequence) -> bool:
        """True if a stop string is complete. Tokens after it are then removed from the sequence."""
        if sequence in self._ended:
            return True
        reader, seen = (
            self._texts.pop(sequence)
            if sequence in self._texts
            else (self._renderer.stream(self._stops), 0)
        )
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
        """Text of a finished sequence if a stop string ended it, else None.

        A sequence that ended by an end token or by its length may have completed a stop string in
        the same step. Its finish reason then becomes "stop".
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


def cut_at_stop(
    tokens: Sequence[int], renderer: Renderer, stops: Sequence[str]
) -> tuple[int, str] | None:
    """Cut a finished completion at its first stop string.

    Args:
        tokens: token ids of the completion.
        renderer: decodes tokens.
        stops: the stop strings.

    Returns:
        Number of tokens up to the one that completes the stop string, and the text before the stop
        string. None if the completion has no stop string.
    """
    if not stops:
        return None
    reader = renderer.stream(stops)
    used = reader.push(tokens)
    if used is None and not reader.finish():
        return None
    return len(tokens) if used is None else used, reader.text
