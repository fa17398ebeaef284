"""Monte Carlo tree search over steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from .outcome import Outcome, best_of, collected
from .settings import Settings
from .tree import Chain, Tree


@dataclass(eq=False)
class _Node:
    """A chain in the tree.

    Attributes:
        chain: the chain.
        parent: the node that it extends. None for the prompt.
        children: its extensions by one step. Empty: not expanded.
        visits: simulations through it.
        total: sum of their values.
        exhausted: nothing under it can be simulated again.
    """

    chain: Chain
    parent: _Node | None = None
    children: list[_Node] = field(default_factory=list)
    visits: int = 0
    total: float = 0.0
    exhausted: bool = False

    def bound(self, explore: float) -> float:
        """Upper confidence bound: q + c * sqrt(ln N_parent / n). Infinite without a visit."""
        if not self.visits or self.parent is None:
            return math.inf
        spread = math.sqrt(math.log(self.parent.visits) / self.visits)
        return self.total / self.visits + explore * spread


async def mcts(tree: Tree, settings: Settings) -> Outcome:
    """Monte Carlo tree search; the completion with the largest value is returned.

    A simulation goes down to the child with the largest upper confidence bound, unvisited ones
    first, samples M extensions of a node that it visits the second time, completes one of them, and
    adds the value of the completion to all nodes above it (Kocsis and Szepesvari 2006,
    doi:10.1007/11871842_29).
    """
    return best_of(tree, await collected(tree, lambda done: _simulated(tree, settings, done)))


async def _simulated(tree: Tree, settings: Settings, before: Sequence[Chain]) -> list[Chain]:
    """Scored completions of one tree, after those of earlier ones."""
    root, done = _Node(Chain()), list[Chain]()
    while not root.exhausted and (tree.budget is not None or len(done) < settings.n):
        node = root
        while node.children:
            node = _chosen(node, settings.explore)
        if node is root or node.visits:
            # Until there is a completion, leave the tokens to complete the prompt.
            spare = 0 if before or done else tree.most(node.chain)
            (chains,) = await tree.extend([node.chain], settings.expand, tree.step, spare=spare)
            distinct = {chain.tokens: chain for chain in reversed(chains)}
            node.children = [_Node(chain, node) for chain in reversed(distinct.values())]
            if node.children:
                node = node.children[0]
            elif before or done:
                break
        if node.chain.finish:
            whole = [node.chain]
        else:
            (whole,) = await tree.extend([node.chain])
        if not whole:
            break
        (leaf,) = await tree.score(whole)
        done.append(leaf)
        _add(node, tree.value(leaf))
    return done


def _chosen(node: _Node, explore: float) -> _Node:
    """The child with the largest bound, the first of equal ones."""
    return max((c for c in node.children if not c.exhausted), key=lambda c: c.bound(explore))


def _add(leaf: _Node, value: float) -> None:
    """Add a simulation to a node and all nodes above it."""
    leaf.exhausted = leaf.chain.finish is not None
    node: _Node | None = leaf
    while node is not None:
        node.visits += 1
        node.total += value
        if node.children:
            node.exhausted = all(child.exhausted for child in node.children)
        node = node.parent
