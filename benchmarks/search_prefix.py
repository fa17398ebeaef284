"""Tokens that a beam search prefills with the prefix cache, beside a search that prefills the whole
prefix again for every step.

    python benchmarks/search_prefix.py [--prompt 256] [--steps 8] [--step-tokens 32]

A beam of 16 chains, each extended 4 times per step, on a small model with random weights. All
variants must choose the same tokens. Tokens are the engine's counters.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sixfold.engine.engine import Engine
from sixfold.model.causal_lm import CausalLM
from sixfold.model.loading import Policy, load_policy
from sixfold.recipe.schema import ModelConfig, ScratchConfig
from sixfold.renderer.renderer import Renderer
from sixfold.rollout.engine_generator import EngineGenerator
from sixfold.rollout.generator import Sampled, wait_for
from sixfold.types import SamplingParams, Task
from sixfold_search import Settings, Stepping, search

CHAINS, EXTENSIONS = 16, 4


class Scores:
    """A number for every text, by its characters."""

    tokens = 0

    def score(
        self, task: Task, completions: Sequence[str], ends: Sequence[Sequence[int]]
    ) -> list[list[float]]:
        return [[random.Random(text).random()] for text in completions]


class OneByOne:
    """A generator whose calls are requests of their own, as of a client without batches."""

    def __init__(self, inner: EngineGenerator) -> None:
        self._inner, self._lock = inner, asyncio.Lock()

    async def generate(self, *given: Any, **more: Any) -> Sampled:
        async with self._lock:
            return await self._inner.generate(*given, **more)


@dataclass(frozen=True)
class Measured:
    """Chosen tokens, prefilled and sampled tokens of the engine, and seconds."""

    chosen: list[int]
    prefilled: int
    sampled: int
    seconds: float


def measure(policy: Policy, given: argparse.Namespace, cache: str, one_by_one: bool) -> Measured:
    """One search on an engine of its own."""
    length = given.steps * given.step_tokens
    tokens = 2 * CHAINS * EXTENSIONS * (given.prompt + length)
    engine = Engine(CausalLM(policy.model), kv_tokens=tokens, prefix_cache=cache)
    renderer = Renderer(policy.tokenizer)
    inner = EngineGenerator(engine, renderer)
    generator: Any = OneByOne(inner) if one_by_one else inner
    began = time.perf_counter()
    found = wait_for(
        search(
            generator,
            renderer,
            Task("t", "1+2=" * (given.prompt // 4)),
            method="beam",
            params=SamplingParams(max_tokens=length, seed=1),
            settings=Settings(n=CHAINS * EXTENSIONS, expand=EXTENSIONS),
            stepping=Stepping(f"every:{given.step_tokens}"),
            scorer=Scores(),
            by_step=False,
        )
    )
    seconds = time.perf_counter() - began
    inner.close()
    stats = engine.stats
    return Measured(found.best.tokens, stats.prefill_tokens, stats.decoded_tokens, seconds)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompt", type=int, default=256, help="tokens of the prompt")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--step-tokens", type=int, default=32)
    given = parser.parse_args()
    torch.set_num_threads(1)
    context = given.prompt + given.steps * given.step_tokens + 1
    policy = load_policy(ModelConfig(scratch=ScratchConfig(context=context)), seed=0, device="cpu")
    variants = {
        "prefix cache": ("radix", False),
        "every step again": ("none", False),
        "every extension again": ("none", True),
    }
    found = {name: measure(policy, given, *how) for name, how in variants.items()}
    first = found["prefix cache"]
    print(f"{'':24}{'prefilled':>12}{'sampled':>10}{'ratio':>8}{'seconds':>9}")
    for name, one in found.items():
        if one.chosen != first.chosen or one.sampled != first.sampled:
            raise SystemExit(f"{name}: chooses other tokens")
        ratio = one.prefilled / first.prefilled
        print(f"{name:24}{one.prefilled:>12,}{one.sampled:>10,}{ratio:>8.1f}{one.seconds:>9.1f}")


if __name__ == "__main__":
    main()
