"""Memory of a run, part by part, computed from the recipe and the model's sizes. No torch.

`run/kv_size.py` uses it to reserve memory for training before it sizes the KV cache.
`recipe/explain/memory.py` displays it (`sixfold explain`). docs/memory.md explains the formulas.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from ..recipe.schema import AlgorithmConfig, LoraConfig, Recipe, RunConfig
from .held import Part, held_parts, holdings
from .kv_cache import HEADROOM, token_bytes, whole_blocks
from .model_size import ModelSize
from .work import record_bytes, work_parts

CACHE = "KV cache"
"""Name of the part for the KV cache."""


@dataclass(frozen=True)
class MemoryPlan:
    """Memory of a run on one GPU, part by part. Parts in host memory are listed too.

    Attributes:
        parts: in display order.
        cache_wanted: tokens of the KV cache.
        cache_least: minimum tokens of the KV cache: one sequence, or the size set by the recipe.
        cache_token: bytes of one token in the KV cache.
        sequence: tokens of the longest sequence, in whole blocks.
        cache_trains: the KV cache stays allocated while the trainer works.
    """

    parts: tuple[Part, ...]
    cache_wanted: int
    cache_least: int
    cache_token: int
    sequence: int
    cache_trains: bool

    @property
    def training(self) -> int:
        """Bytes while the trainer works, without the KV cache."""
        return sum(p.size for p in self.parts if p.trains and not p.host)

    @property
    def sampling(self) -> int:
        """Bytes while completions are sampled, without the KV cache."""
        return sum(p.size for p in self.parts if p.samples and not p.host)

    @property
    def host(self) -> int:
        """Bytes in host memory."""
        return sum(p.size for p in self.parts if p.host)

    def needed(self, cache: int) -> int:
        """Peak bytes with a KV cache of `cache` tokens."""
        cached = cache * self.cache_token
        return max(self.sampling + cached, self.training + (cached if self.cache_trains else 0))

    def peak_parts(self, cache: int) -> tuple[str, tuple[Part, ...]]:
        """Phase with the most memory, and what is on the GPU then: all parts and the KV cache.

        Args:
            cache: tokens of the KV cache.
        """
        cached = Part(CACHE, cache * self.cache_token, f"{cache:,} tokens")
        cached = replace(cached, trains=self.cache_trains)
        parts = [part for part in (*self.parts, cached) if part.size and not part.host]
        trains = tuple(part for part in parts if part.trains)
        samples = tuple(part for part in parts if part.samples)
        sizes = [sum(part.size for part in found) for found in (trains, samples)]
        return ("training", trains) if sizes[0] >= sizes[1] else ("sampling", samples)

    def cache_that_fits(self, total: int, free: int | None = None) -> int | None:
        """Tokens of the KV cache on a device. None if the run does not fit on it.

        Args:
            total: bytes of the device. A tenth is kept as headroom.
            free: bytes not used by other processes. None: all.
        """
        room = (total if free is None else free) - int(HEADROOM * total)
        spare = room - (max(self.sampling, self.training) if self.cache_trains else self.sampling)
        if room < self.training:
            return None
        tokens = min(self.cache_wanted, max(0, spare) // self.cache_token)
        return tokens if tokens >= self.cache_least else None


def memory_plan(
    recipe: Recipe,
    size: ModelSize,
    prompt: int | None,
    longest: int | None,
    teacher: int | None = None,
    draft: ModelSize | None = None,
    ranks: int = 1,
) -> MemoryPlan | None:
    """Memory of the run, part by part. None if the number of adapter parameters is unknown.

    Args:
        recipe: the whole run.
        size: sizes of the policy.
        prompt: longest prompt, in tokens. None: not known.
        longest: longest sequence, in tokens. None: not known.
        teacher: parameters of a separate reference model.
        draft: sizes of the draft model. None: there is none.
        ranks: number of processes that torchrun starts. The plan is for one of them.
    """
    engine, embedded = recipe.engine, recipe.engine_here
    sequence = whole_blocks(longest, engine.block_size) if longest else 0
    wanted = engine.kv_tokens or engine.max_running * sequence
    held = holdings(recipe, size, teacher, draft.parameters if draft else None, ranks)
    if held is None:
        return None
    work = work_parts(recipe, size, held, prompt, longest)
    plan = MemoryPlan(
        parts=(*held_parts(recipe, held), *(p for p in work if embedded or p.trains)),
        cache_wanted=wanted if embedded else 0,
        cache_least=(engine.kv_tokens or sequence) if embedded else 0,
        cache_token=_cache_token(recipe.run, size, engine.kv_dtype)
        + record_bytes(recipe.moe.routing, size.experts)
        + (_cache_token(recipe.run, draft, "auto") if draft else 0),
        sequence=sequence,
        cache_trains=not engine.release_kv,
    )
    if not recipe.full_sft:
        return plan
    # The default algorithm has neither a reference nor a critic, and neither has SFT.
    full = recipe.with_settings({"model.lora": LoraConfig(), "algorithm": AlgorithmConfig()})
    before = memory_plan(full, size, prompt, longest, teacher, draft, ranks)
    return plan if before is None else replace(plan, parts=(*plan.parts, *_sft(plan, before)))


def _sft(plan: MemoryPlan, before: MemoryPlan) -> tuple[Part, ...]:
    """Memory that SFT of all weights needs in addition to the training of an adapter.

    Args:
        plan: training of the adapter.
        before: training of all weights.
    """
    training, sampling = before.training - plan.training, before.sampling - plan.sampling
    says = "{} bytes before there is an adapter, minus those with one"
    return (
        Part("SFT of all weights", max(0, training), says.format(before.training), samples=False),
        Part(
            "sampling during SFT",
            max(0, sampling),
            says.format(before.sampling),
            trains=False,
        ),
    )


def _cache_token(run: RunConfig, size: ModelSize, kv_dtype: str) -> int:
    """Bytes of one token in a model's KV cache."""
    return token_bytes(size.cached(padded=run.device != "cpu"), run.product_bytes, kv_dtype)


def ranks_started() -> int:
    """Number of processes of the run: WORLD_SIZE, which torchrun sets, or else 1."""
    stated = os.environ.get("WORLD_SIZE", "")
    return max(1, int(stated)) if stated.isascii() and stated.isdigit() else 1
