"""Searches step by step: beams, diverse beams, and beams with lookahead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .outcome import Outcome, best_of, collected
from .settings import Settings
from .tree import Chain, Tree


async def beam(tree: Tree, settings: Settings) -> Outcome:
    """Keep the n / M best chains of each step, and extend each M times."""
    return await _beams(tree, settings)


async def diverse_beam(tree: Tree, settings: Settings) -> Outcome:
    """Diverse verifier tree search: n / M separate trees, of which each keeps its best chain.

    Beeching et al. 2024, "Scaling test-time compute with open models".
    """
    return await _beams(tree, settings, diverse=True)


async def lookahead(tree: Tree, settings: Settings) -> Outcome:
    """A beam whose chains are scored after some more steps, taken greedily.

    Snell et al. 2024, arXiv:2408.03314, section 5.1. The further steps are then dropped.
    """
    return await _beams(tree, settings, steps=settings.lookahead)


async def _beams(
    tree: Tree, settings: Settings, *, diverse: bool = False, steps: int = 0
) -> Outcome:
    """One beam, or with a budget as many as it allows."""

    async def once(done: list[Chain]) -> list[Chain]:
        return await _one_beam(tree, settings, done, diverse=diverse, steps=steps)

    return best_of(tree, await collected(tree, once))


async def _one_beam(
    tree: Tree, settings: Settings, done: Sequence[Chain], *, diverse: bool, steps: int
) -> list[Chain]:
    """Scored completions of one beam."""
    width, count = settings.n // settings.expand, settings.n
    trees: list[list[Chain]] = [[Chain()]]
    ended: list[Chain] = []
    while any(trees):
        kept = [chain for chains in trees for chain in chains]
        # Until there is a completion, leave the tokens to complete the best chain.
        spare = 0 if done or ended else max(map(tree.most, kept))
        found = await tree.extend(kept, count, tree.step, spare=spare)
        if not any(found):
            break
        chains = await _scored(tree, [c for some in found for c in some], steps, spare)
        if not diverse:
            groups = [chains]
        elif count == settings.n:  # the first step
            groups = [chains[at : at + settings.expand] for at in range(0, count, settings.expand)]
        else:
            ends = [sum(map(len, found[: at + 1])) for at in range(len(found))]
            groups = [chains[a:b] for a, b in zip([0, *ends], ends, strict=False)]
        best = [_best(tree, group, 1 if diverse else width) for group in groups]
        ended += [chain for some in best for chain in some if chain.finish]
        trees = [[chain for chain in some if not chain.finish] for some in best]
        count = settings.expand
    if not (ended or done) and any(trees):
        kept = [chain for chains in trees for chain in chains]
        start = tree.best(kept) if kept[0].scores else kept[0]
        (ended,) = await tree.extend([start])
        ended = await tree.score(ended)
    return ended


async def _scored(tree: Tree, chains: Sequence[Chain], steps: int, spare: int) -> list[Chain]:
    """Chains with their scores, or with those that they have some steps later."""
    ahead = list(chains)
    for _ in range(steps):
        further = await tree.extend(ahead, 1, tree.step, greedy=True, spare=spare)
        ahead = [new[0] if new else old for new, old in zip(further, ahead, strict=True)]
    scored = await tree.score(ahead)
    return [replace(c, scores=later.scores) for c, later in zip(chains, scored, strict=True)]


def _best(tree: Tree, chains: Sequence[Chain], count: int) -> list[Chain]:
    """The chains with the largest values, without equal ones."""
    distinct = {chain.tokens: chain for chain in reversed(chains)}
    order = [chain for chain in chains if distinct[chain.tokens] is chain]
    return sorted(order, key=tree.value, reverse=True)[:count]
