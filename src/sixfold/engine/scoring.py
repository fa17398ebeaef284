"""Exact log-probs of given tokens, for requests that ask how probable their own prompt is.

Prompts are computed over a KV cache of their own, which the running sequences do not see, a piece at a
time: a caller can step the engine between two pieces.
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
"""Tokens of one forward. Its logits exist at one time: 256 rows of 150,000 are 150 MB."""


@dataclass(frozen=True)
class PromptScore:
    """Log-probs of the tokens of a prompt but its first, which nothing predicts.

    Attributes:
        logp: [T - 1], of each token after those before it.
        top: the likeliest tokens at each place with their log-probs, best first.
    """

    logp: list[float]
    top: list[dict[int, float]]


class PromptScorer:
    """Scores prompts under a model.

    Args:
        runner: of the engine that serves; the model, its precision and the kind of its cache are taken over.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    def scores(self, prompts: list[list[int]], temperature: float, top: int, adapter: LoadedAdapter | None = None) -> Iterator[PromptScore | None]:
        """One score for each prompt, in order. Yields None after a forward that did not complete one.

        Args:
            prompts: token ids, each with at least one.
            temperature: log-probs are those of logits / temperature; 0 stands for 1, as in sampling.
            top: likeliest tokens to keep at each place.
            adapter: what the model's layers add.
        """
        for prompt in prompts:
            yield from self._score(prompt, SamplingParams(max_tokens=1, temperature=temperature, top_logprobs=top), adapter)

    def _score(self, prompt: list[int], params: SamplingParams, adapter: LoadedAdapter | None) -> Iterator[PromptScore | None]:
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
    """Add the log-probs of the tokens that follow. logits: [N, V], of which the last row may predict nothing that is there."""
    if not following:
        return
    logp, _ = distribution(logits[: len(following)], [params] * len(following), [[]] * len(following))
    score.logp.extend(logp.gather(-1, torch.tensor(following, device=logp.device)[:, None])[:, 0].tolist())
    if params.top_logprobs:
        best = logp.topk(min(params.top_logprobs, logp.shape[-1]), dim=-1)
        score.top.extend(dict(zip(ids, values, strict=True)) for ids, values in zip(best.indices.tolist(), best.values.tolist(), strict=True))


def _over_own_cache(runner: ModelRunner, tokens: int) -> ModelRunner:
    """The same model, weights and precision over a new cache for so many tokens."""
    size = runner.cache.block_size
    return runner.over(type(runner.cache)(-(-tokens // size), size))
