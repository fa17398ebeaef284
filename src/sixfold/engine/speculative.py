"""Speculative decoding: a proposer guesses the next tokens of every running sequence, one forward of the model checks them all.

A token is a function of its sequence's text, of the two models and of its own position's noise, whether it was guessed or not; so a completion does
not depend on the batch, on k, on preemption or on where a step ended. Without probabilities (n-grams) it is the very token of plain sampling: the
model draws its own, and goes on while that is the guessed one. With a draft model the tokens are others, from the same distribution.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from ..model.base import LanguageModel
from ..types import EngineStats
from .acceptance import reject, run_lengths
from .asked import index, on
from .constraints import Constraints, constrained_rows
from .draft import DraftProposer, check_vocabulary
from .kv_cache import KVCache
from .look_ahead import look_ahead
from .model_runner import ModelRunner
from .ngram import NGramProposer
from .noise import uniforms
from .proposer import Draft, Proposer, tokens_seen
from .sampler import Draw, distribution, likeliest, sample
from .scheduler import Scheduler
from .sequence import Sequence


@dataclass(frozen=True)
class Speculation:
    """How to guess. k: tokens guessed at most in a step. draft: a smaller model with the same vocabulary; None: n-grams of the text itself, of
    `shortest` to `longest` tokens.

    Raises ValueError for sizes that mean nothing.
    """

    k: int = 4
    draft: LanguageModel | None = None
    shortest: int = 2
    longest: int = 4

    def __post_init__(self) -> None:
        if self.k < 1 or not 1 <= self.shortest <= self.longest:
            raise ValueError(f"speculation needs k >= 1 and 1 <= shortest <= longest, got {self.k}, {self.shortest}, {self.longest}")


@dataclass(frozen=True)
class Run:
    """Tokens that a sequence goes further in one step, with their log-probs under the model's own sampled distribution: the guesses that stand
    (the first `guessed` of them), and one more. A stop token may cut it. kept: what truncation kept of each (ids, mass), and
    top: the likeliest tokens at each place; empty where the request does not ask for them."""

    sequence: Sequence
    tokens: list[int]
    logps: list[float]
    kept: list[tuple[array[int], float]]
    top: list[dict[int, float]]


class _Rows:
    """N rows: for each sequence its newest token and, one by one, what was guessed behind it.

    counts: [B] rows of each sequence. owner, tokens, positions: [N] whose a row is, its token, and where that stands. guessed: [N] the token guessed
    behind it, -1 behind the last. spans: (sequence, first, stop) places in its completion that its rows draw. params, history: [N]. constrained: row,
    sequence and completion with the guesses before, where a constraint holds.
    """

    def __init__(self, sequences: list[Sequence], guesses: list[list[int]]) -> None:
        pairs = list(zip(sequences, guesses, strict=True))
        self.counts = np.array([len(guess) + 1 for guess in guesses])
        self.owner = np.repeat(np.arange(len(sequences)), self.counts)
        self.tokens = np.array([token for s, guess in pairs for token in (s.tokens[-1], *guess)])
        self.positions = np.concatenate([np.arange(s.length - 1, s.length + len(guess)) for s, guess in pairs])
        self.guessed = [token for guess in guesses for token in (*guess, -1)]
        self.spans = [(s, len(s.logp), len(s.logp) + len(guess) + 1) for s, guess in pairs]
        self.params = [s.request.params for s, start, stop in self.spans for _ in range(start, stop)]
        self.history = [tokens_seen(s, guess[:j]) for s, guess in pairs for j in range(len(guess) + 1)]
        starts = np.cumsum(self.counts) - self.counts
        self.constrained = [
            (int(starts[i]) + j, s, s.tokens[len(s.request.prompt) :] + guesses[i][:j])
            for i, s in constrained_rows(sequences)
            for j in range(len(guesses[i]) + 1)
        ]


class Speculator:
    """Takes running sequences one step further, each by one token or more."""

    def __init__(self, proposer: Proposer, k: int, scheduler: Scheduler, runner: ModelRunner, stats: EngineStats) -> None:
        self.proposer = proposer
        self.runner = runner
        self._k = k
        self._scheduler = scheduler
        self._stats = stats
        self._constraints = Constraints()
        self._noise: WeakKeyDictionary[Sequence, np.ndarray] = WeakKeyDictionary()

    def decode(self, sequences: list[Sequence]) -> list[Run]:
        """Guess, check, and say how far each sequence goes."""
        if not sequences:
            return []
        # The forward gives one token more than was guessed: with it the sequence may reach its limit, not pass it.
        counts = look_ahead(self._scheduler, sequences, [min(self._k, s.request.limit - s.length - 1) for s in sequences])
        proposals = self.proposer.propose(sequences, counts)
        rows = _Rows(sequences, proposals.tokens)
        # One forward over each sequence's newest token and its guesses.
        adapters = [s.request.adapter for s in sequences]
        logits = self.runner.decode_rows([s.blocks for s in sequences], rows.owner, rows.tokens, rows.positions, adapters)
        logits = self._constraints.apply(logits, rows.constrained)
        draw, stands = self._sure(rows, logits) if proposals.draft is None else self._drafted(rows, logits, proposals.draft)
        lengths = run_lengths(stands.cpu().numpy(), rows.counts)
        self._stats.proposed_tokens += sum(map(len, proposals.tokens))
        starts = np.cumsum(rows.counts) - rows.counts
        tokens, logps = draw.token.tolist(), draw.logp.tolist()
        kept = {row: (ids, mass) for row, ids, mass in draw.cut.sets()} if draw.cut is not None else {}
        top = likeliest(logits, rows.params, rows.history, draw.token, draw.logp)
        return [
            Run(s, tokens[a:b], logps[a:b], [kept[i] for i in range(a, b) if i in kept], [top[i] for i in range(a, b) if i in top])
            for s, a, b in zip(sequences, starts.tolist(), (starts + lengths).tolist(), strict=True)
        ]

    def _sure(self, rows: _Rows, logits: Tensor) -> tuple[Draw, Tensor]:
        """The proposer gave no probabilities: the model draws its own tokens, and a guess stands if it is that -> the draw, which stand [N]."""
        noise = [u for s, start, stop in rows.spans for u in s.noise[start:stop]]
        draw = sample(logits, rows.params, noise, rows.history)
        return draw, draw.token == index(rows.guessed, draw.token.device)

    def _drafted(self, rows: _Rows, logits: Tensor, draft: Draft) -> tuple[Draw, Tensor]:
        """Rejection sampling -> the draw, which guesses stand [N]."""
        logp, cut = distribution(logits, rows.params, rows.history)
        noise = torch.from_numpy(np.concatenate([self._streams(s)[:, start:stop] for s, start, stop in rows.spans], axis=1))
        noise = on(noise, logp.device)
        greedy = on(torch.tensor([p.temperature == 0 for p in rows.params]), logp.device)
        tokens, stands = reject(logp, draft, greedy, noise[0], noise[1])
        return Draw(tokens, logp.gather(-1, tokens[:, None])[:, 0], cut), stands

    def _streams(self, sequence: Sequence) -> np.ndarray:
        """[2, max_tokens]: the noise that accepts, and the noise that draws again."""
        if sequence not in self._noise:
            request = sequence.request
            where = (request.params.seed, request.key, sequence.sample, request.params.max_tokens)
            self._noise[sequence] = np.stack([uniforms(*where, purpose="accept"), uniforms(*where, purpose="residual")])
        return self._noise[sequence]


def make_speculator(speculation: Speculation, scheduler: Scheduler, runner: ModelRunner, autocast: torch.dtype | None) -> Speculator:
    """Raises ValueError for a draft model with another vocabulary."""
    if speculation.draft is None:
        proposer: Proposer = NGramProposer(speculation.shortest, speculation.longest)
    else:
        check_vocabulary(runner.model, speculation.draft)
        cache = KVCache(runner.cache.blocks, runner.cache.block_size)
        proposer = DraftProposer(ModelRunner(speculation.draft, cache, autocast, adapted=False))
    return Speculator(proposer, speculation.k, scheduler, runner, scheduler.stats)
