"""Searches that change one completion: after an error, or by the length of its thinking."""

from __future__ import annotations

from .outcome import Outcome, best_of, collected
from .settings import Settings
from .tree import Chain, Span, Tree


async def regenerate(tree: Tree, settings: Settings) -> Outcome:
    """Complete, find the first wrong step, delete it and what follows, and complete again.

    The first wrong step is the first with a score below the threshold. A new completion is kept
    unless its value is smaller. The search ends when no step is wrong, or after n completions; with
    a budget it then begins again with another completion until the budget is spent.
    """
    return best_of(tree, await collected(tree, lambda _: _repaired(tree, settings)))


async def _repaired(tree: Tree, settings: Settings) -> list[Chain]:
    """Completions of one chain of repairs, scored."""
    start, done = Chain(), list[Chain]()
    for _ in range(settings.n):
        (found,) = await tree.extend([start])
        if not found:
            break
        done += await tree.score(found)
        base = tree.best(list(reversed(done)))  # of equal ones the latest
        wrong = [at for at, score in enumerate(base.scores) if score < settings.threshold]
        if not wrong:
            break
        start = tree.before_step(base, wrong[0])
    return done


async def budget_forcing(tree: Tree, settings: Settings) -> Outcome:
    """Think for a number of tokens, then answer (Muennighoff et al. 2025, arXiv:2501.19393).

    At the largest number of tokens the end of thinking is written. An end before the smallest
    number is replaced by a text such as "Wait".
    """
    chain = Chain()
    while (room := settings.think - len(chain.tokens)) > 0:
        (found,) = await tree.extend([chain], 1, Span((settings.think_end,), room))
        if not found:  # the budget may not suffice: answer with what is left
            break
        (chain,) = found
        ended = chain.text.find(settings.think_end)
        if ended < 0 and chain.finish is None:
            break
        thought = tree.cut(chain, len(chain.text) if ended < 0 else ended)
        if len(thought.tokens) >= settings.think_min:
            break
        chain = tree.written(thought, settings.think_more)
    if settings.think_end not in chain.text and not chain.finish:
        chain = tree.written(chain, settings.think_end)
    if not chain.finish:
        ((*found,),) = await tree.extend([chain])
        chain = found[0] if found else chain
    return Outcome.of([chain], chain)
