"""`sixfold generate MODEL_OR_RUN --prompt TEXT`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import MISSING, dataclass
from typing import Literal

from ..cli.parsing import (
    DEVICE_HELP,
    PRECISION_HELP,
    Device,
    NonNegativeInt,
    PositiveInt,
    Precision,
    Temperature,
    VerbParser,
    argument,
    option,
)
from ..errors import UserError
from ..report.untrusted import visible
from ..types import SamplingParams, Task

DEFAULT_TOKENS = 256
"""Maximum completion length if none is requested and the context has room for it."""


@dataclass(frozen=True, kw_only=True)
class Options:
    model: str = argument("a run, a checkpoint, or a Hugging Face model", metavar="MODEL_OR_RUN")
    prompt: str = option(
        "text to complete; for a chat model, the user message", MISSING, metavar="TEXT"
    )
    n: PositiveInt = option("number of completions (default 1)", 1)
    temperature: Temperature = option(
        "sampling temperature; 0 is greedy (default 1)", 1.0, metavar="T"
    )
    max_tokens: PositiveInt | None = option(
        "maximum completion length in tokens (default 256, or less if the context is shorter)"
    )
    seed: NonNegativeInt = option("seed of the sampling noise (default 0)", 0)
    speculation: Literal["none", "ngram"] = option(
        "speculative decoding; ngram guesses tokens from repeated text (default none)", "none"
    )
    device: Device = option(DEVICE_HELP, "auto")
    precision: Precision = option(PRECISION_HELP, "auto")


PARSER = VerbParser("generate", "Sample completions of one prompt.", Options)


def run(arguments: Sequence[str]) -> int:
    given = PARSER.parse(arguments)
    if not given.prompt.strip():
        raise UserError("sixfold generate: --prompt is empty; give the text to complete")
    for i, text in enumerate(generate(given)):
        print(f"--- {i + 1} of {given.n}" if given.n > 1 else "", end="\n" if given.n > 1 else "")
        print(visible(text))
    return 0


def generate(given: Options) -> list[str]:
    """Sample completions of one prompt.

    Raises:
        UserError: if the model cannot be loaded, the device is missing, or the prompt does not fit
            the context.
    """
    from ..engine.engine import Engine
    from ..engine.speculative import Speculation
    from ..model.causal_lm import CausalLM
    from ..renderer.renderer import Renderer
    from ..rollout.engine_generator import EngineGenerator
    from ..rollout.generator import Sampled, SampleKey
    from ..run.sampling_model import load_for_sampling

    policy = load_for_sampling(given.model, given.device, given.precision, "MODEL")
    renderer = Renderer(policy.tokenizer, policy.stop_token_ids)
    task = Task("prompt", given.prompt)
    prompt = renderer.encode(task)
    limit = _limit(len(prompt), given.max_tokens, policy.context)
    engine = Engine(
        CausalLM(policy.model),
        kv_tokens=(len(prompt) + limit + 32) * given.n,
        speculation=Speculation() if given.speculation == "ngram" else None,
    )
    sampling = SamplingParams(
        limit, given.temperature, stop_token_ids=policy.stop_token_ids, seed=given.seed
    )
    generator = EngineGenerator(engine, renderer)

    async def sample() -> list[Sampled]:
        keys = [SampleKey(task.id, k) for k in range(given.n)]
        stops = policy.stop_strings
        return await asyncio.gather(
            *(generator.generate(prompt, sampling, key, stops=stops) for key in keys)
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
