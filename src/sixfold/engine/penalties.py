"""Repetition, presence and frequency penalties: pure functions of a row's logits, parameters,
tokens.

The result of a row does not depend on the other rows: counts are integers, computed on the host,
and no logit is accumulated into.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from ..types import SamplingParams
from .sampling_batch import index, on


def penalise(
    logits: Tensor, params: Sequence[SamplingParams], history: Sequence[list[int]]
) -> Tensor:
    """Apply the penalties of each row. The repetition penalty comes first.

    Args:
        logits: [B, V] float32.
        history: tokens of each row so far, including the prompt.

    Returns:
        [B, V]; a copy if any row has a penalty.
    """
    rows = [b for b, p in enumerate(params) if p.repetition_penalty != 1.0]
    if rows:
        logits = _apply_repetition(logits, rows, params, history)
    rows = [b for b, p in enumerate(params) if p.counts_tokens]
    return _apply_counts(logits, rows, params, history) if rows else logits


def _apply_repetition(
    logits: Tensor, rows: list[int], params: Sequence[SamplingParams], history: Sequence[list[int]]
) -> Tensor:
    """Repetition penalty (arXiv:1909.05858) for tokens that occur in the history.

    Positive logits are divided by the row's penalty, and negative ones are multiplied by it.
    """
    lengths = torch.tensor([len(history[b]) for b in rows])
    row = on(torch.tensor(rows).repeat_interleave(lengths), logits.device)
    penalty = on(
        torch.tensor([params[b].repetition_penalty for b in rows]).repeat_interleave(lengths),
        logits.device,
    )
    token = index(list(chain.from_iterable(history[b] for b in rows)), logits.device)
    before = logits[row, token]
    # A token that occurs twice is written twice, with the same value: both come from the old logit.
    return logits.index_put(
        (row, token), torch.where(before > 0, before / penalty, before * penalty)
    )


def _apply_counts(
    logits: Tensor, rows: list[int], params: Sequence[SamplingParams], history: Sequence[list[int]]
) -> Tensor:
    """OpenAI's penalties: logit - presence_penalty - frequency_penalty * count.

    Only tokens of the completion count.
    """
    row: list[int] = []
    token: list[int] = []
    charge: list[float] = []
    for b in rows:
        counts = Counter(history[b][params[b].counted_from :])
        row += [b] * len(counts)
        token += counts.keys()
        charge += [
            params[b].presence_penalty + params[b].frequency_penalty * n for n in counts.values()
        ]
    at = (index(row, logits.device), index(token, logits.device))
    return logits.index_put(
        at, logits[at] - on(torch.tensor(charge, dtype=logits.dtype), logits.device)
    )
