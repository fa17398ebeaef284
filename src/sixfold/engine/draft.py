"""Proposes what a smaller model draws. It keeps its keys and values under the same block tables as the model it works for, in pools of its own, and
computes whatever that one computes: so blocks are counted once, prefixes are shared and dropped for both, and a rejected guess leaves both caches as
far as each other."""

from __future__ import annotations

from collections.abc import Sequence as Many

import numpy as np
import torch
from torch import Tensor

from ..model.base import LanguageModel
from .asked import on
from .kv_cache import KVCache
from .model_runner import ModelRunner, fill
from .proposer import Draft, Proposals, tokens_seen
from .sampler import distribution, draw
from .scheduler import Work
from .sequence import Sequence


class DraftProposer:
    """runner: the draft model's, over a cache of as many blocks as the target's."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner

    def follow(self, work: Work) -> None:
        """Compute the same prompts."""
        fill(self.runner, work)

    def propose(self, sequences: Many[Sequence], counts: Many[int]) -> Proposals:
        """Draw counts[i] + 1 tokens one by one, each with the noise that plain sampling has at its position. The last is never shown to the
        target, but its draw computes the one before, whose keys and values the next step needs if all are accepted."""
        guesses: list[list[int]] = [[] for _ in sequences]
        drawn: list[tuple[np.ndarray, Tensor, Tensor]] = []
        for j in range(max(counts) + 1):
            alive = np.array([i for i, count in enumerate(counts) if count >= j])
            tokens, logp = self._step([sequences[i] for i in alive], [guesses[i] for i in alive])
            for i, token in zip(alive, tokens.tolist(), strict=True):
                guesses[i].append(token)
            drawn.append((alive, tokens, logp))
        first = np.cumsum([0, *(count + 1 for count in counts)])[:-1]
        rows = torch.from_numpy(np.argsort(np.concatenate([first[alive] + j for j, (alive, _, _) in enumerate(drawn)])))
        rows = on(rows, tokens.device)
        draft = Draft(torch.cat([tokens for _, tokens, _ in drawn])[rows], torch.cat([logp for _, _, logp in drawn])[rows])
        return Proposals([guess[:-1] for guess in guesses], draft)

    def release_memory(self) -> None:
        """Drop the cache's buffers."""
        self.runner.release_memory()

    def _step(self, sequences: list[Sequence], guesses: list[list[int]]) -> tuple[Tensor, Tensor]:
        """One token further for each -> tokens [B], log-probs [B, V]."""
        pairs = list(zip(sequences, guesses, strict=True))
        tokens = np.array([guess[-1] if guess else s.tokens[-1] for s, guess in pairs])
        positions = np.array([s.length - 1 + len(guess) for s, guess in pairs])
        logits = self.runner.decode_rows([s.blocks for s in sequences], np.arange(len(sequences)), tokens, positions)
        params = [s.request.params for s in sequences]
        logp, _ = distribution(logits, params, [tokens_seen(s, guess) for s, guess in pairs])
        return draw(logp, params, [s.noise[len(s.logp) + len(guess)] for s, guess in pairs]), logp


def check_vocabulary(target: LanguageModel, draft: LanguageModel) -> None:
    """Raises ValueError where they cannot speak of the same tokens."""
    ours, theirs = _vocabulary(target), _vocabulary(draft)
    if ours != theirs:
        raise ValueError(f"the draft model has {theirs} tokens, the model {ours}: a draft needs the same tokenizer and vocabulary")


@torch.inference_mode()
def _vocabulary(model: LanguageModel) -> int:
    """Width of the model's logits, from one token run on a cache of one block."""
    zero = np.zeros(1, dtype=np.int64)
    return ModelRunner(model, KVCache(1, 1), None).decode_rows([[0]], zero, zero, zero).shape[-1]
