"""Speculative decoding: propose the next tokens of every sequence and check them in one forward
pass.

Whether or not it was proposed, a token depends only on the sequence's earlier tokens, the two
models and the noise of its position. So a completion does not depend on the batch, on k, on
preemption or on where a step ended.

A proposer without probabilities (n-grams) gives the same tokens as plain sampling. The model draws
its own token at each position, and a proposed token is accepted if it equals that token. With a
draft model the tokens may differ from plain sampling, but have the same distribution: acceptance
is exact, whatever was proposed.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from ..model.base import LanguageModel
from .constraints import Constraints, constrained_rows
from .draft import DraftProposer, check_vocabulary
from .kv_cache import KVCache
from .look_ahead import look_ahead
from .model_runner import ModelRunner
from .ngram import NGramProposer
from .noise import uniforms
from .proposer import Draft, Proposer, tokens_seen
from .sampler import Draw, distribution, inverse_transform, likeliest, sample
from .sampling_batch import index, on
from .scheduler import Scheduler
from .sequence import Sequence
from .stats import EngineStats


@dataclass(frozen=True)
class Speculation:
    """Settings of speculative decoding.

    Attributes:
        k: maximum number of tokens proposed per sequence and step.
        draft: smaller model with the same vocabulary. None: look up n-grams in the sequence itself.
        shortest: smallest n of the n-grams.
        longest: largest n of the n-grams.

    Raises:
        ValueError: unless k >= 1 and 1 <= shortest <= longest.
    """

    k: int = 4
    draft: LanguageModel | None = None
    shortest: int = 2
    longest: int = 4

    def __post_init__(self) -> None:
        if self.k < 1 or not 1 <= self.shortest <= self.longest:
            raise ValueError(
                f"speculation needs k >= 1 and 1 <= shortest <= longest, but got {self.k},"
                f" {self.shortest}, {self.longest}"
            )


@dataclass(frozen=True)
class Run:
    """Tokens that one sequence gains in one step: the accepted tokens and one more.

    The engine cuts the run at a stop token.

    Attributes:
        tokens: accepted tokens, then one token drawn by the model.
        logps: log-prob of each token under the distribution that the model samples from.
        kept: ids and probability mass that truncation kept for each token; empty without
            truncation.
        top: most likely tokens for each token; empty if the request does not ask for them.
    """

    sequence: Sequence
    tokens: list[int]
    logps: list[float]
    kept: list[tuple[array[int], float]]
    top: list[dict[int, float]]


class _Rows:
    """N rows of the checking forward pass: each sequence's newest token, then its proposed tokens.

    Attributes:
        counts: [B] number of rows of each sequence.
        owner: [N] index of the sequence that each row belongs to.
        tokens: [N] token ids.
        positions: [N] position of each token in its sequence.
        guessed: [N] proposed token that follows each row; -1 after the last row of a sequence.
        spans: (sequence, first, stop) completion positions that the rows of a sequence draw.
        params: [N] sampling parameters.
        history: [N] tokens that the penalties count.
        constrained: (row, sequence, completion with the proposed tokens so far) of each row whose
            sequence has a constraint.
    """

    def __init__(self, sequences: list[Sequence], guesses: list[list[int]]) -> None:
        pairs = list(zip(sequences, guesses, strict=True))
        self.counts = np.array([len(guess) + 1 for guess in guesses])
        self.owner = np.repeat(np.arange(len(sequences)), self.counts)
        self.tokens = np.array([token for s, guess in pairs for token in (s.tokens[-1], *guess)])
        self.positions = np.concatenate(
            [np.arange(s.length - 1, s.length + len(guess)) for s, guess in pairs]
        )
        self.guessed = [token for guess in guesses for token in (*guess, -1)]
        self.spans = [(s, len(s.logp), len(s.logp) + len(guess) + 1) for s, guess in pairs]
        self.params = [
            s.request.params for s, start, stop in self.spans for _ in range(start, stop)
        ]
        self.history = [
            tokens_seen(s, guess[:j]) for s, guess in pairs for j in range(len(guess) + 1)
        ]
        starts = np.cumsum(self.counts) - self.counts
        self.constrained = [
            (int(starts[i]) + j, s, s.tokens[len(s.request.prompt) :] + guesses[i][:j])
            for i, s in constrained_rows(sequences)
            for j in range(len(guesses[i]) + 1)
        ]


class Speculator:
    """Runs speculative decoding steps. Each running sequence gains one or more tokens per step.

    Args:
        proposer: proposes tokens.
        k: maximum number of tokens proposed per sequence and step.
        scheduler: allocates blocks for proposed tokens.
    """

    def __init__(
        self,
        proposer: Proposer,
        k: int,
        scheduler: Scheduler,
        runner: ModelRunner,
        stats: EngineStats,
    ) -> None:
        self.proposer = proposer
        self.runner = runner
        self._k = k
        self._scheduler = scheduler
        self._stats = stats
        self._constraints = Constraints()
        self._noise: WeakKeyDictionary[Sequence, np.ndarray] = WeakKeyDictionary()

    def decode(self, sequences: list[Sequence]) -> list[Run]:
        """Propose tokens, check them, and return the run of each sequence."""
        if not sequences:
            return []
        # Propose one token less than the limit allows: the forward pass draws one more.
        counts = look_ahead(
            self._scheduler,
            sequences,
            [min(self._k, s.request.limit - s.length - 1) for s in sequences],
        )
        proposals = self.proposer.propose(sequences, counts)
        rows = _Rows(sequences, proposals.tokens)
        adapters = [s.request.adapter for s in sequences]
        logits = self.runner.decode_rows(
            [s.blocks for s in sequences], rows.owner, rows.tokens, rows.positions, adapters
        )
        logits = self._constraints.apply(logits, rows.constrained)
        draw, accepted = (
            self._verify_ngrams(rows, logits)
            if proposals.draft is None
            else self._verify_draft(rows, logits, proposals.draft)
        )
        lengths = run_lengths(accepted.cpu().numpy(), rows.counts)
        self._stats.proposed_tokens += sum(map(len, proposals.tokens))
        starts = np.cumsum(rows.counts) - rows.counts
        tokens, logps = draw.token.tolist(), draw.logp.tolist()
        kept = (
            {row: (ids, mass) for row, ids, mass in draw.cut.sets()} if draw.cut is not None else {}
        )
        top = likeliest(logits, rows.params, rows.history, draw.token, draw.logp)
        return [
            Run(
                s,
                tokens[a:b],
                logps[a:b],
                [kept[i] for i in range(a, b) if i in kept],
                [top[i] for i in range(a, b) if i in top],
            )
            for s, a, b in zip(sequences, starts.tolist(), (starts + lengths).tolist(), strict=True)
        ]

    def _verify_ngrams(self, rows: _Rows, logits: Tensor) -> tuple[Draw, Tensor]:
        """Check proposed tokens without probabilities: accept those that equal the model's own
        draw.

        Returns:
            The draw, and whether each row's proposed token is accepted [N].
        """
        noise = [u for s, start, stop in rows.spans for u in s.noise[start:stop]]
        draw = sample(logits, rows.params, noise, rows.history)
        return draw, draw.token == index(rows.guessed, draw.token.device)

    def _verify_draft(self, rows: _Rows, logits: Tensor, draft: Draft) -> tuple[Draw, Tensor]:
        """Check the tokens of a draft model by rejection sampling.

        Returns:
            The draw, and whether each row's proposed token is accepted [N].
        """
        logp, cut = distribution(logits, rows.params, rows.history)
        noise = torch.from_numpy(
            np.concatenate(
                [self._streams(s)[:, start:stop] for s, start, stop in rows.spans], axis=1
            )
        )
        noise = on(noise, logp.device)
        greedy = on(torch.tensor([p.temperature == 0 for p in rows.params]), logp.device)
        tokens, accepted = reject(logp, draft, greedy, noise[0], noise[1])
        return Draw(tokens, logp.gather(-1, tokens[:, None])[:, 0], cut), accepted

    def _streams(self, sequence: Sequence) -> np.ndarray:
        """Noise [2, max_tokens]: for acceptance, and for drawing from the residual distribution."""
        if sequence not in self._noise:
            request = sequence.request
            where = (request.params.seed, request.key, sequence.sample, request.params.max_tokens)
            self._noise[sequence] = np.stack(
                [
                    uniforms(*where, purpose=purpose, first=request.first_noise)
                    for purpose in ("accept", "residual")
                ]
            )
        return self._noise[sequence]


def make_speculator(
    speculation: Speculation,
    scheduler: Scheduler,
    runner: ModelRunner,
    autocast: torch.dtype | None,
) -> Speculator:
    """Create the speculator of an engine.

    Args:
        autocast: dtype of the draft model's forward pass, or None for the dtype of its weights.

    Raises:
        ValueError: if the draft model has another vocabulary than the model.
    """
    if speculation.draft is None:
        proposer: Proposer = NGramProposer(speculation.shortest, speculation.longest)
    else:
        check_vocabulary(runner.model, speculation.draft)
        cache = KVCache(runner.cache.blocks, runner.cache.block_size)
        proposer = DraftProposer(ModelRunner(speculation.draft, cache, autocast, adapted=False))
    return Speculator(proposer, speculation.k, scheduler, runner, scheduler.stats)


def reject(
    logp: Tensor, draft: Draft, greedy: Tensor, accept_noise: Tensor, residual_noise: Tensor
) -> tuple[Tensor, Tensor]:
    """Speculative rejection sampling.

    A token x drawn from q is accepted with probability min(1, p(x) / q(x)). Otherwise a token is
    drawn from max(p - q, 0), renormalised. The result has distribution p. Leviathan et al. 2023
    (arXiv:2211.17192), Chen et al. 2023 (arXiv:2302.01318).

    Args:
        logp: [N, V] log-probs of p.
        draft: proposed tokens [N] and log-probs of q [N, V].
        greedy: [N] bool, True where p puts all probability on its best token.
        accept_noise: [N] float64 in [0, 1).
        residual_noise: [N] float64 in [0, 1). Both noises are independent of one another and of
            the draft's draw.

    Returns:
        Tokens [N], and whether the proposed token was accepted [N].
    """
    guess = draft.tokens[:, None]
    p, q = (side.gather(-1, guess)[:, 0].double().exp() for side in (logp, draft.logp))
    best = logp.argmax(-1)
    accepted = torch.where(greedy, draft.tokens == best, accept_noise * q < p)
    tokens = draft.tokens.clone()
    at = (~accepted).nonzero()[:, 0]
    target = logp[at].double().exp()
    residual = (target - draft.logp[at].double().exp()).clamp_min(0.0)
    # If p and q are equal up to rounding, the residual sums to 0 and cannot be sampled: use p.
    residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, target)
    tokens[at] = torch.where(greedy[at], best[at], inverse_transform(residual, residual_noise[at]))
    return tokens, accepted


def run_lengths(accepted: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Number of tokens that each sequence gains: its accepted tokens, plus the one after them.

    Args:
        accepted: [N] bool, whether each row's proposed token is accepted; sequence after sequence.
        rows: [B] number of rows of each sequence, at least 1.

    Returns:
        [B] token counts.
    """
    ends = np.cumsum(rows)
    rejected = ~accepted
    rejected[ends - 1] = True
    at = np.flatnonzero(rejected)
    starts = ends - rows
    return at[np.searchsorted(at, starts)] - starts + 1
