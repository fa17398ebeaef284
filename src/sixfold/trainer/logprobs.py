"""Log-probs and entropies of scored tokens, computed in chunks of positions.

Logits exist for one chunk at a time, never as [B, T, V]. If a row has several chunks, each is
checkpointed: its logits are recomputed in the backward pass instead of kept.

A token sampled from a truncated distribution is scored under a truncated distribution: the current
weights, renormalised over the set of tokens that the sampler kept. This holds for every model
scored here, including the reference and the proximal policy, so ratios and KL compare distributions
over the same set.
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
    """How log-probs are computed.

    Attributes:
        temperature: sampling temperature.
        chunk: positions per chunk.
        autocast: precision of the model body. None: the dtype of the weights.
        entropy_gradient: whether entropies carry gradients, as an entropy bonus needs.
    """

    temperature: float = 1.0
    chunk: int = 1024
    autocast: torch.dtype | None = None
    entropy_gradient: bool = False


TABLE = 1 << 26
"""Maximum logits in one table (268 MB in float32). At most four such tables exist at a time."""

Score = Callable[[PreTrainedModel, PackedRow, Scoring], tuple[Tensor, Tensor]]
"""Scoring function: scores (with gradient) and entropies of a packed row's scored tokens.

Both are [S] float32, in the order of row.target.
"""


def score_chunk(
    model: PreTrainedModel,
    hidden: Tensor,
    target: Tensor,
    temperature: float,
    entropy_gradient: bool = False,
    kept: KeptSets | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-prob and entropy of each target token under logits / temperature.

    Args:
        model: supplies the output head.
        hidden: [C, hidden] hidden states.
        target: [C] token ids.
        temperature: sampling temperature.
        entropy_gradient: whether the entropy carries gradients.
        kept: [C] token sets after truncation. The log-prob is then logit(target) - logsumexp over
            the kept logits. The gradient flows through the kept logits and is 0 for the others.

    Returns:
        (log-prob of the target, entropy), each [C] float32.
    """
    logits = head_logits(model, hidden)
    if temperature != 1.0:
        logits = logits / temperature
    if kept is not None:
        logits = logits.masked_fill(kept.excluded(logits.shape[-1]), -torch.inf)
    logp = logits.log_softmax(-1)
    del logits  # free it: with 152,000 tokens in the vocabulary a table of 441 positions is 268 MB
    chosen = logp.gather(-1, target[:, None])[:, 0]
    # Last, so that recomputation in the backward pass stops before it.
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        entropy = entropy_of(logp)
    return chosen, entropy


def entropy_of(logp: Tensor) -> Tensor:
    """H = -sum p log p of the log-probs of whole distributions; [..., V] -> [...].

    A token with log-prob -inf (excluded by truncation) adds nothing, to the value or the gradient.
    """
    chance, surprise = logp.exp(), logp.clamp_min(-1e4)  # clamped: 0 * -inf would be NaN
    return -(chance * surprise if chance.requires_grad else chance.mul_(surprise)).sum(-1)


def chunk_size(most: int, vocabulary: int) -> int:
    """Positions per chunk: `most`, or fewer if a large vocabulary would exceed TABLE."""
    return max(1, min(most, TABLE // vocabulary))


def score_row(model: PreTrainedModel, row: PackedRow, scoring: Scoring) -> tuple[Tensor, Tensor]:
    """Log-prob and entropy of every scored token of a packed row.

    Args:
        model: model to score with.
        row: packed row with S scored tokens.
        scoring: temperature, chunk size and precision.

    Returns:
        (log-probs, entropies), each [S] float32, in the order of row.target.
    """
    with torch.autocast(
        row.tokens.device.type,
        scoring.autocast or torch.bfloat16,
        enabled=scoring.autocast is not None,
    ):
        hidden = hidden_states(model, row.tokens, row.positions, row).index_select(0, row.predictor)
        size = chunk_size(scoring.chunk, len(model.get_output_embeddings().weight))
        hiddens, targets = hidden.split(size), row.target.split(size)
        kept = [None] * len(targets) if row.kept is None else row.kept.split(size)
        chunks = [
            (model, h, t, scoring.temperature, scoring.entropy_gradient, k)
            for h, t, k in zip(hiddens, targets, kept, strict=True)
        ]
        # A single chunk's logits are needed in either case: checkpointing would save nothing.
        if torch.is_grad_enabled() and len(chunks) > 1:
            scores = [checkpoint(score_chunk, *chunk, use_reentrant=False) for chunk in chunks]
        else:
            scores = [score_chunk(*chunk) for chunk in chunks]
    return torch.cat([logp for logp, _ in scores]), torch.cat([entropy for _, entropy in scores])


def score_batch(
    model: PreTrainedModel, batch: Batch, scoring: Scoring, max_tokens: int, share_prefix: bool
) -> Tensor:
    """Log-probs of a whole batch, without gradient.

    Args:
        model: model to score with.
        batch: batch to score.
        scoring: temperature, chunk size and precision.
        max_tokens: maximum tokens per micro-batch.
        share_prefix: whether completions of one group share one computed prompt.

    Returns:
        [B, T], 0 where mask is False.
    """
    return score_tables(model, batch, scoring, max_tokens, share_prefix)[0]


@torch.no_grad()
def score_tables(
    model: PreTrainedModel,
    batch: Batch,
    scoring: Scoring,
    max_tokens: int,
    share_prefix: bool,
    score: Score = score_row,
) -> tuple[Tensor, Tensor]:
    """Scores and entropies of a whole batch, without gradient.

    Args:
        model: model to score with.
        batch: batch to score.
        scoring: temperature, chunk size and precision.
        max_tokens: maximum tokens per micro-batch.
        share_prefix: whether completions of one group share one computed prompt.
        score: scoring function for a packed row. The default gives log-probs.

    Returns:
        (scores, entropies), each [B, T], 0 where mask is False.
    """
    logp, entropy = (torch.zeros(batch.tokens.shape, device=batch.tokens.device) for _ in range(2))
    batch = batch.with_host()
    rows = batch.at_host().mask.any(-1).nonzero()[:, 0].tolist()
    for part in microbatches(batch, rows, max_tokens, share_prefix):
        row = pack(batch, part, share_prefix)
        logp[row.row, row.column], entropy[row.row, row.column] = score(model, row, scoring)
    return logp, entropy
