"""Blocks are never lost and never owned twice, whatever the order of calls."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sixfold.engine.block_manager import BlockManager


@pytest.mark.slow
@given(
    count=st.integers(1, 12),
    calls=st.lists(
        st.tuples(st.sampled_from(["allocate", "share", "release"]), st.integers(0, 5)), max_size=60
    ),
)
def test_every_block_is_free_or_owned_as_often_as_it_was_handed_out(
    count: int, calls: list[tuple[str, int]]
) -> None:
    manager = BlockManager(count, block_size=4)
    holders: list[list[int]] = []  # one list of blocks for each owner: the obvious bookkeeping
    for call, n in calls:
        if call == "allocate":
            owned = {b for h in holders for b in h}
            if n > manager.free:
                with pytest.raises(RuntimeError, match="blocks requested"):
                    manager.allocate(n)
                continue
            blocks = manager.allocate(n)
            assert len(set(blocks)) == n and not owned & set(blocks)
            assert all(0 <= b < count for b in blocks)
            holders.append(blocks)
        elif holders and call == "share":
            holders.append(list(holders[n % len(holders)]))
            manager.share(holders[-1])
        elif holders:
            manager.release(holders.pop(n % len(holders)))
        owners = Counter(b for h in holders for b in h)
        assert manager.free + len(owners) == count
    for blocks in holders:
        manager.release(blocks)
    assert manager.free == count
    assert sorted(manager.allocate(count)) == list(range(count))


def test_a_shared_block_is_freed_by_its_last_owner() -> None:
    manager = BlockManager(2, block_size=4)
    blocks = manager.allocate(2)
    manager.share(blocks[:1])
    manager.release(blocks)
    assert manager.free == 1
    manager.release(blocks[:1])
    assert manager.free == 2


def test_a_block_released_twice_is_an_error() -> None:
    manager = BlockManager(2, block_size=4)
    blocks = manager.allocate(1)
    manager.release(blocks)
    with pytest.raises(RuntimeError, match="more often than it was shared"):
        manager.release(blocks)


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_blocks_for_rounds_up(tokens: int, blocks: int) -> None:
    assert BlockManager(8, block_size=4).blocks_for(tokens) == blocks
