"""Searches over whole completions: greedy, votes, and best of N."""

from __future__ import annotations

from collections import Counter, defaultdict

from sixfold_environments.maths.stated import answer_of

from .outcome import Outcome, best_of, collected, finished
from .settings import Settings
from .tree import Chain, Tree


async def greedy(tree: Tree, settings: Settings) -> Outcome:
    """The completion of the most probable tokens."""
    ((*chains,),) = await tree.extend([Chain()], greedy=True)
    return Outcome.of(chains, chains[0] if chains else Chain())


async def majority(tree: Tree, settings: Settings) -> Outcome:
    """Self-consistency: the answer of most completions (Wang et al. 2022, arXiv:2203.11171)."""
    chains = await collected(tree, lambda _: _sampled(tree, settings.n))
    counts = Counter(answer_of(chain.text) for chain in finished(chains))
    most = max(counts.values(), default=0)
    winners = (c for c in finished(chains) if counts[answer_of(c.text)] == most)
    return Outcome.of(chains, next(winners, Chain()))


async def weighted(tree: Tree, settings: Settings) -> Outcome:
    """The answer with the largest sum of values (Li et al. 2022, arXiv:2206.02336).

    Of its completions, the one with the largest value is returned.
    """
    chains = await collected(tree, lambda _: _scored(tree, settings.n))
    sums: defaultdict[str, float] = defaultdict(float)
    for chain in finished(chains):
        sums[answer_of(chain.text)] += tree.value(chain)
    if not sums:
        return Outcome.of(chains, Chain())
    answer = max(sums, key=lambda one: sums[one])
    voters = [c for c in finished(chains) if answer_of(c.text) == answer]
    return Outcome.of(chains, tree.best(voters))


async def best_of_n(tree: Tree, settings: Settings) -> Outcome:
    """The completion with the largest value."""
    return best_of(tree, await collected(tree, lambda _: _scored(tree, settings.n)))


async def _sampled(tree: Tree, count: int) -> list[Chain]:
    (chains,) = await tree.extend([Chain()], count)
    return chains


async def _scored(tree: Tree, count: int) -> list[Chain]:
    return await tree.score(await _sampled(tree, count))
