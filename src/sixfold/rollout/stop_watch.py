"""Stop strings for an engine that only knows tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..engine.sequence import Sequence as EngineSequence
from ..renderer.renderer import Renderer
from .generator import Sampled


class SequenceText:
    """Text of one growing sequence, cut before its first stop string.

    Args:
        renderer: decodes tokens.
        stops: the stop strings; empty for none.
        ends: tokens at which the sequence ends. They are not part of the text.

    Attributes:
        seen: number of completion tokens that have been read.
    """

    def __init__(self, renderer: Renderer, stops: Sequence[str], ends: Sequence[int]) -> None:
        self.seen = 0
        self._reader = renderer.stream(stops, ends)

    @property
    def text(self) -> str:
        return self._reader.text

    def advance(self, sequence: EngineSequence) -> bool:
        """Read the new tokens of the sequence.

        Returns:
            True if a stop string is complete. Tokens after it, from a step that sampled several,
            are removed from the sequence.
        """
        prompt = len(sequence.request.prompt)
        used = self._reader.push(sequence.tokens[prompt + self.seen :])
        if used is not None:
            sequence.cut(prompt + self.seen + used)
        self.seen = len(sequence.tokens) - prompt
        return used is not None

    def finish(self) -> bool:
        """Make the held-back text final. Returns True if that completes a stop string."""
        return self._reader.finish()


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


def cut_sampled(sampled: Sampled, renderer: Renderer, stops: Sequence[str]) -> Sampled:
    """The completion up to the token that completes its first stop string, if it has one.

    Args:
        sampled: the completion.
        renderer: decodes tokens.
        stops: the stop strings.
    """
    found = cut_at_stop(sampled.tokens, renderer, stops)
    if found is None:
        return sampled
    length, text = found
    return replace(
        sampled,
        tokens=sampled.tokens[:length],
        logp=sampled.logp[:length],
        version=sampled.version[:length],
        finish_reason="stop",
        text=text,
    )
