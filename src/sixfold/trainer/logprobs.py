"""Log-probs and entropies of scored tokens, a chunk of positions at a time: logits exist for one chunk, never as [B, T, V].

Where there are several chunks each is checkpointed: its logits are computed again in the backward pass, where they would otherwise all be kept.

A token that was drawn from a truncated distribution is scored under the same one: of the weights at hand, over the set that the sampler kept. Every
model that goes through here, the reference and the proximal policy too, so ratios and KL compare distributions over one set.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from ..batch import Batch, KeptSets
from ..model.causal_lm import head_logits, hidden_states
from .packing import PackedRow, microbatches, pack


@dataclass(frozen=True)
class Scoring:
    """How log-probs are computed: the sampling temperature, positions a chunk, and the precision of the body (None: the weights' own).

    entropy_gradient: the entropies carry gradients too, which an entropy bonus needs.
    """

    temperature: float = 1.0
    chunk: int = 1024
    autocast: torch.dtype | None = None
    entropy_gradient: bool = False


TABLE = 1 << 26
"""Most logits in one table (268 MB in float32). At most four such tables are alive at a time."""

Score = Callable[[PreTrainedModel, PackedRow, Scoring], tuple[Tensor, Tensor]]
"""What a model says of a packed row's scored tokens: their scores, with gradient, and their entropies; [S] each, float32, in row.target's order."""


def score_chunk(
    model: PreTrainedModel, hidden: Tensor, target: Tensor, temperature: float, entropy_gradient: bool = False, kept: KeptSets | None = None
) -> tuple[Tensor, Tensor]:
    """hidden [C, hidden], target [C] -> (log-prob of the target, entropy), [C] each float32, under logits / temperature.

    kept: [C]; the log-prob is then logit(target) - logsumexp of the logits kept, with the gradient of both, and 0 for what was not.
    """
    logits = head_logits(model, hidden)
    if temperature != 1.0:
        logits = logits / temperature
    if kept is not None:
        logits = logits.masked_fill(kept.excluded(logits.shape[-1]), -torch.inf)
    logp = logits.log_softmax(-1)
    del logits  # with 152,000 words a table of 441 positions is 268 MB
    chosen = logp.gather(-1, target[:, None])[:, 0]
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):  # last, so that the recomputation in the backward pass stops before it
        chance, surprise = logp.exp(), logp.clamp_min(-1e4)  # clamped: 0 * -inf would be NaN
        entropy = -(chance * surprise if chance.requires_grad else chance.mul_(surprise)).sum(-1)
    return chosen, entropy


def chunk_size(most: int, vocabulary: int) -> int:
    """Positions whose logits exist at one time: `most`, or fewer where the vocabulary is so large that they would exceed TABLE."""
    return max(1, min(most, TABLE // vocabulary))


def score_row(model: PreTrainedModel, row: PackedRow, scoring: Scoring) -> tuple[Tensor, Tensor]:
    """Log-prob and entropy of every scored token of a packed row, [S] each, float32, in the order of row.target."""
    with torch.autocast(row.tokens.device.type, scoring.autocast or torch.bfloat16, enabled=scoring.autocast is not None):
        hidden = hidden_states(model, row.tokens, row.positions, row).index_select(0, row.predictor)
        size = chunk_size(scoring.chunk, len(model.get_output_embeddings().weight))
        hiddens, targets = hidden.split(size), row.target.split(size)
        kept = [None] * len(targets) if row.kept is None else row.kept.split(size)
        chunks = [(model, h, t, scoring.temperature, scoring.entropy_gradient, k) for h, t, k in zip(hiddens, targets, kept, strict=True)]
        if torch.is_grad_enabled() and len(chunks) > 1:  # a single chunk's logits exist once either way: nothing to save
            scores = [checkpoint(score_chunk, *chunk, use_reentrant=False) for chunk in chunks]
        else:
            scores = [score_chunk(*chunk) for chunk in chunks]
    return torch.cat([logp for logp, _ in scores]), torch.cat([entropy for _, entropy in scores])


def score_batch(model: PreTrainedModel, batch: Batch, scoring: Scoring, max_tokens: int, share_prefix: bool) -> Tensor:
    """Log-probs of a whole batch without gradient: [B, T], 0 where mask is False."""
    return score_tables(model, batch, scoring, max_tokens, share_prefix)[0]


@torch.no_grad()
def score_tables(
    model: PreTrainedModel, batch: Batch, scoring: Scoring, max_tokens: int, share_prefix: bool, score: Score = score_row
) -> tuple[Tensor, Tensor]:
    """Scores (log-probs, or what `score` gives) and entropies of a whole batch without gradient: [B, T] each, 0 where mask is False."""
    logp, entropy = (torch.zeros(batch.tokens.shape, device=batch.tokens.device) for _ in range(2))
    batch = batch.with_host()
    rows = batch.at_host().mask.any(-1).nonzero()[:, 0].tolist()
    for part in microbatches(batch, rows, max_tokens, share_prefix):
        row = pack(batch, part, share_prefix)
        logp[row.row, row.column], entropy[row.row, row.column] = score(model, row, scoring)
    return logp, entropy
