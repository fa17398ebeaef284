"""One suite for every prefix cache: what the contract promises, under any sequence of
operations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sixfold.engine import radix_cache
from sixfold.engine.block_hash_cache import BlockHashCache
from sixfold.engine.block_manager import BlockManager
from sixfold.engine.engine import make_prefix_cache
from sixfold.engine.prefix_cache import NoCache, PrefixCache
from sixfold.engine.radix_cache import RadixCache

SIZE = 3
BLOCKS = 14
KINDS = ["none", "radix", "hash"]
Tokens = list[int]


class Holders:
    """Texts that hold blocks, and what each block's slots contain, kept in the most obvious way."""

    def __init__(self, kind: str) -> None:
        self.blocks = BlockManager(BLOCKS, SIZE)
        self.cache: PrefixCache = make_prefix_cache(kind, self.blocks)
        self.slots: dict[tuple[int, int], tuple[int, ...]] = {}
        """(block, place) -> the space, then the text up to and with the token there: what its keys
        and values are a function of.
        """
        self.texts: list[tuple[int, Tokens, list[int]]] = []

    def begin(self, space: int, tokens: Tokens) -> None:
        """Hold `tokens`: what is cached is shared, a partly matching block copied, the rest
        computed. Too little room: nothing happens.
        """
        prefix = self.cache.match(tokens, space)
        assert prefix.length <= len(tokens) and len(prefix.blocks) == self.blocks.blocks_for(
            prefix.length
        )
        for i in range(prefix.length):
            assert self.slots[prefix.blocks[i // SIZE], i % SIZE] == (
                space,
                *tokens[: i + 1],
            ), "found behind another text"
        shared, copied = (
            prefix.blocks[: prefix.length // SIZE],
            prefix.blocks[prefix.length // SIZE :],
        )
        self.blocks.share(shared)
        needed = self.blocks.blocks_for(len(tokens)) - len(shared)
        copy = (
            {place: self.slots[copied[0], place] for place in range(prefix.length % SIZE)}
            if copied
            else {}
        )
        if not self.room(needed):
            self.blocks.release(shared)
            return
        table = shared + self.blocks.allocate(needed)
        for place, text in copy.items():
            self.slots[table[len(shared)], place] = text
        for i in range(prefix.length, len(tokens)):
            self.slots[table[i // SIZE], i % SIZE] = (space, *tokens[: i + 1])
        whole = len(tokens) // SIZE
        self.cache.insert(tokens[: whole * SIZE], table[:whole], space)
        self.texts.append((space, list(tokens), table))

    def grow(self, which: int, token: int) -> None:
        """One token more, into a block that only this text holds."""
        space, tokens, table = self.texts[which]
        if len(tokens) % SIZE == 0:
            if not self.room(1):
                return
            table += self.blocks.allocate(1)
        tokens.append(token)
        assert (
            sum(table[-1] in other for *_, other in self.texts) == 1
            and not self.blocks._cached[table[-1]]
        )
        self.slots[table[-1], (len(tokens) - 1) % SIZE] = (space, *tokens)

    def end(self, which: int, keep: bool) -> None:
        space, tokens, table = self.texts.pop(which)
        if keep:
            self.cache.insert(tokens, table, space)
        self.blocks.release(table)

    def room(self, count: int) -> bool:
        if count > self.blocks.free:
            self.cache.evict(count - self.blocks.free)
        return count <= self.blocks.free

    def check(self) -> None:
        """References, room, and every text's own contents."""
        owners = Counter(b for *_, table in self.texts for b in table)
        for b in range(BLOCKS):
            assert self.blocks._owners[b] == owners[b] + self.blocks._cached[b]
        assert self.blocks.used == len(owners)
        assert self.blocks.idle == sum(
            self.blocks._cached[b] and not owners[b] for b in range(BLOCKS)
        )
        assert self.blocks.free + self.blocks.used + self.blocks.idle == BLOCKS
        shared = sum(n - 1 for n in owners.values())
        assert (
            self.blocks.used == sum(-(-len(tokens) // SIZE) for _, tokens, _ in self.texts) - shared
        )
        for space, tokens, table in self.texts:
            for i in range(len(tokens)):
                assert self.slots[table[i // SIZE], i % SIZE] == (
                    space,
                    *tokens[: i + 1],
                ), "somebody else wrote here"


_tokens = st.lists(st.integers(0, 1), min_size=1, max_size=14)
_operations = st.lists(
    st.one_of(
        st.tuples(st.just("begin"), st.integers(0, 1), _tokens),
        st.tuples(
            st.just("again"), st.integers(0, 9), st.integers(0, 1), _tokens
        ),  # a text that goes on from one that there is
        st.tuples(st.just("grow"), st.integers(0, 9), st.integers(0, 1)),
        st.tuples(st.sampled_from(["end", "lose"]), st.integers(0, 9)),
        st.tuples(st.just("evict"), st.integers(0, 9)),
        st.tuples(st.just("clear")),
    ),
    max_size=40,
)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@given(operations=_operations)
@settings(max_examples=150, deadline=None)
def test_any_sequence_of_operations_keeps_the_books(kind: str, operations: list[tuple]) -> None:
    holders = Holders(kind)
    for name, *rest in operations:
        if name == "begin":
            holders.begin(*rest)
        elif name == "evict":
            before = holders.blocks.free, holders.blocks.idle
            holders.cache.evict(rest[0])
            assert holders.blocks.free - before[0] == min(
                rest[0], before[1]
            )  # as many as asked, if there are; check() sees that none was in use
        elif name == "clear":
            holders.cache.clear()
            assert holders.blocks.idle == 0 and not any(holders.blocks._cached)
            assert (
                holders.cache.match([0, 1] * 7).length
                == holders.cache.match([1, 1] * 7).length
                == 0
            )
        elif holders.texts:
            which = rest[0] % len(holders.texts)
            if name == "again":
                holders.begin(rest[1], holders.texts[which][1][:10] + rest[2][:4])
            elif name == "grow":
                holders.grow(which, rest[1])
            else:
                holders.end(which, keep=name == "end")
        holders.check()
    while holders.texts:
        holders.end(0, keep=True)
    assert holders.blocks.used == 0
    holders.cache.evict(BLOCKS)
    assert holders.blocks.free == BLOCKS


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["radix", "hash"])
@given(texts=st.lists(st.lists(st.integers(0, 1), max_size=12), max_size=8), asked=_tokens)
@settings(max_examples=200, deadline=None)
def test_the_longest_prefix_is_found(kind: str, texts: list[Tokens], asked: Tokens) -> None:
    """Against a search through everything that was ever kept; the radix tree to the token, the
    hashes to the block.
    """
    blocks = BlockManager(200, SIZE)
    cache = make_prefix_cache(kind, blocks)
    for tokens in texts:
        table = blocks.allocate(blocks.blocks_for(len(tokens)))
        cache.insert(tokens, table)
        blocks.release(table)

    def common(tokens: Tokens) -> int:
        return next(
            (i for i, (a, b) in enumerate(zip(tokens, asked, strict=False)) if a != b),
            min(len(tokens), len(asked)),
        )

    longest = max((common(t) for t in texts), default=0)
    if kind == "radix":
        expected = longest if longest >= SIZE else 0  # less than a block counts for nothing
    else:
        expected = max(
            (common(t[: len(t) // SIZE * SIZE]) // SIZE * SIZE for t in texts), default=0
        )
    assert cache.match(asked).length == expected == cache.findable(longest)


def filled(
    make: Callable[[BlockManager], PrefixCache], *texts: Tokens
) -> tuple[BlockManager, PrefixCache, list[list[int]]]:
    """A cache of blocks of 2 tokens, with texts that ended."""
    blocks = BlockManager(20, 2)
    cache, tables = make(blocks), []
    for tokens in texts:
        known = cache.match(tokens)
        shared = known.blocks[: known.length // 2]
        table = shared + blocks.allocate(blocks.blocks_for(len(tokens)) - len(shared))
        blocks.share(shared)
        cache.insert(tokens, table)
        blocks.release(table)
        tables.append(table)
    return blocks, cache, tables


@pytest.mark.parametrize("make", [RadixCache, BlockHashCache])
def test_shared_prefix_is_stored_once(make: Callable[[BlockManager], PrefixCache]) -> None:
    blocks, cache, (first, second) = filled(make, [1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 7, 8])
    assert first[:2] == second[:2] and blocks.idle == 4
    assert cache.match([1, 2, 3, 4, 7, 8]).blocks == second
    assert cache.match([1, 2, 3, 4, 5, 6, 9, 9]).blocks == first


@pytest.mark.parametrize("make", [RadixCache, BlockHashCache])
def test_eviction_is_least_recently_used_and_from_the_end_of_a_sequence(
    make: Callable[[BlockManager], PrefixCache],
) -> None:
    blocks, cache, (old, _, new) = filled(make, [1, 1, 2, 2, 3, 3], [4, 4, 5, 5], [6, 6, 7, 7])
    cache.match([1, 1, 2, 2, 3, 3])  # now the most recent
    cache.evict(3)
    assert cache.match([4, 4, 5, 5]).blocks == []
    assert cache.match([6, 6, 7, 7]).blocks == new[:1]
    assert cache.match([1, 1, 2, 2, 3, 3]).blocks == old
    cache.evict(2)
    assert cache.match([6, 6, 7, 7]).blocks == []
    assert cache.match([1, 1, 2, 2, 3, 3]).blocks == old[:2]
    assert blocks.idle == 2


@pytest.mark.parametrize("make", [RadixCache, BlockHashCache])
def test_blocks_of_a_sequence_are_not_evicted(make: Callable[[BlockManager], PrefixCache]) -> None:
    blocks, cache, (first, _) = filled(make, [1, 1, 2, 2, 3, 3], [4, 4])
    blocks.share(first[:2])
    cache.evict(20)
    assert blocks.free == 18 and blocks.idle == 0
    assert cache.match([1, 1, 2, 2, 3, 3]).blocks == first[:2]
    blocks.release(first[:2])
    cache.evict(20)
    assert blocks.free == 20


def test_the_radix_tree_finds_the_end_of_a_conversation_to_the_token() -> None:
    blocks, cache, (table, _) = filled(RadixCache, [1, 2, 3, 4, 5], [1, 2, 9])
    found = cache.match([1, 2, 3, 4, 5, 6, 7])
    assert (found.blocks, found.length) == (table, 5)
    found = cache.match([1, 2, 3, 8])  # within a full block
    assert (found.blocks, found.length) == (table[:2], 3)
    assert cache.match([1, 7]).length == 0  # less than one block
    assert blocks.idle == 4


def test_a_match_ends_within_the_closest_block_that_it_may_end_in() -> None:
    """Blocks that are not computed yet are beside the one that is."""
    _, cache, tables = filled(RadixCache, [1, 2, 6], [1, 2, 6, 7], [1, 2, 6, 8])
    old, *new = (table[-1] for table in tables)
    assert cache.match([1, 2, 6, 9]).blocks[-1] == new[1]
    found = cache.match([1, 2, 6, 9], avoid=new)
    assert (found.length, found.blocks[-1]) == (3, old)
    assert cache.match([1, 2, 6, 9], avoid=[old, *new]).length == 2


_pairs = st.tuples(st.integers(0, 3), st.integers(0, 3))


@given(keys=st.lists(_pairs, unique=True, max_size=9), avoided=st.sets(st.integers(0, 9)))
@settings(max_examples=100, deadline=None)
def test_the_closest_block_is_that_of_a_search_through_all(
    keys: list[tuple[int, int]], avoided: set[int]
) -> None:
    _, cache, tables = filled(RadixCache, [7, 7], *([7, 7, *key] for key in keys))
    avoid = [tables[at + 1][-1] for at in avoided if at < len(keys)]
    allowed = [k for k, table in zip(keys, tables[1:], strict=True) if table[-1] not in avoid]
    for asked in ((a, b) for a in range(4) for b in range(4) if (a, b) not in keys):
        expected = max((int(key[0] == asked[0]) for key in allowed), default=0)
        found = cache.match([7, 7, *asked], avoid=avoid)
        assert found.length == 2 + expected
        assert expected == 0 or found.blocks[-1] not in avoid


def test_few_of_many_blocks_that_may_not_be_used_are_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, cache, tables = filled(RadixCache, *([7, 7, first, 0] for first in range(18)))
    compared: list[object] = []
    real = radix_cache._common
    monkeypatch.setattr(radix_cache, "_common", lambda a, b: (compared.append(b), real(a, b))[1])

    class Avoid(set[int]):
        def __contains__(self, block: object) -> bool:
            compared.append(block)
            return super().__contains__(block)

    assert cache.match([7, 7, 9, 1], avoid=Avoid(table[-1] for table in tables)).length == 2
    assert len(compared) <= 4


def test_a_hash_depends_on_all_tokens_before() -> None:
    _, cache, _ = filled(BlockHashCache, [1, 1, 2, 2], [3, 3, 4, 4])
    assert cache.match([1, 1, 4, 4]).length == 2
    assert cache.match([2, 2]).length == 0


def test_the_heap_of_leaves_does_not_grow_with_use() -> None:
    _, cache, _ = filled(RadixCache, [1, 1], [2, 2])
    assert isinstance(cache, RadixCache)
    for _ in range(1000):
        cache.match([1, 1])
        cache.match([2, 2])
    assert len(cache._leaves) < 150
    cache.evict(1)
    assert cache.match([1, 1]).length == 0 and cache.match([2, 2]).length == 2


def test_kinds_are_named() -> None:
    blocks = BlockManager(1, 1)
    kinds = [make_prefix_cache(kind, blocks) for kind in KINDS]
    assert [type(k) for k in kinds] == [NoCache, RadixCache, BlockHashCache]
    with pytest.raises(ValueError, match=r"unknown prefix cache 'tree'\. Use none, radix"):
        make_prefix_cache("tree", blocks)
