"""Which running sequences begin with the same cache blocks, so that a decode step reads those keys and values once for all of them.

The blocks say it: the samples of a prompt share its full ones, and the prefix cache makes prompts share a beginning. Attention over a shared part is
done for all queries of its members together, and joined with each sequence's attention over the rest by their log-sum-exps (Juravsky et al. 2024,
"Hydragen"; Ye et al. 2024, cascade inference).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class SharedPrefixes(NamedTuple):
    """members: [U, R] rows of the block table, those of a line share their first `lengths` [U] tokens; -1 where there are fewer than R.
    own: [B] where each sequence's own part begins; 0 if it is in no line."""

    members: np.ndarray
    lengths: np.ndarray
    own: np.ndarray

    def padded(self) -> SharedPrefixes:
        """With empty lines behind, so that their number repeats from step to step: a power of two, at least one for 8 rows of the table; or none."""
        lines = 1 << (max(len(self.members), len(self.own) // 8) - 1).bit_length() if len(self.members) else 0
        short = (0, lines - len(self.members))
        return SharedPrefixes(np.pad(self.members, (short, (0, 0)), constant_values=-1), np.pad(self.lengths, short), self.own)


def find_shared_prefixes(table: np.ndarray, positions: np.ndarray, block_size: int, rows: int = 8) -> SharedPrefixes:
    """table: [B, M] blocks. Lines that save many block reads, (members - 1) * length each, of at most `rows` members. Only blocks that are full for
    all members count: so it holds as long as the tables stay, however far positions [B] go on."""
    own, members, lengths = np.zeros(len(table), dtype=np.int64), [], []
    full = (positions + 1) // block_size
    begun = np.where(np.arange(table.shape[1]) < full[:, None], table, np.iinfo(np.int64).max)
    order = np.lexsort(begun.T[::-1])  # what begins alike stands together, the shortest last
    alike = [*(begun[order[1:]] == begun[order[:-1]]).cumprod(1).sum(1).tolist(), 0, 0]  # blocks shared with the next one; behind the last nothing is
    depths = [*full[order].tolist(), 0, 0]
    start, depth = 0, depths[0]
    for i in range(1, len(order) + 1):
        count, joined, after = i - start, min(alike[i - 1], depth, depths[i]), min(alike[i], depths[i], depths[i + 1])
        # Against stopping here, with what the next one would share with the one behind it.
        if joined and count < rows and (count + 1) * joined >= (count - 1) * depth + max(joined, after):
            depth = joined
            continue
        if count > 1:
            own[order[start:i]] = depth * block_size
            members.append(np.pad(order[start:i], (0, rows - count), constant_values=-1))
            lengths.append(depth * block_size)
        start, depth = i, depths[i]
    return SharedPrefixes(np.array(members, dtype=np.int64).reshape(-1, rows), np.array(lengths, dtype=np.int64), own)


QUERIES = 8
"""Neighbouring tokens of a prompt that read its keys together: as many as the members of a prefix, so
that one compiled kernel serves both."""


def neighbours(positions: np.ndarray, owner: np.ndarray, padding: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Which rows of a prefill read their keys together: neighbours in a text, cut at multiples of QUERIES.

    Args:
        positions: [N] of each row in its text, rising by one within a text.
        owner: [N] whose text it is.
        padding: rows behind them, at position 0 of no text.

    Returns:
        Row numbers [U, QUERIES], -1 behind them; how many keys the last of each line sees [U].
    """
    order = np.append(positions, np.arange(padding)) // QUERIES
    owner = np.append(owner, np.full(padding, -1))
    first = np.ones(len(order), dtype=bool)
    first[1:] = (owner[1:] != owner[:-1]) | (order[1:] != order[:-1])
    starts, unit = np.flatnonzero(first), np.cumsum(first) - 1
    members = np.full((len(starts), QUERIES), -1, dtype=np.int64)
    rows = np.arange(len(order))
    members[unit, rows - starts[unit]] = rows
    seen = np.append(positions, np.zeros(padding, dtype=np.int64))
    return members, np.maximum.reduceat(seen, starts) + 1
