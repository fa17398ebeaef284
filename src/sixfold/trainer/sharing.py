"""Plan of a pass over a batch: updates, ranks and micro-batches.

Every rank has the whole batch, so all ranks compute the same shares without communication. Rows of
a group stay on one rank: they share a computed prompt, and a unit (such as a preference pair) is
part of a group. Groups are balanced by computed tokens. Ranks wait for each other in every forward
and backward pass, so all run equally many. A rank with fewer micro-batches gets empty ones.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..batch import Batch
from ..ranks import ALONE, Ranks
from .packing import microbatches, shared_key, units


def plan_updates(
    batch: Batch,
    weighs: Sequence[int],
    minibatch: Sequence[int],
    max_tokens: int,
    share_prefix: bool,
    ranks: Ranks = ALONE,
) -> list[list[list[int]]]:
    """Plan this rank's part of one pass over a batch: rows by update and micro-batch.

    The plan is complete before the first backward pass and does not depend on any loss or gradient.
    So ranks agree on the number of backward passes.

    Args:
        weighs: for each row, whether it has a nonzero weight. A unit is computed if any of its rows
            has one.
        minibatch: number of each row's mini-batch (`batch.minibatch`, on the host).
        max_tokens: maximum computed tokens per micro-batch.
        share_prefix: whether a shared prompt counts only once per micro-batch.

    Returns:
        Micro-batches of each update, in mini-batch order. Empty mini-batches are omitted.

    Raises:
        ValueError: if a mini-batch splits a unit.
    """
    rows: dict[int, list[int]] = {}
    for unit in units(batch.at_host(), range(len(weighs))):
        if len({minibatch[b] for b in unit}) > 1:
            raise ValueError(f"batch.minibatch splits the unit of rows {unit}")
        if any(weighs[b] for b in unit):
            rows.setdefault(minibatch[unit[0]], []).extend(unit)
    return [own_microbatches(batch, rows[m], max_tokens, share_prefix, ranks) for m in sorted(rows)]


def own_microbatches(
    batch: Batch, rows: Sequence[int], max_tokens: int, share_prefix: bool, ranks: Ranks = ALONE
) -> list[list[int]]:
    """Micro-batches of this rank. With several ranks, all ranks have the same number.

    Args:
        max_tokens: maximum computed tokens per micro-batch.
        share_prefix: whether a shared prompt counts only once per micro-batch.

    Returns:
        Rows of each micro-batch. Empty micro-batches have no rows.
    """
    of_ranks = [
        microbatches(batch, share, max_tokens, share_prefix)
        for share in shares(batch, rows, share_prefix, ranks.size)
    ]
    own, most = of_ranks[ranks.rank], max(map(len, of_ranks))
    return own + [[] for _ in range(most - len(own))]


def shares(batch: Batch, rows: Sequence[int], share_prefix: bool, size: int) -> list[list[int]]:
    """Rows of each rank. On every rank they are in the order of `rows`.

    Groups are assigned from the largest to the smallest. Each goes to the rank that has the fewest
    tokens so far.

    Args:
        rows: rows of the batch to share out.
        share_prefix: whether a shared prompt is computed only once.
        size: number of ranks.
    """
    if size == 1:
        return [list(rows)]
    host = batch.at_host()
    group = host.group.tolist()
    whole: dict[int, list[int]] = {}
    for unit in units(host, rows):
        whole.setdefault(group[unit[0]], []).extend(unit)
    cost = {g: _tokens(host, members, share_prefix) for g, members in whole.items()}
    loads, of_ranks = [0] * size, [list[int]() for _ in range(size)]
    for g in sorted(whole, key=lambda g: -cost[g]):
        rank = loads.index(min(loads))
        loads[rank] += cost[g]
        of_ranks[rank] += whole[g]
    place = {b: i for i, b in enumerate(rows)}
    return [sorted(share, key=place.__getitem__) for share in of_ranks]


def _tokens(host: Batch, rows: Sequence[int], share_prefix: bool) -> int:
    """Number of tokens to compute if the rows form one micro-batch."""
    total, seen = 0, set[bytes]()
    for b in rows:
        key = shared_key(host, b) if share_prefix else b""
        total += int(host.lengths[b]) - (int(host.prompt_lengths[b]) if key in seen else 0)
        if key:
            seen.add(key)
    return total
