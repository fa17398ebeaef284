"""How far a step is sampled: the strings and the number of tokens that end it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from sixfold.renderer.renderer import Renderer
from sixfold.steps import Steps, check_steps, own_ends_of, steps_of, tokenized_ends

from .tree import Span

_STOPS = {
    "newline": ("\n",),
    "blank_line": ("\n\n",),
    "sentence": (*(f"{mark}{space}" for mark in ".!?" for space in " \n"), "。", "！", "？"),
}


@dataclass(frozen=True)
class Stepping:
    """Where the steps of a search end.

    Attributes:
        name: a way to end steps (`sixfold.steps`).
        tokens: most tokens of a step.

    Raises:
        UserError: there is no such way.
    """

    name: str = "newline"
    tokens: int = 128

    def __post_init__(self) -> None:
        check_steps(self.name)

    def steps(self, renderer: Renderer) -> Steps:
        """Where the steps of a finished text end."""
        ends = partial(tokenized_ends, encode=renderer.plain, decode=renderer.shown)
        return steps_of(self.name, ends)

    @property
    def span(self) -> Span:
        """How far a step is sampled."""
        kind, _, argument = self.name.partition(":")
        if self.name in _STOPS:
            return Span(_STOPS[self.name], self.tokens)
        if kind == "every":
            return Span((), int(argument))
        if own_ends_of(self.name):
            return Span((), self.tokens, read=True)
        return Span((f"</{argument}>" if kind == "xml" else argument,), self.tokens)
