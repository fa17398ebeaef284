"""Sequences that share their first blocks: which are grouped, how many key reads that saves, and
that attention is the same.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from cascade import cascade_attention
from hypothesis import given, settings
from hypothesis import strategies as st

from sixfold.engine.shared_prefixes import QUERIES, SharedPrefixes, find_shared_prefixes, neighbours
from sixfold.kernels.attention import AttentionLayer


def keys_read(shared: SharedPrefixes, positions: np.ndarray) -> int:
    """Keys that one layer's attention reads for queries at `positions` [B]; without sharing they
    would be (positions + 1).sum().
    """
    return int(shared.lengths.sum() + (positions + 1 - shared.own).sum())


def _partitions(items: list[int]) -> Iterator[list[list[int]]]:
    if not items:
        yield []
        return
    for rest in _partitions(items[1:]):
        yield [[items[0]], *rest]
        for i, group in enumerate(rest):
            yield [*rest[:i], [items[0], *group], *rest[i + 1 :]]


def _common(table: np.ndarray, full: np.ndarray, group: list[int]) -> int:
    low = min(full[group])
    same = [len({int(table[row, c]) for row in group}) == 1 for c in range(low)]
    return same.index(False) if False in same else low


@pytest.mark.slow
@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 1), min_size=4, max_size=4), st.integers(0, 19)),
        min_size=1,
        max_size=6,
    )
)
@settings(max_examples=150, deadline=None)
def test_no_grouping_saves_much_more(rows: list[tuple[list[int], int]]) -> None:
    """Against all partitions; the choice is greedy. Blocks are named by what stands before them, as
    in a real cache.
    """
    names: dict[tuple[int, ...], int] = {}
    table = np.array(
        [[names.setdefault(tuple(path[: c + 1]), len(names)) for c in range(4)] for path, _ in rows]
    )
    positions = np.array([position for _, position in rows])
    full = (positions + 1) // 5
    shared = find_shared_prefixes(table, positions, 5)
    for line, length in zip(shared.members, shared.lengths, strict=True):
        group = [int(row) for row in line if row >= 0]
        assert len(group) > 1 and 0 < length <= 5 * _common(table, full, group)
        assert all(shared.own[row] == length for row in group)
    grouped = shared.members[shared.members >= 0].tolist()
    assert len(grouped) == len(set(grouped)) and all(
        shared.own[row] == 0 for row in range(len(rows)) if row not in grouped
    )
    saved = max(
        sum((len(g) - 1) * 5 * _common(table, full, g) for g in groups)
        for groups in _partitions(list(range(len(rows))))
    )
    assert 2 / 3 * saved <= (positions + 1).sum() - keys_read(shared, positions) <= saved


def test_a_prompt_is_read_once_for_all_its_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """16 samples of a prompt of 512 tokens, 40 tokens further, blocks of 16: 512 + 16 * 40 keys
    instead of 16 * 552; twice 512 in lines of 8.
    """
    table = np.concatenate(
        [np.tile(np.arange(32), (16, 1)), 32 + np.arange(16 * 3).reshape(16, 3)], axis=1
    )
    positions = np.full(16, 551)
    assert keys_read(find_shared_prefixes(table, positions, 16), positions) == 2 * 512 + 16 * 40
    monkeypatch.setattr("sixfold.engine.shared_prefixes.ROWS", 16)
    assert keys_read(find_shared_prefixes(table, positions, 16), positions) == 512 + 16 * 40


@pytest.mark.parametrize(
    ("system", "prompt", "samples", "saved"),
    [
        (4, 8, 4, 2 * 3 * 12),  # by prompt; all eight together would save 7 * 4
        (40, 1, 2, 3 * 40),  # all together; by prompt 2 * 41
        (40, 1, 1, 40),
        (0, 3, 2, 2 * 3),
    ],
)
def test_system_prompts_and_prompts_are_shared_where_it_saves_more(
    system: int, prompt: int, samples: int, saved: int
) -> None:
    """Two prompts behind one system prompt, in blocks, and two blocks of their own for
    each sample.
    """
    parts = [
        np.tile(np.arange(system), (2 * samples, 1)),
        np.repeat(100 + np.arange(2 * prompt).reshape(2, -1), samples, axis=0),
    ]
    table = np.concatenate([*parts, 200 + np.arange(4 * samples).reshape(-1, 2)], axis=1)
    positions = np.full(len(table), table.shape[1] * 4 - 3)
    assert (
        keys_read(find_shared_prefixes(table, positions, 4), positions)
        == (positions + 1).sum() - 4 * saved
    )


SINKS = torch.tensor([-2.0, 0.0, 1.5, 3.0, -0.5, 2.0])


@pytest.mark.parametrize(
    "kernel",
    [
        AttentionLayer(0),
        AttentionLayer(0, scale=0.3, window=30),
        AttentionLayer(0, softcap=2.0),
        AttentionLayer(0, window=30, sinks=SINKS),
    ],
    ids=["plain", "window", "softcap", "sinks"],
)
def test_attention_in_parts_is_attention(kernel: AttentionLayer) -> None:
    """Against one attention over everything, by PyTorch's own code."""
    torch.manual_seed(0)
    table = np.array([[0, 1, 2, 3], [0, 1, 4, 5], [0, 6, 7, 8], [9, 10, 11, 12], [0, 1, 13, 14]])
    positions = np.array([60, 39, 64, 20, 32])
    pool = torch.randn(2, 2, 15, 16, 8)  # keys and values, 2 heads, 15 blocks of 16 tokens
    keys, values = pool[:, :, table].flatten(3, 4).transpose(1, 2)
    q = torch.randn(5, 6, 8)
    shared = find_shared_prefixes(table, positions, 16)
    assert keys_read(shared, positions) == (positions + 1).sum() - 2 * 32
    at = torch.arange(64)
    seen = at <= torch.tensor(positions)[:, None]
    if kernel.window:
        seen &= torch.tensor(positions)[:, None] - at < kernel.window
    expected = kernel.attend(q[:, :, None], keys, values, seen[:, None, None])[:, :, 0]
    nothing = SharedPrefixes(
        np.zeros((0, 8), dtype=int), np.zeros(0, dtype=int), np.zeros(5, dtype=int)
    )
    for how in (shared, nothing):
        out = cascade_attention(q, keys, values, torch.tensor(positions), how, kernel)
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("groups", "alone", "lines"), [(0, 20, 0), (1, 0, 1), (1, 30, 4), (3, 0, 4), (5, 50, 8)]
)
def test_lines_come_in_few_numbers(groups: int, alone: int, lines: int) -> None:
    """None, or a power of two that is an eighth of the rows at least. Lines without members say
    nothing of any row.
    """
    together = [[100 * g, 100 * g + 1, 1000 + 10 * g + i] for g in range(groups) for i in range(2)]
    table = np.array(together + [[5000 + i, 6000 + i, 7000 + i] for i in range(alone)])
    shared = find_shared_prefixes(table, np.full(len(table), 40), 16)
    padded = shared.padded()
    assert (
        padded.members.shape == (lines, 8)
        and padded.lengths.shape == (lines,)
        and len(shared.members) == groups
    )
    np.testing.assert_array_equal(padded.members[:groups], shared.members)
    np.testing.assert_array_equal(padded.lengths[:groups], shared.lengths)
    assert (
        (padded.members[groups:] == -1).all()
        and (padded.lengths[groups:] == 0).all()
        and padded.own is shared.own
    )


@given(st.data())
def test_neighbours_of_a_prompt_read_together_and_every_row_once(data: st.DataObject) -> None:
    """Each line is of one text and within one multiple of QUERIES; padding sees one key."""
    spans = data.draw(
        st.lists(st.tuples(st.integers(0, 40), st.integers(1, 30)), min_size=1, max_size=4)
    )
    padding = data.draw(st.integers(0, 15))
    positions = np.concatenate([np.arange(start, start + count) for start, count in spans])
    owner = np.repeat(np.arange(len(spans)), [count for _, count in spans])
    members, ends = neighbours(positions, owner, padding)
    found = members[members >= 0]
    assert found.tolist() == list(range(len(positions) + padding)) and (members[:, 0] >= 0).all()
    for line, end in zip(members, ends, strict=True):
        rows = line[line >= 0]
        if rows[0] >= len(positions):
            assert end == 1
            continue
        assert len(set(owner[rows])) == 1 and len(set(positions[rows] // QUERIES)) == 1
        assert end == positions[rows].max() + 1
    assert len(members) <= sum(-(-count // QUERIES) + 1 for _, count in spans) + -(
        -padding // QUERIES
    )
