"""Find running sequences that share their first blocks, so that a decode step reads these once.

The block tables show which prefixes are shared: samples of one prompt share its full blocks, and
prompts share blocks through the prefix cache. Attention over a shared prefix is computed for all
queries of its members together. It is merged with each sequence's attention over the remaining keys
through their log-sum-exps (Juravsky et al. 2024, "Hydragen"; Ye et al. 2024, cascade inference).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

ROWS = 8
"""Most members of a group of sequences with a common prefix (R)."""


class SharedPrefixes(NamedTuple):
    """Groups of sequences that share a prefix.

    Attributes:
        members: [U, R] rows of the block table, one group per line; -1 fills groups of fewer than
            R.
        lengths: [U] tokens in each group's shared prefix.
        own: [B] position where each sequence's own part begins; 0 if it is in no group.
    """

    members: np.ndarray
    lengths: np.ndarray
    own: np.ndarray

    def padded(self) -> SharedPrefixes:
        """Add empty groups so that shapes repeat and CUDA graphs are reused.

        The number of groups becomes a power of two, and at least one per 8 rows of the table.
        Without any group it stays 0.
        """
        lines = (
            1 << (max(len(self.members), len(self.own) // 8) - 1).bit_length()
            if len(self.members)
            else 0
        )
        short = (0, lines - len(self.members))
        return SharedPrefixes(
            np.pad(self.members, (short, (0, 0)), constant_values=-1),
            np.pad(self.lengths, short),
            self.own,
        )


def find_shared_prefixes(
    table: np.ndarray, positions: np.ndarray, block_size: int
) -> SharedPrefixes:
    """Greedily group sequences so that many block reads are saved: (members - 1) * length per
    group.

    Only blocks that are full for all members are shared. So the groups stay valid while the tables
    stay, even as the positions advance.

    Args:
        table: [B, M] block tables.
        positions: [B] position of each sequence's newest token.
        block_size: tokens per block.

    Returns:
        The groups, without padding.
    """
    own, members, lengths = np.zeros(len(table), dtype=np.int64), [], []
    full = (positions + 1) // block_size
    begun = np.where(np.arange(table.shape[1]) < full[:, None], table, np.iinfo(np.int64).max)
    order = np.lexsort(begun.T[::-1])  # equal prefixes become neighbours, the shortest last
    # Number of blocks that each sequence shares with the next one in this order.
    alike = [*(begun[order[1:]] == begun[order[:-1]]).cumprod(1).sum(1).tolist(), 0, 0]
    depths = [*full[order].tolist(), 0, 0]
    start, depth = 0, depths[0]
    for i in range(1, len(order) + 1):
        count, joined, after = (
            i - start,
            min(alike[i - 1], depth, depths[i]),
            min(alike[i], depths[i], depths[i + 1]),
        )
        # Join the next sequence if that saves at least as much as ending the group here, counting
        # what the next sequence could then share with the one after it.
        if (
            joined
            and count < ROWS
            and (count + 1) * joined >= (count - 1) * depth + max(joined, after)
        ):
            depth = joined
            continue
        if count > 1:
            own[order[start:i]] = depth * block_size
            members.append(np.pad(order[start:i], (0, ROWS - count), constant_values=-1))
            lengths.append(depth * block_size)
        start, depth = i, depths[i]
    return SharedPrefixes(
        np.array(members, dtype=np.int64).reshape(-1, ROWS), np.array(lengths, dtype=np.int64), own
    )


QUERIES = 8
"""Neighbouring prompt tokens that read keys together. Equal to the maximum number of members of a
shared prefix, so that one compiled kernel serves both."""


def neighbours(
    positions: np.ndarray, owner: np.ndarray, padding: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Group neighbouring rows of a prefill, which read their keys together.

    Groups are cut where position // QUERIES changes, and where the prompt changes.

    Args:
        positions: [N] position of each row in its prompt, increasing by one within a prompt.
        owner: [N] index of the prompt.
        padding: number of padding rows at the end; they have position 0 and belong to no prompt.

    Returns:
        Row numbers [U, QUERIES], filled up with -1, and the number of keys that the last row of
        each group sees [U].
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
