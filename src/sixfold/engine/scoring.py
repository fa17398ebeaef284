"""Prompt scoring: exact log-probs of the tokens of given prompts.

Each prompt is computed over a separate KV cache, in pieces. The running sequences are not affected,
and the caller can step the engine between two pieces.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..types import SamplingParams
from .adapters import LoadedAdapter
from .model_runner import ModelRunner
from .sampler import distribution
from .sequence import Chunk, Request, Ticket

PIECE = 256
"""Tokens per forward pass. All logits of a pass are in memory together: 256 rows of 150,000 take
150 MB."""


@dataclass(frozen=True)
class PromptScore:
    """Log-probs of the tokens of a prompt of T tokens. The first token has none: nothing predicts
    it.

    Attributes:
        logp: [T - 1] log-prob of each token given the tokens before it.
        top: most likely tokens and their log-probs at each position, best first.
    """

    logp: list[float]
    top: list[dict[int, float]]


class PromptScorer:
    """Scores prompts under a model.

    Args:
        runner: runner of the engine. The scorer uses the same model, precision and kind of KV
            cache.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    def scores(
        self,
        prompts: list[list[int]],
        temperature: float,
        top: int,
        adapter: LoadedAdapter | None = None,
    ) -> Iterator[PromptScore | None]:
        """Score prompts.

        Args:
            prompts: token ids of each prompt, at least one token each.
            temperature: log-probs are those of logits / temperature; 0 counts as 1, as in sampling.
            top: number of most likely tokens to keep at each position.
            adapter: adapter to apply, or None.

        Yields:
            One score per prompt, in order, and None after each forward pass that does not complete
            a prompt.
        """
        for prompt in prompts:
            yield from self._score(
                prompt,
                SamplingParams(max_tokens=1, temperature=temperature, top_logprobs=top),
                adapter,
            )

    def _score(
        self, prompt: list[int], params: SamplingParams, adapter: LoadedAdapter | None
    ) -> Iterator[PromptScore | None]:
        runner = _over_own_cache(self._runner, len(prompt))
        ticket = Ticket(Request("", prompt, params, [0], adapter=adapter), prompt)
        blocks = list(range(runner.cache.blocks))
        score = PromptScore([], [])
        for start in range(0, len(prompt), PIECE):
            stop = min(len(prompt), start + PIECE)
            logits = _forward(runner, Chunk(ticket, blocks, start, stop, start))
            _read(logits, prompt[start + 1 : stop + 1], params, score)
            yield None if stop < len(prompt) else score


@torch.inference_mode()
def _forward(runner: ModelRunner, chunk: Chunk) -> Tensor:
    return runner.prefill([chunk], everywhere=True)


@torch.inference_mode()
def _read(logits: Tensor, following: list[int], params: SamplingParams, score: PromptScore) -> None:
    """Add log-probs to a score.

    Args:
        logits: [N, V].
        following: the token after each row: N tokens, or N - 1 at the end of the prompt.
    """
    if not following:
        return
    logp, _ = distribution(
        logits[: len(following)], [params] * len(following), [[]] * len(following)
    )
    score.logp.extend(
        logp.gather(-1, torch.tensor(following, device=logp.device)[:, None])[:, 0].tolist()
    )
    if params.top_logprobs:
        best = logp.topk(min(params.top_logprobs, logp.shape[-1]), dim=-1)
        score.top.extend(
            dict(zip(ids, values, strict=True))
            for ids, values in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        )


def _over_own_cache(runner: ModelRunner, tokens: int) -> ModelRunner:
    """Runner of the same model, weights and precision over a new cache for this many tokens."""
    size = runner.cache.block_size
    return runner.over(type(runner.cache)(-(-tokens // size), size))
