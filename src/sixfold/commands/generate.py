"""`sixfold generate`: sample completions of one prompt.

The model is a model folder, a checkpoint, a run or a hub id.
"""

from __future__ import annotations

import asyncio

from ..engine.engine import Engine
from ..engine.speculative import Speculation
from ..errors import UserError
from ..model.causal_lm import CausalLM
from ..rollout.engine_generator import EngineGenerator
from ..rollout.generator import Sampled, SampleKey
from ..rollout.renderer.renderer import Renderer
from ..run.sampling_model import load_for_sampling
from ..types import SamplingParams, Task

DEFAULT_TOKENS = 256
"""Maximum completion length if none is requested and the context has room for it."""


def generate(
    model: str,
    prompt: str,
    *,
    n: int,
    temperature: float,
    max_tokens: int | None,
    seed: int,
    speculation: Speculation | None = None,
    device: str = "auto",
    precision: str = "auto",
) -> list[str]:
    """Sample completions of one prompt.

    Args:
        model: a run, a checkpoint, a model folder or a hub id.
        prompt: text to complete, or the message to a chat model.
        n: number of completions.
        temperature: 0 is greedy.
        max_tokens: maximum completion length, in tokens. None: as many as fit, at most
            DEFAULT_TOKENS.
        seed: seed of the sampling noise.
        speculation: how to propose speculative tokens, or None.
        device: auto, cpu, cuda or cuda:N.
        precision: auto, float32 or bfloat16 (`run/sampling_model.py`).

    Returns:
        The completions as text.

    Raises:
        UserError: if the model cannot be loaded, the device is missing, or the prompt does not fit
            the context.
    """
    policy = load_for_sampling(model, device, precision, "MODEL")
    renderer = Renderer(policy.tokenizer, policy.stop_token_ids)
    task = Task("prompt", prompt)
    prompt_tokens = renderer.encode(task)
    tokens = len(prompt_tokens)
    limit = _limit(tokens, max_tokens, policy.context)
    engine = Engine(
        CausalLM(policy.model), kv_tokens=(tokens + limit + 32) * n, speculation=speculation
    )
    sampling = SamplingParams(limit, temperature, stop_token_ids=policy.stop_token_ids, seed=seed)
    generator = EngineGenerator(engine, renderer)

    async def sample() -> list[Sampled]:
        keys = [SampleKey(task.id, k) for k in range(n)]
        stops = policy.stop_strings
        return await asyncio.gather(
            *(generator.generate(prompt_tokens, sampling, key, stops=stops) for key in keys)
        )

    try:
        completions = asyncio.run(sample())
    finally:
        generator.close()
    return [renderer.decode(c.tokens) if c.text is None else c.text for c in completions]


def _limit(prompt: int, wanted: int | None, context: int) -> int:
    """Maximum completion length, in tokens.

    Raises:
        UserError: if prompt and completion are longer than the context.
    """
    room = context - prompt
    if room < 1:
        raise UserError(
            f"--prompt has {prompt} tokens, and the model's context holds {context}: shorten it"
        )
    if wanted is not None and wanted > room:
        raise UserError(
            f"--max-tokens {wanted}: the prompt has {prompt} tokens, and the model's context of"
            f" {context} has room for {room} more"
        )
    return min(DEFAULT_TOKENS, room) if wanted is None else wanted


def generate_command(
    model: str,
    prompt: str,
    *,
    n: int,
    temperature: float,
    max_tokens: int | None,
    seed: int,
    speculation: str,
    device: str,
    precision: str,
) -> int:
    """Print the completions one after another.

    Args:
        model: a run, a checkpoint, a model folder or a hub id.
        prompt: text to complete, or the message to a chat model.
        n: number of completions.
        temperature: 0 is greedy.
        max_tokens: as in `generate`.
        seed: seed of the sampling noise.
        speculation: none or ngram.
        device: auto, cpu, cuda or cuda:N.
        precision: auto, float32 or bfloat16.

    Returns:
        The exit code, 0.
    """
    from ..report.untrusted import visible

    texts = generate(
        model,
        prompt,
        n=n,
        temperature=temperature,
        max_tokens=max_tokens,
        seed=seed,
        speculation=Speculation() if speculation == "ngram" else None,
        device=device,
        precision=precision,
    )
    for i, text in enumerate(texts):
        print(f"--- {i + 1} of {n}" if n > 1 else "", end="\n" if n > 1 else "")
        print(visible(text))
    return 0
