"""Penalties for tokens that are there already: pure functions of a row's logits, parameters and tokens.

A row's result does not depend on the other rows: counts are whole numbers, made on the host, and every
logit is written once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from ..types import SamplingParams
from .asked import index, on


def penalise(logits: Tensor, params: Sequence[SamplingParams], history: Sequence[list[int]]) -> Tensor:
    """Logits with the penalties of each row. The repetition penalty comes first.

    Args:
        logits: [B, V] float32.
        params: of each row.
        history: the tokens of each row so far, prompt included.

    Returns:
        [B, V], a copy.
    """
    rows = [b for b, p in enumerate(params) if p.repetition_penalty != 1.0]
    if rows:
        logits = _repeated(logits, rows, params, history)
    rows = [b for b, p in enumerate(params) if p.counts_tokens]
    return _counted(logits, rows, params, history) if rows else logits


def _repeated(logits: Tensor, rows: list[int], params: Sequence[SamplingParams], history: Sequence[list[int]]) -> Tensor:
    """Positive logits of tokens that are there divided by the row's penalty, negative ones multiplied by it (arXiv:1909.05858)."""
    lengths = torch.tensor([len(history[b]) for b in rows])
    row = on(torch.tensor(rows).repeat_interleave(lengths), logits.device)
    penalty = on(torch.tensor([params[b].repetition_penalty for b in rows]).repeat_interleave(lengths), logits.device)
    token = index(list(chain.from_iterable(history[b] for b in rows)), logits.device)
    before = logits[row, token]
    # A token that is there twice is written twice, both times with the value made from the logit as it was.
    return logits.index_put((row, token), torch.where(before > 0, before / penalty, before * penalty))


def _counted(logits: Tensor, rows: list[int], params: Sequence[SamplingParams], history: Sequence[list[int]]) -> Tensor:
    """OpenAI's penalties: logit - presence_penalty - frequency_penalty * count, for tokens of the completion."""
    row: list[int] = []
    token: list[int] = []
    charge: list[float] = []
    for b in rows:
        counts = Counter(history[b][params[b].counted_from :])
        row += [b] * len(counts)
        token += counts.keys()
        charge += [params[b].presence_penalty + params[b].frequency_penalty * n for n in counts.values()]
    at = (index(row, logits.device), index(token, logits.device))
    return logits.index_put(at, logits[at] - on(torch.tensor(charge, dtype=logits.dtype), logits.device))
