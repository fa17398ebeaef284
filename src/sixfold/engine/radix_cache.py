"""Prefix cache as a radix tree over blocks of tokens.

Sequences with a common prefix share one path and branch at the first block that differs. An edge is
a run of whole blocks. It is split when a later sequence branches within it.

Only the last block of a leaf may be partly filled (the current end of a conversation). A match may
end within any block, so the next turn of a conversation finds every token of earlier turns. A match
shorter than one block is ignored: it would cost a copy to save the few tokens that every prompt
begins with.

Zheng et al. 2023, "SGLang: efficient execution of structured language model programs"
(RadixAttention).
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

from .block_manager import BlockManager
from .prefix_cache import Prefix
from .weight_stages import stage

Key = tuple[int, ...]
"""Tokens of one block: block_size of them, or fewer in the last block of a leaf."""


@dataclass(eq=False)
class _Node:
    """A node of the tree, with the edge that leads to it.

    Attributes:
        keys: tokens of each block on the edge.
        parent: parent node; None for a root.
        touched: time of last use.
        children: child nodes by the first key of their edges.
        order: keys of `children`, sorted.
    """

    keys: list[Key]
    blocks: list[int]
    parent: _Node | None
    touched: int = 0
    children: dict[Key, _Node] = field(default_factory=dict)
    order: list[Key] = field(default_factory=list)


class RadixCache:
    """Prefix cache that finds the longest cached prefix in time proportional to its length."""

    def __init__(self, blocks: BlockManager) -> None:
        self._blocks = blocks
        self._clock = count(1)
        self._roots: defaultdict[int, _Node] = defaultdict(lambda: _Node([], [], None))
        """Root node of each space."""
        self._leaves: list[tuple[int, int, _Node]] = []
        """Heap of (touched, tie-breaker, leaf). Entries may be stale: the node may have been used
        since, have children now, or be removed."""

    def match(self, tokens: Sequence[int], space: int = 0, avoid: Container[int] = ()) -> Prefix:
        keys = self._keys(tokens)
        node, found, within = self._descend(keys, space)
        self._touch(node)
        if not found or len(keys[0]) < self._blocks.block_size:
            return Prefix([], 0)
        length = sum(len(key) for key in keys[: len(found)])
        rest, block = self._closest(tokens[length:], node, within, avoid)
        return Prefix([*found, block], length + rest) if rest else Prefix(found, length)

    def insert(self, tokens: Sequence[int], blocks: Sequence[int], space: int = 0) -> None:
        keys = self._keys(tokens)
        node, found, within = self._descend(keys, space)
        keys, fresh = keys[len(found) :], list(blocks[len(found) : len(keys)])
        if keys and within < len(node.keys):
            node = self._split(node, within)
        if keys and not (
            len(keys[0]) < self._blocks.block_size
            and self._closest(keys[0], node, len(node.keys))[0] == len(keys[0])
        ):
            self._blocks.keep(fresh)
            leaf = _Node(keys, fresh, node)
            node.children[keys[0]] = leaf
            insort(node.order, keys[0])
            node = leaf
        self._touch(node)

    def findable(self, count: int) -> int:
        return count if count >= self._blocks.block_size else 0

    def evict(self, count: int) -> None:
        """Free `count` idle blocks, or all idle blocks if there are fewer.

        Blocks are taken from the ends of the least recently used leaves.
        """
        wanted = min(count, self._blocks.idle)
        in_use: list[tuple[int, int, _Node]] = []
        while wanted > 0 and self._leaves:
            entry = heapq.heappop(self._leaves)
            touched, _, node = entry
            if node.children or not node.blocks or node.touched != touched:
                continue
            wanted -= self._shorten(node, wanted)
            if node.blocks:
                in_use.append(entry)
        for entry in in_use:
            heapq.heappush(self._leaves, entry)

    @stage("invalidate")
    def clear(self) -> None:
        for node in self._nodes():
            self._blocks.forget(node.blocks)
        self._roots.clear()
        self._leaves.clear()

    def _keys(self, tokens: Sequence[int]) -> list[Key]:
        size = self._blocks.block_size
        return [tuple(tokens[i : i + size]) for i in range(0, len(tokens), size)]

    def _descend(self, keys: list[Key], space: int) -> tuple[_Node, list[int], int]:
        """Follow `keys` down the tree while they match.

        Returns:
            The last node reached, the matching blocks, and how many of the node's blocks matched.
        """
        node, found, within = self._roots[space], [], 0
        for key in keys:
            if within == len(node.keys):
                if key not in node.children:
                    break
                node, within = node.children[key], 0
            elif node.keys[within] != key:
                break
            found.append(node.blocks[within])
            within += 1
        return node, found, within

    def _closest(
        self, tokens: Sequence[int], node: _Node, within: int, avoid: Container[int] = ()
    ) -> tuple[int, int]:
        """Find the next block that has the longest common prefix with `tokens`.

        Args:
            tokens: tokens after the matched blocks.
            node: node where the match ended.
            within: number of the node's blocks that matched.
            avoid: blocks that do not count.

        Returns:
            Number of common tokens, and the block; (0, -1) if no block follows.
        """
        if within < len(node.keys):
            block = node.blocks[within]
            return (0, -1) if block in avoid else (_common(tokens, node.keys[within]), block)
        # In sorted order, the key with the longest common prefix is next to the place of `tokens`.
        place = bisect_left(node.order, tuple(tokens[: self._blocks.block_size]))
        best = (0, -1)
        for side in (range(place - 1, -1, -1), range(place, len(node.order))):
            for key in map(node.order.__getitem__, side):
                found = _common(tokens, key), node.children[key].blocks[0]
                if found[0] <= best[0]:
                    break  # keys that are farther have no more in common
                if found[1] not in avoid:
                    best = found
                    break
        return best

    def _split(self, node: _Node, at: int) -> _Node:
        """Split an edge after `at` blocks. Returns the upper node, which takes the old node's
        place."""
        assert node.parent is not None
        upper = _Node(node.keys[:at], node.blocks[:at], node.parent, node.touched)
        upper.parent.children[upper.keys[0]] = upper  # type: ignore[union-attr]
        node.keys, node.blocks, node.parent = node.keys[at:], node.blocks[at:], upper
        upper.children[node.keys[0]] = node
        upper.order.append(node.keys[0])
        return upper

    def _touch(self, node: _Node) -> None:
        """Mark the path from the root to `node` as used now."""
        now, end = next(self._clock), node
        while node.parent is not None:
            node.touched = now
            node = node.parent
        if end.parent is not None and not end.children:
            heapq.heappush(self._leaves, (now, now, end))
        # Rebuild the heap when most entries are stale. There are at most as many leaves as blocks.
        if len(self._leaves) > 2 * self._blocks.count + 64:
            self._leaves = [
                (n.touched, next(self._clock), n)
                for n in self._nodes()
                if n.blocks and not n.children
            ]
            heapq.heapify(self._leaves)

    def _shorten(self, leaf: _Node, wanted: int) -> int:
        """Free up to `wanted` idle blocks from the end of a leaf.

        An empty leaf is removed. Its parent may then become a leaf.

        Returns:
            Number of blocks freed.
        """
        freed = 0
        while freed < wanted and leaf.blocks and self._blocks.is_idle(leaf.blocks[-1]):
            self._blocks.forget([leaf.blocks.pop()])
            first = leaf.keys.pop()
            freed += 1
        if not leaf.blocks:
            parent = leaf.parent
            assert parent is not None
            del parent.children[first]
            del parent.order[bisect_left(parent.order, first)]
            if parent.parent is not None and not parent.children:
                heapq.heappush(self._leaves, (parent.touched, next(self._clock), parent))
        return freed

    def _nodes(self) -> Iterator[_Node]:
        stack = list(self._roots.values())
        while stack:
            at = stack.pop()
            stack += at.children.values()
            yield at


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )
