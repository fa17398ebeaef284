"""Measure how much an int8 KV cache changes log-probs, before training relies on them."""

from __future__ import annotations

import asyncio

import torch
from torch import Tensor

from ..engine.adapters import LoadedAdapter
from ..engine.engine import Engine
from ..engine.kv_cache import KVCache
from ..engine.model_runner import ModelRunner, on_device
from ..engine.sequence import Chunk, Request, Ticket
from ..model.base import LanguageModel
from ..types import SamplingParams
from .engine_generator import EngineGenerator
from .generator import Sampled, SampleKey

LIMIT = 0.2
"""Largest accepted difference in nats. A bfloat16 run may differ by as much."""
TOKENS = 64
"""Length of the probe's completions."""


def kv_deviation(model: LanguageModel, prompts: list[list[int]]) -> float:
    """Largest log-prob difference, in nats, between an int8 KV cache and an exact one.

    An engine with an int8 cache samples completions. Their log-probs are then computed again with
    an exact cache.

    Args:
        model: the policy.
        prompts: token ids of each prompt.
    """
    engine = Engine(
        model,
        kv_tokens=sum(len(p) + TOKENS + 16 for p in prompts),
        kv_dtype="int8",
    )
    generator = EngineGenerator(engine)

    async def sample() -> list[Sampled]:
        params = SamplingParams(max_tokens=TOKENS)
        calls = [
            generator.generate(prompt, params, SampleKey(f"probe {i}"))
            for i, prompt in enumerate(prompts)
        ]
        return await asyncio.gather(*calls)

    try:
        completions = asyncio.run(sample())
    finally:
        generator.close()
    worst = 0.0
    for prompt, completion in zip(prompts, completions, strict=True):
        drawn = exact_logp(model, prompt + completion.tokens, None)[len(prompt) - 1 :].cpu()
        worst = max(worst, float((torch.tensor(completion.logp) - drawn).abs().max()))
    return worst


def check_int8_kv(model: LanguageModel, prompts: list[list[int]]) -> float:
    """Return `kv_deviation`, and check it against `LIMIT`.

    Args:
        model: the policy.
        prompts: token ids of each prompt.

    Raises:
        ValueError: the difference is above the limit, or NaN.
    """
    worst = kv_deviation(model, prompts)
    if not worst <= LIMIT:
        raise ValueError(
            f"an int8 KV cache changes this model's log-probs by {worst:.2g} nats (limit"
            f" {LIMIT:g}). Use kv_dtype auto"
        )
    return worst


@torch.inference_mode()
def exact_logp(
    model: LanguageModel,
    tokens: list[int],
    autocast: torch.dtype | None,
    adapter: LoadedAdapter | None = None,
) -> Tensor:
    """Log-probs of all tokens but the first, at temperature 1, with an unquantized KV cache.

    Args:
        model: the policy.
        tokens: token ids. One forward pass computes all of them.
        autocast: dtype of the forward pass; None for no autocast.
        adapter: adapter to apply, or None.

    Returns:
        Log-probs [len(tokens) - 1].
    """
    cache = KVCache(-(-len(tokens) // 16), 16)
    request = Request("", tokens, SamplingParams(max_tokens=1), [0], adapter=adapter)
    ticket = Ticket(request, tokens)
    chunk = Chunk(ticket, list(range(cache.blocks)), 0, len(tokens), 0)
    runner = ModelRunner(model, cache, autocast)
    with on_device(runner.device):
        logp = runner.prefill([chunk], everywhere=True).log_softmax(-1)
    return logp[:-1].gather(-1, torch.tensor(tokens[1:], device=logp.device)[:, None])[:, 0]
