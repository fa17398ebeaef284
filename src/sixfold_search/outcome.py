"""What a method has found."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from .tree import Chain, Tree


@dataclass(frozen=True)
class Outcome:
    """What a method has found.

    Attributes:
        best: the chosen chain. Without any text if the budget allows none.
        candidates: all completions among which it chose.
    """

    best: Chain
    candidates: tuple[Chain, ...]

    @classmethod
    def of(cls, chains: Sequence[Chain], best: Chain) -> Outcome:
        return cls(best, tuple(chains))


async def collected(
    tree: Tree, once: Callable[[list[Chain]], Awaitable[list[Chain]]]
) -> list[Chain]:
    """Completions of one round, or with a budget of as many rounds as it allows.

    Args:
        tree: the tree.
        once: returns the completions of a round, given those of earlier rounds.
    """
    done: list[Chain] = []
    while True:
        before = tree.cost.total
        done += await once(done)
        if tree.budget is None or tree.cost.total == before:
            return done


def best_of(tree: Tree, chains: Sequence[Chain]) -> Outcome:
    """The scored completion with the largest value."""
    return Outcome.of(chains, tree.best(finished(chains)) if chains else Chain())


def finished(chains: Sequence[Chain]) -> list[Chain]:
    """The chains that have ended by themselves, or all if none has."""
    return [chain for chain in chains if chain.finish == "stop"] or list(chains)
