"""Conversion between layouts of a tensor: exact, with every value sent once."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.rank_processes import on_ranks
from torch import Tensor

from sixfold.ranks import Ranks
from sixfold.trainer.resharding import (
    Box,
    Layout,
    at,
    empty_box,
    extent,
    moves,
    reshard,
    split,
    whole_box,
)


def rows(shape: tuple[int, ...], parts: int) -> list[Box]:
    """Layout of FSDP."""
    return split(whole_box(shape), 0, parts)


def grid(shape: tuple[int, ...], dim: int, tensor: int, data: int) -> list[Box]:
    """Layout of FSDP on tensor parallelism that divides dimension `dim`."""
    groups = [split(part, 0, data) for part in split(whole_box(shape), dim, tensor)]
    return [groups[t][d] for d in range(data) for t in range(tensor)]


def parts_of(tensor: Tensor, layout: Layout) -> list[Tensor]:
    return [tensor[at(box, whole_box(tensor.shape))].clone() for box in layout]


def carried_out(parts: list[Tensor], source: Layout, target: Layout) -> list[Tensor]:
    """The moves between two layouts, in one process. Every value must be written once."""
    found = [torch.full(extent(box), -1.0) for box in target]
    for move in moves(source, target):
        place = found[move.target][at(move.box, target[move.target])]
        assert bool((place == -1.0).all()), "written twice"
        place.copy_(parts[move.source][at(move.box, source[move.source])])
    return found


sizes = st.integers(1, 9)


@settings(deadline=None, max_examples=60)
@given(st.tuples(sizes, sizes), sizes, sizes, st.integers(0, 1))
def test_fsdp_to_tensor_parallel_and_back(
    shape: tuple[int, int], shards: int, tensor: int, dim: int
) -> None:
    """For every number of FSDP and tensor ranks, even if one number does not divide the other."""
    ranks = max(shards, tensor)
    given = torch.arange(1.0, 1.0 + math.prod(shape)).view(shape)
    nothing = empty_box(shape)
    source = rows(shape, shards) + [nothing] * (ranks - shards)
    target = split(whole_box(shape), dim, tensor) + [nothing] * (ranks - tensor)
    parts = parts_of(given, source)
    found = carried_out(parts, source, target)
    expected = [chunk.clone() for chunk in given.chunk(tensor, dim)]
    for ours, theirs in zip(found, expected, strict=False):
        assert torch.equal(ours, theirs)
    assert all(not part.numel() for part in found[len(expected) :])
    back = carried_out(found, target, source)
    assert all(torch.equal(a, b) for a, b in zip(back, parts, strict=True))


@settings(deadline=None, max_examples=60)
@given(st.tuples(sizes, sizes), sizes, sizes, st.integers(0, 1))
def test_nothing_is_sent_that_a_rank_has_already(
    shape: tuple[int, int], data: int, tensor: int, dim: int
) -> None:
    source, target = grid(shape, dim, tensor, data), rows(shape, data * tensor)
    plan = moves(source, target)
    assert sum(math.prod(extent(m.box)) for m in plan) == math.prod(shape)
    assert [m for m in moves(source, source) if m.source != m.target] == []
    for move in plan:  # inside both boxes, so that a move never takes another's values
        for box in (source[move.source], target[move.target]):
            assert all(a <= c < d <= b for (a, b), (c, d) in zip(box, move.box, strict=True))


def test_ranks_with_equal_parts_divide_the_sending() -> None:
    whole = whole_box((6,))
    source, target = [whole, whole, (0, 0), (0, 0)], [whole] * 4
    source[2:] = [empty_box((6,))] * 2
    assert {m.target: m.source for m in moves(source, target)} == {0: 0, 1: 1, 2: 0, 3: 1}


def test_layout_without_some_values_is_refused() -> None:
    with pytest.raises(ValueError, match="rank 1 needs 2 values, but the ranks have 1"):
        moves([((0, 1),), ((1, 3),)], [((0, 3),), ((2, 4),)])


def converted(ranks: Ranks) -> list[str]:
    """Conversions on real ranks that differ from the expected."""
    wrong = []
    for shape in ((8, 12), (7, 5), (1, 3), (6,)):
        full = torch.arange(1.0, 1.0 + math.prod(shape)).view(shape)
        whole = [whole_box(shape)] * ranks.size
        only = [empty_box(shape)] * (ranks.size - 1) + whole[:1]
        dims = range(len(shape))
        layouts = [rows(shape, ranks.size), whole, only]
        layouts += [split(whole_box(shape), dim, ranks.size) for dim in dims]
        layouts += [grid(shape, dim, 2, ranks.size // 2) for dim in dims]
        for source, target in [*pairwise(layouts), *pairwise(layouts[::-1])]:
            own = parts_of(full, source)[ranks.rank]
            if not torch.equal(reshard(own, source, target), parts_of(full, target)[ranks.rank]):
                wrong.append(f"{shape}: {source} to {target}")
    try:
        reshard(full[:1], layouts[1], layouts[0])
    except ValueError:
        return wrong
    return [*wrong, "a part of another shape"]


def test_ranks_exchange_their_parts() -> None:
    assert on_ranks(4, converted) == [[]] * 4
