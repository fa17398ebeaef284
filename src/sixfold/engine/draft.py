"""Proposer that samples from a smaller draft model.

The draft model has its own KV cache pools, but uses the block tables of the target model. It
computes the same prompts and tokens as the target. So blocks are counted once, prefixes are shared
and dropped for both models, and after a rejected token both caches have the same length.
"""

from __future__ import annotations

from collections.abc import Sequence as Many

import numpy as np
import torch
from torch import Tensor

from ..model.base import LanguageModel
from .kv_cache import KVCache
from .model_runner import ModelRunner, fill
from .proposer import Draft, Proposals, tokens_seen
from .sampler import distribution, draw
from .sampling_batch import on
from .scheduler import ScheduledStep
from .sequence import Sequence


class DraftProposer:
    """Proposer that samples from a draft model.

    Args:
        runner: runner of the draft model. Its cache has as many blocks as the target's.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner

    def follow(self, work: ScheduledStep) -> None:
        """Compute the same prompts and preempted sequences as the target model."""
        fill(self.runner, work)

    def propose(self, sequences: Many[Sequence], counts: Many[int]) -> Proposals:
        """Draw counts[i] + 1 tokens for sequence i, one by one.

        Each draw uses the noise that plain sampling has at its position. The last token is not
        proposed. Drawing it computes the keys and values of the token before it, which the next
        step needs if all proposed tokens are accepted.
        """
        guesses: list[list[int]] = [[] for _ in sequences]
        drawn: list[tuple[np.ndarray, Tensor, Tensor]] = []
        for j in range(max(counts) + 1):
            alive = np.array([i for i, count in enumerate(counts) if count >= j])
            tokens, logp = self._step([sequences[i] for i in alive], [guesses[i] for i in alive])
            for i, token in zip(alive, tokens.tolist(), strict=True):
                guesses[i].append(token)
            drawn.append((alive, tokens, logp))
        first = np.cumsum([0, *(count + 1 for count in counts)])[:-1]
        rows = torch.from_numpy(
            np.argsort(np.concatenate([first[alive] + j for j, (alive, _, _) in enumerate(drawn)]))
        )
        rows = on(rows, tokens.device)
        draft = Draft(
            torch.cat([tokens for _, tokens, _ in drawn])[rows],
            torch.cat([logp for _, _, logp in drawn])[rows],
        )
        return Proposals([guess[:-1] for guess in guesses], draft)

    def release_memory(self) -> None:
        """Free the draft model's KV cache and copies of weights."""
        self.runner.release_memory()

    def _step(self, sequences: list[Sequence], guesses: list[list[int]]) -> tuple[Tensor, Tensor]:
        """Draw the next token of each sequence -> tokens [B], log-probs [B, V]."""
        pairs = list(zip(sequences, guesses, strict=True))
        tokens = np.array([guess[-1] if guess else s.tokens[-1] for s, guess in pairs])
        positions = np.array([s.length - 1 + len(guess) for s, guess in pairs])
        logits = self.runner.decode_rows(
            [s.blocks for s in sequences], np.arange(len(sequences)), tokens, positions
        )
        params = [s.request.params for s in sequences]
        logp, _ = distribution(logits, params, [tokens_seen(s, guess) for s, guess in pairs])
        return draw(logp, params, [s.noise[len(s.logp) + len(guess)] for s, guess in pairs]), logp


def check_vocabulary(target: LanguageModel, draft: LanguageModel) -> None:
    """Check that both models have the same vocabulary size.

    Raises:
        ValueError: if the sizes differ.
    """
    ours, theirs = _vocabulary(target), _vocabulary(draft)
    if ours != theirs:
        raise ValueError(
            f"the draft model has {theirs} tokens, but the model has {ours}. Use a draft model"
            " with the same tokenizer and vocabulary"
        )


@torch.inference_mode()
def _vocabulary(model: LanguageModel) -> int:
    """Number of logits of a model, found by running one token on a cache of one block."""
    zero = np.zeros(1, dtype=np.int64)
    return ModelRunner(model, KVCache(1, 1), None).decode_rows([[0]], zero, zero, zero).shape[-1]
