"""Log-probs and entropies of scored tokens, computed in chunks of positions.

Logits exist for one chunk at a time, never as [B, T, V]. A plain linear head with a large
vocabulary runs in `fused_head.py`, with one table of logits, or on a CPU in `tiled_head.py`, with
none. Any other head is left to autograd. If its row has several chunks, each is checkpointed: its
logits are recomputed in the backward pass.

A token sampled from a truncated distribution is scored under a truncated distribution: the current
weights, renormalised over the set of tokens that the sampler kept. This holds for every model
scored here, including the reference and the proximal policy, so ratios and KL compare distributions
over the same set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from ..batch import Batch, KeptSets
from ..errors import size_noted
from ..model.causal_lm import head_logits, hidden_states
from ..model.head import LogitFinish, is_plain
from ..ranks import ALONE, Ranks
from .checkpointing import activations_on_host
from .context_parallel import ContextGroup
from .fused_head import fused_scores
from .head_settings import HeadSettings
from .head_share import HeadShare
from .neftune import EmbeddingNoise
from .packing import PackedRow, filler, pack
from .routing import Routed, Routing
from .sharing import own_microbatches
from .tiled_head import tile_kernels


@dataclass(frozen=True)
class Scoring:
    """Settings of the computation of log-probs.

    Attributes:
        chunk: positions per chunk.
        autocast: precision of the model body. None: the dtype of the weights.
        entropy_gradient: whether entropies carry gradients, as an entropy bonus needs.
        offload: whether the body's activations wait in host memory for the backward pass.
        direct: whether a backward pass may add the gradients of embedding and head to `.grad`
            itself. Only for parameters that are not sharded.
    """

    temperature: float = 1.0
    chunk: int = 1024
    autocast: torch.dtype | None = None
    entropy_gradient: bool = False
    offload: bool = False
    direct: bool = False


TABLE = 1 << 26
"""Maximum logits in one table (268 MB in float32). A plain linear head has one such table at a
time, or two with a soft cap or an entropy gradient. Any other head has at most four.
"""
SMALL = 1 << 22
"""Tables of at most this many logits (17 MB) are left to autograd, for any head."""


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


class Scores(NamedTuple):
    """Scores of a packed row, in the order of row.reads.

    A tuple, because FSDP finds tensors in tuples only.

    Attributes:
        values: [S] float32, with gradient; [S, 2] of a `ScalarRoot` with a language head.
        entropy: [S] float32. None if the scores are not log-probs.
    """

    values: Tensor
    entropy: Tensor | None


class RoutedScores(NamedTuple):
    """Scores of a packed row under a mixture of experts.

    Attributes:
        values: as in `Scores`.
        entropy: as in `Scores`.
        routed: report of the routers. Its penalty is added to the loss.
    """

    values: Tensor
    entropy: Tensor | None
    routed: Routed


class Root(Protocol):
    """Body and head of a model as one module, which runs in one call.

    Everything that reads the parameters of `model` calls this object. So `fully_shard` on it
    gathers the weights of body and head before they are used.
    """

    @property
    def model(self) -> nn.Module:
        """Module with the parameters to train."""
        ...

    def __call__(self, row: PackedRow, scoring: Scoring) -> Scores | RoutedScores:
        """One score per read of the row."""
        ...

    def prepare(
        self,
        rows: Sequence[Callable[[], PackedRow]],
        scoring: Scoring,
        ranks: Ranks = ALONE,
    ) -> None:
        """Prepare for an update, before its first micro-batch is trained.

        Args:
            rows: functions that make the micro-batches of this rank. All ranks have equally many.
            scoring: temperature, chunk size and precision.
        """
        ...


def body_precision(row: PackedRow, scoring: Scoring) -> torch.autocast:
    """Context in which the body of a model runs."""
    return torch.autocast(
        row.tokens.device.type,
        scoring.autocast or torch.bfloat16,
        enabled=scoring.autocast is not None,
    )


def read_states(model: PreTrainedModel, row: PackedRow, scoring: Scoring) -> Tensor:
    """Hidden states [S, hidden] of the body at row.reads."""
    kept = activations_on_host(len(row.tokens)) if scoring.offload else nullcontext()
    with body_precision(row, scoring), kept:
        return hidden_states(model, row.tokens, row.positions, row).index_select(0, row.reads)


class PolicyRoot(nn.Module):
    """A causal LM that scores the tokens of a packed row.

    With `routing`, it returns `RoutedScores`, which include a report of the routers.

    Sharding code must register `states` and `count` by `register_fsdp_forward_method`. Both are
    called outside `forward`: `states` by a value head on the policy, `count` by `prepare`.

    Args:
        routing: watches the routers of a mixture of experts. None: there is nothing to watch.

    Attributes:
        noise: noise on the embeddings in training. None: there is none.
    """

    model: PreTrainedModel

    def __init__(self, model: PreTrainedModel, routing: Routing | None = None) -> None:
        super().__init__()
        self.model = model
        self.routing = routing
        self.head_share: HeadShare | None = None
        self.context: ContextGroup | None = None
        self.noise: EmbeddingNoise | None = None

    def states(self, row: PackedRow, scoring: Scoring) -> Tensor:
        """Hidden states [S, hidden] at row.reads. A context group divides the row before."""
        return self._routed_states(row, scoring)[0]

    def _routed_states(self, row: PackedRow, scoring: Scoring) -> tuple[Tensor, Routed | None]:
        """Hidden states [S, hidden] at row.reads, and the report of the routers or None."""
        if self.routing is None:
            return read_states(self.model, row, scoring), None
        with self.routing.watch(self.model, row) as record:
            hidden = read_states(self.model, row, scoring)
        return hidden, self.routing.result(record, row)

    def count(self, row: PackedRow, scoring: Scoring) -> Routed | None:
        """Report of the routers for a row. None without `routing`."""
        part = row if self.context is None else self.context.divide(row).part
        return self._routed_states(part, scoring)[1]

    def prepare(
        self,
        rows: Sequence[Callable[[], PackedRow]],
        scoring: Scoring,
        ranks: Ranks = ALONE,
    ) -> None:
        """Count the tokens of each expert over the whole update, if the balance loss needs it."""
        if self.routing is not None:
            self.routing.prepare(rows, lambda row: self.count(row, scoring), ranks)

    def forward(self, row: PackedRow, scoring: Scoring) -> Scores | RoutedScores:
        """Log-prob and entropy of every scored token, in the order of row.target."""
        if self.context is None:
            return self._score(row, scoring)
        divided = self.context.divide(row)
        return divided.complete(self._score(divided.part, scoring))

    def _score(self, row: PackedRow, scoring: Scoring) -> Scores | RoutedScores:
        noisy: AbstractContextManager[None] = nullcontext()
        if self.noise is not None:
            noisy = self.noise.on(self.model.get_input_embeddings(), row)
        with body_precision(row, scoring), _thin_embedding(self.model, row, scoring), noisy:
            hidden, routed = self._routed_states(row, scoring)
            values, entropies = self._scores(hidden, row, scoring)
        if routed is None:
            return Scores(values, entropies)
        return RoutedScores(values, entropies, routed)

    def _scores(self, hidden: Tensor, row: PackedRow, scoring: Scoring) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies [S]. The ranks of a tensor group divide the positions."""
        share = self.head_share
        if share is None:
            return score_states(self.model, hidden, row, scoring)
        own, part = share.divide(hidden, row)
        values, entropies = score_states(self.model, own, part, scoring)
        return share.gather(values, len(hidden)), share.gather(entropies, len(hidden))


def score_states(
    model: PreTrainedModel, hidden: Tensor, row: PackedRow, scoring: Scoring
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies [S] of the row's scored tokens, chunk by chunk.

    Args:
        model: supplies the output head.
        hidden: hidden states [S, hidden] at row.reads.
        row: supplies targets and kept sets.
        scoring: temperature, chunk size and precision.
    """
    head = model.get_output_embeddings()
    size = chunk_size(scoring.chunk, len(head.weight))
    if is_plain(head) and (settings := _fused_settings(model, row, scoring)) is not None:
        return fused_scores(head, hidden, row.target, settings, row.kept)
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


def _fused_settings(
    model: PreTrainedModel, row: PackedRow, scoring: Scoring
) -> HeadSettings | None:
    """Settings of the fused head for a row. None if its table of logits is small."""
    vocabulary = len(model.get_output_embeddings().weight)
    size = chunk_size(scoring.chunk, vocabulary)
    if min(size, len(row.target)) * vocabulary <= SMALL:
        return None
    return HeadSettings(
        LogitFinish.of(vars(model.config)),
        scoring.temperature,
        size,
        scoring.autocast,
        scoring.entropy_gradient,
        scoring.direct,
    )


@contextmanager
def _thin_embedding(model: PreTrainedModel, row: PackedRow, scoring: Scoring) -> Iterator[None]:
    """Context in which a tied embedding has a sparse gradient, if the tiled head runs directly.

    A dense gradient of an embedding has one row per token of the vocabulary. A sparse one has one
    row per token of the packed row, and autograd adds these rows to `.grad` in place.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    settings = _fused_settings(model, row, scoring) if scoring.direct and is_plain(head) else None
    if (
        settings is None
        or not (torch.is_grad_enabled() and head.weight.requires_grad)
        or not (type(embedding) is nn.Embedding and embedding.weight is head.weight)
        or tile_kernels(head, settings, row.kept) is None
    ):
        yield
        return
    if head.weight.grad is None:  # otherwise the first sparse gradient would make `.grad` sparse
        head.weight.grad = torch.zeros_like(head.weight)
    embedding.sparse = True
    try:
        yield
    finally:
        embedding.sparse = False


class ScalarRoot(nn.Module):
    """A head with one output, on the hidden states at row.reads.

    Args:
        head: the head, whose parameters are a part of `model`.
        states: hidden states [S, hidden] at row.reads.
        language: frozen model whose language head reads the same hidden states in training. None:
            no loss reads log-probs.
    """

    def __init__(
        self,
        model: nn.Module,
        head: nn.Module,
        states: Callable[[PackedRow, Scoring], Tensor],
        language: PreTrainedModel | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self._states = states
        # In tuples: as submodules, the head's parameters would have two names, and FSDP would shard
        # those of the language model.
        self._head, self._language = (head,), (language,)
        self.context: ContextGroup | None = None

    def forward(self, row: PackedRow, scoring: Scoring) -> Scores:
        """One number per read, and with gradient and a language head its token's log-prob.

        The head always runs in float32: targets may differ by less than bfloat16 resolves.
        """
        if self.context is None:
            return self._score(row, scoring)
        divided = self.context.divide(row)
        return divided.complete(self._score(divided.part, scoring))

    def _score(self, row: PackedRow, scoring: Scoring) -> Scores:
        hidden, (language,) = self._states(row, scoring), self._language
        values = self._head[0](hidden.float())[:, 0]
        if language is None or not torch.is_grad_enabled():
            return Scores(values, None)
        with body_precision(row, scoring):
            logp, _ = score_states(language, hidden, row, replace(scoring, direct=False))
        return Scores(torch.stack([values, logp], -1), None)

    def prepare(
        self,
        rows: Sequence[Callable[[], PackedRow]],
        scoring: Scoring,
        ranks: Ranks = ALONE,
    ) -> None:
        """Do nothing: a linear head needs no preparation."""


SCORED_TOGETHER = 256
"""Examples that are collated into one batch when many are scored."""


def score_batch(
    model: PreTrainedModel, batch: Batch, scoring: Scoring, max_tokens: int, share_prefix: bool
) -> Tensor:
    """Log-probs of a whole batch under a model of this process, without gradient.

    Args:
        scoring: temperature, chunk size and precision.
        max_tokens: maximum tokens per micro-batch.
        share_prefix: whether completions of one group share one computed prompt.

    Returns:
        [B, T], 0 where mask is False.
    """
    return score_tables(PolicyRoot(model), batch, scoring, max_tokens, share_prefix)[0]


@torch.no_grad()
def score_tables(
    root: Root,
    batch: Batch,
    scoring: Scoring,
    max_tokens: int,
    share_prefix: bool,
    ranks: Ranks = ALONE,
) -> tuple[Tensor, Tensor]:
    """Scores and entropies of a whole batch, without gradient.

    Every rank scores its share of the rows and gets the complete tables.

    Args:
        scoring: temperature, chunk size and precision.
        max_tokens: maximum tokens per micro-batch.
        share_prefix: whether completions of one group share one computed prompt.

    Returns:
        (scores, entropies), each [B, T], 0 where mask is False. Entropies are 0 if the root gives
        none.
    """
    tables = tuple(torch.zeros(batch.tokens.shape, device=batch.tokens.device) for _ in range(2))
    batch = batch.with_host()
    rows = batch.at_host().mask.any(-1).nonzero()[:, 0].tolist()
    for part in own_microbatches(batch, rows, max_tokens, share_prefix, ranks):
        if not part:
            root(filler(batch), scoring)
            continue
        row = pack(batch, part, share_prefix)
        with size_noted(f"micro-batch of {len(part)} rows, {len(row.tokens)} tokens"):
            scores = root(row, scoring)
        for table, column in zip(tables, (scores.values, scores.entropy), strict=True):
            if column is not None:
                table[row.row, row.column] = column
    return ranks.sum(tables[0]), ranks.sum(tables[1])


class Proximal:
    """The proximal pass: log-probs of the samples under the weights before the first update.

    It is used when the sampler's weights are older or its numerics differ. Ratios are then taken
    against these log-probs, and the ratio of trainer to sampler is a separate importance weight
    (arXiv:2505.24298). It costs one forward pass over the step's samples.

    It scores with the live weights, so it must run before the step's first update.
    """

    def __init__(
        self,
        root: Root,
        scoring: Scoring,
        max_tokens: int,
        share_prefix: bool,
        ranks: Ranks = ALONE,
    ) -> None:
        self._root = root
        self._scoring = scoring
        self._max_tokens = max_tokens
        self._share_prefix = share_prefix
        self._ranks = ranks

    def score(self, batch: Batch) -> Batch:
        """The batch with prox_logp and entropy, [B, T] each, 0 where mask is False."""
        logp, entropy = score_tables(
            self._root, batch, self._scoring, self._max_tokens, self._share_prefix, self._ranks
        )
        return batch.with_(prox_logp=logp, entropy=entropy)
