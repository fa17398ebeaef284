"""A radix tree over token prefixes, block by block: shared beginnings are one path, and texts part where their blocks first differ.

An edge is a run of whole blocks; it is split where a later text leaves it. Only the last block of a leaf may be partly filled (the end of a
conversation so far), and a match may end within any block, so a conversation's next turn finds every token of the turns before. A match shorter
than one block counts for nothing: it would cost a copy to save a few tokens that every prompt begins with.

Zheng et al. 2023, "SGLang: efficient execution of structured language model programs" (RadixAttention).
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

from .block_manager import BlockManager
from .prefix_cache import Prefix

Key = tuple[int, ...]
"""The tokens of one block: block_size of them, or fewer in a leaf's last block."""


@dataclass(eq=False)
class _Node:
    """An edge and what lies below it. keys: the tokens of each of `blocks`. touched: when it was last used. children: by their first key. order:
    those keys, sorted."""

    keys: list[Key]
    blocks: list[int]
    parent: _Node | None
    touched: int = 0
    children: dict[Key, _Node] = field(default_factory=dict)
    order: list[Key] = field(default_factory=list)


class RadixCache:
    """Longest cached prefix, in time proportional to the prefix."""

    def __init__(self, blocks: BlockManager) -> None:
        self._blocks = blocks
        self._clock = count(1)
        self._roots: defaultdict[int, _Node] = defaultdict(lambda: _Node([], [], None))
        """By space."""
        self._leaves: list[tuple[int, int, _Node]] = []
        """Heap of (touched, tie, leaf). An entry may be out of date: the node was used since, has children now or is gone."""

    def match(self, tokens: Sequence[int], space: int = 0) -> Prefix:
        """The longest prefix of `tokens` that is remembered, at least one block of it; it counts as used now."""
        keys = self._keys(tokens)
        node, found, within = self._descend(keys, space)
        self._touch(node)
        if not found or len(keys[0]) < self._blocks.block_size:
            return Prefix([], 0)
        length = sum(len(key) for key in keys[: len(found)])
        rest, block = self._closest(tokens[length:], node, within)
        return Prefix([*found, block], length + rest) if rest else Prefix(found, length)

    def insert(self, tokens: Sequence[int], blocks: Sequence[int], space: int = 0) -> None:
        """Remember that `blocks` hold `tokens`. What is known already stays where it is."""
        keys = self._keys(tokens)
        node, found, within = self._descend(keys, space)
        keys, fresh = keys[len(found) :], list(blocks[len(found) : len(keys)])
        if keys and within < len(node.keys):
            node = self._split(node, within)
        if keys and not (len(keys[0]) < self._blocks.block_size and self._closest(keys[0], node, len(node.keys))[0] == len(keys[0])):
            self._blocks.keep(fresh)
            leaf = _Node(keys, fresh, node)
            node.children[keys[0]] = leaf
            insort(node.order, keys[0])
            node = leaf
        self._touch(node)

    def evict(self, count: int) -> None:
        """Free `count` idle blocks, or all there are if they are fewer: from the end of the leaf used least recently."""
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

    def clear(self) -> None:
        """Give up every block."""
        for node in self._nodes():
            self._blocks.forget(node.blocks)
        self._roots.clear()
        self._leaves.clear()

    def _keys(self, tokens: Sequence[int]) -> list[Key]:
        size = self._blocks.block_size
        return [tuple(tokens[i : i + size]) for i in range(0, len(tokens), size)]

    def _descend(self, keys: list[Key], space: int) -> tuple[_Node, list[int], int]:
        """Follow `keys` as far as they are known: the node where that ends, the blocks on the way, and how many of the node's own were passed."""
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

    def _closest(self, tokens: Sequence[int], node: _Node, within: int) -> tuple[int, int]:
        """Of the blocks that follow a place in the tree, the one that begins with most of `tokens`: (how many, block)."""
        if within < len(node.keys):
            return _common(tokens, node.keys[within]), node.blocks[within]
        # In sorted order the key that begins with most of `tokens` stands right before or after their own place.
        place = bisect_left(node.order, tuple(tokens[: self._blocks.block_size]))
        beside = node.order[max(0, place - 1) : place + 1]
        return max(((_common(tokens, key), node.children[key].blocks[0]) for key in beside), default=(0, -1))

    def _split(self, node: _Node, at: int) -> _Node:
        """Cut an edge after `at` blocks; the upper half keeps its place and is given back."""
        assert node.parent is not None
        upper = _Node(node.keys[:at], node.blocks[:at], node.parent, node.touched)
        upper.parent.children[upper.keys[0]] = upper  # type: ignore[union-attr]
        node.keys, node.blocks, node.parent = node.keys[at:], node.blocks[at:], upper
        upper.children[node.keys[0]] = node
        upper.order.append(node.keys[0])
        return upper

    def _touch(self, node: _Node) -> None:
        """The path down to `node` is used now."""
        now, end = next(self._clock), node
        while node.parent is not None:
            node.touched = now
            node = node.parent
        if end.parent is not None and not end.children:
            heapq.heappush(self._leaves, (now, now, end))
        if len(self._leaves) > 2 * self._blocks.count + 64:  # mostly entries out of date: a leaf has a block at least
            self._leaves = [(n.touched, next(self._clock), n) for n in self._nodes() if n.blocks and not n.children]
            heapq.heapify(self._leaves)

    def _shorten(self, leaf: _Node, wanted: int) -> int:
        """Free up to `wanted` idle blocks from the leaf's end; an emptied leaf goes, and its parent may be a leaf then."""
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
    """Length of the common beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
