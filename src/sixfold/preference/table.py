"""Which completions of a step form pairs: from grades, on the host, before rows are packed."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..batch import Batch
from .pairs import Pairs, Unpaired


def pair_table(group: Tensor, grades: Tensor) -> tuple[Tensor, Tensor]:
    """All pairs of a step: of two completions of one group, the one with the higher grade wins.

    A pair is found from its winner, whose row of the table says where the loser is. So the table
    can be indexed by rows as the other tensors of a batch, as long as the rows of a group stay
    together and in order.

    Args:
        group: [B] group of each completion, on the host.
        grades: [B] grades, on the host.

    Returns:
        (table, places). table: [B, M, 3] int64; for each pair the loser's row relative to the
        winner's, the pair's number in the step, and the number of pairs of its group; (0, 0, 0) is
        no pair. places: [N] index in the flat table of the pair of each number.
    """
    rows: list[list[tuple[int, int, int]]] = [[] for _ in group]
    members: dict[int, list[int]] = {}
    for row, number in enumerate(group.tolist()):
        members.setdefault(number, []).append(row)
    value, found = grades.tolist(), list[tuple[int, int]]()
    for own in members.values():
        pairs = [(a, b) for a in own for b in own if value[a] > value[b]]
        for better, worse in pairs:
            found.append((better, len(rows[better])))
            rows[better].append((worse - better, len(found) - 1, len(pairs)))
    width = max(1, *map(len, rows))
    table = torch.zeros(len(rows), width, 3, dtype=torch.int64)
    for better, wins in enumerate(rows):
        if wins:
            table[better, : len(wins)] = torch.tensor(wins)
    places = [better * width + column for better, column in found]
    return table, torch.tensor(places, dtype=torch.int64)


def pairs_of(
    batch: Batch, table: Tensor, logp: Tensor, ref_logp: Tensor | None, heads: bool
) -> Pairs:
    """Pairs of some rows of a step: [R * M], of which those with weight 0 are none.

    An entry that is no pair compares a row with itself, so its loss is finite, and no number of
    pairs has to be read from a GPU.

    Args:
        batch: R rows of the step.
        table: [R, M, 3] their rows of `pair_table`.
        logp: [R, T] log-probs under the policy, 0 where mask is False.
        ref_logp: the same under the reference, or None.
        heads: whether to add the sums over the first tokens.
    """
    offset, _, of_group = table.unbind(-1)
    better = torch.arange(len(table), device=table.device)[:, None].expand_as(offset).reshape(-1)
    worse = better + offset.reshape(-1)
    real = of_group.reshape(-1) > 0
    tokens = batch.mask.sum(-1).to(logp.dtype)
    weight = torch.where(real, 1.0 / of_group.reshape(-1).clamp(min=1).to(logp.dtype), 0.0)
    both = [logp] if ref_logp is None else [logp, ref_logp]
    sums = [each.sum(-1) for each in both]
    found = Pairs(
        chosen=sums[0][better],
        rejected=sums[0][worse],
        chosen_tokens=tokens[better],
        rejected_tokens=tokens[worse],
        ref_chosen=sums[1][better] if len(sums) > 1 else None,
        ref_rejected=sums[1][worse] if len(sums) > 1 else None,
        weight=weight,
    )
    if not heads:
        return found
    place = batch.mask.cumsum(-1)
    shorter = torch.minimum(found.chosen_tokens, found.rejected_tokens)[:, None]
    sides = [
        (each[side] * (place[side] <= shorter)).sum(-1) for each in both for side in (better, worse)
    ]
    names = ("chosen_head", "rejected_head", "ref_chosen_head", "ref_rejected_head")
    return replace(found, **dict(zip(names, sides, strict=False)))


def single_completions(
    batch: Batch, logp: Tensor, ref_logp: Tensor, weight: Tensor, mismatched: Tensor | None = None
) -> Unpaired:
    """Completions of some rows of a step, liked if their grade is above 0.

    Args:
        batch: R rows of the step.
        logp: [R, T] log-probs under the policy, 0 where mask is False.
        ref_logp: the same under the reference.
        weight: [R] weight of each row in the step.
        mismatched: as for `Unpaired`.
    """
    return Unpaired(
        logp.sum(-1),
        ref_logp.sum(-1),
        batch.scores > 0,
        weight,
        mismatched,
    )
