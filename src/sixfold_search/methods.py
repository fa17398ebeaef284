"""The methods of search, one row each."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from sixfold.errors import UserError
from sixfold.renderer.renderer import Renderer, RenderError

from .beam import beam, diverse_beam, lookahead
from .outcome import Outcome
from .repair import budget_forcing, regenerate
from .sampling import best_of_n, greedy, majority, weighted
from .settings import Settings
from .tree import Tree
from .tree_search import mcts

_LEAST = {"n": 1, "expand": 2, "lookahead": 1, "think": 1, "think_min": 0, "explore": 0}
"""Smallest value of a setting."""


@dataclass(frozen=True)
class Method:
    """A method of search.

    Attributes:
        run: grows a tree and chooses a completion.
        scores: what it scores: nothing, whole completions, their beginnings after each step, or
            each step, which an outcome reward model cannot.
        reads: the settings that it reads.
    """

    run: Callable[[Tree, Settings], Awaitable[Outcome]]
    scores: Literal["nothing", "wholes", "prefixes", "steps"]
    reads: tuple[str, ...]

    def check(self, settings: Settings, max_tokens: int) -> None:
        """Refuse settings of the method that make no sense.

        Args:
            settings: the settings.
            max_tokens: most tokens of a completion.

        Raises:
            UserError: naming the setting.
        """
        for name in self.reads:
            value = getattr(settings, name)
            if name in _LEAST and not value >= _LEAST[name]:
                raise UserError(f"{name} = {value}: it must be at least {_LEAST[name]}")
            if value == "":
                raise UserError(f"{name} is empty: give a text")
        n, expand = settings.n, settings.expand
        if self.scores == "prefixes" and n % expand:
            raise UserError(
                f"n = {n} is no multiple of expand = {expand}: a beam keeps n / expand chains. Use"
                f" n = {max(1, n // expand) * expand}"
            )
        if "threshold" in self.reads and not 0 < settings.threshold <= 1:
            raise UserError(
                f"threshold = {settings.threshold}: scores of steps are between 0 and 1"
            )
        if "think" in self.reads and not settings.think_min <= settings.think < max_tokens:
            raise UserError(
                f"think = {settings.think}: it must be at least think_min = {settings.think_min}"
                f" and less than the longest completion, {max_tokens} tokens"
            )

    def check_texts(self, settings: Settings, renderer: Renderer) -> None:
        """Refuse texts that the tokenizer cannot write.

        Raises:
            UserError: naming the setting.
        """
        for name in self.reads:
            written = name == "think_end" or (name == "think_more" and settings.think_min)
            text = getattr(settings, name)
            if written and text not in renderer.tokenizer.get_added_vocab():
                try:
                    renderer.suffix_text((), text)
                except RenderError as error:
                    raise UserError(f"{name} = {text!r}: {error}. Give another text") from error


METHODS: Mapping[str, Method] = {
    "greedy": Method(greedy, "nothing", ()),
    "majority": Method(majority, "nothing", ("n",)),
    "weighted": Method(weighted, "wholes", ("n",)),
    "best_of_n": Method(best_of_n, "wholes", ("n",)),
    "beam": Method(beam, "prefixes", ("n", "expand")),
    "diverse_beam": Method(diverse_beam, "prefixes", ("n", "expand")),
    "lookahead": Method(lookahead, "prefixes", ("n", "expand", "lookahead")),
    "mcts": Method(mcts, "wholes", ("n", "expand", "explore")),
    "regenerate": Method(regenerate, "steps", ("n", "threshold")),
    "budget_forcing": Method(
        budget_forcing, "nothing", ("think", "think_min", "think_end", "think_more")
    ),
}
