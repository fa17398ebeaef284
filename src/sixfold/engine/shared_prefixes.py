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
    """table: [B, M] blocks. Groups that save many block reads, cut into lines of at most `rows` members. Only blocks that are full for all members
    count: so it holds as long as the tables stay, however far positions [B] go on."""
    full = (positions + 1) // block_size
    own = np.zeros(len(table), dtype=np.int64)
    members, lengths = [], []
    for depth, group in _groups(table, full, np.arange(len(table)), 0)[0]:
        own[group] = depth * block_size
        for at in range(0, len(group), rows):
            part = group[at : at + rows]
            members.append(np.pad(part, (0, rows - len(part)), constant_values=-1))
            lengths.append(depth * block_size)
    return SharedPrefixes(np.array(members, dtype=np.int64).reshape(-1, rows), np.array(lengths, dtype=np.int64), own)


Group = tuple[int, np.ndarray]
"""How many first blocks these rows of the table share."""


def _groups(table: np.ndarray, full: np.ndarray, rows: np.ndarray, depth: int) -> tuple[list[Group], np.ndarray]:
    """Rows that agree up to `depth` -> groups that save block reads, (rows - 1) * depth each, and the rows left over.

    From the ends to the beginnings: where rows part, those left over form a group, joined by each group from further down that saves more in it.
    """
    if len(rows) < 2:
        return [], rows
    low = int(full[rows].min())
    differs = (table[rows, depth:low] != table[rows[:1], depth:low]).any(0)
    depth = depth + int(differs.argmax()) if differs.any() else low
    going_on = rows[full[rows] > depth]
    next_blocks = table[going_on, depth] if len(going_on) else going_on
    below = [_groups(table, full, going_on[next_blocks == block], depth + 1) for block in np.unique(next_blocks)]
    groups = [group for found, _ in below for group in found]
    left = np.concatenate([rows[full[rows] <= depth], *(rest for _, rest in below)])
    joining = [len(group) * depth > (len(group) - 1) * deeper for deeper, group in groups]
    gain = (len(left) - 1) * depth + sum(len(g) * depth - (len(g) - 1) * d for (d, g), joins in zip(groups, joining, strict=True) if joins)
    if gain <= 0:
        return groups, left
    joined = np.concatenate([left, *(group for (_, group), joins in zip(groups, joining, strict=True) if joins)])
    return [*(g for g, joins in zip(groups, joining, strict=True) if not joins), (depth, np.sort(joined))], rows[:0]
