"""Memory of a run, part by part, computed from the recipe and the model's sizes. No torch.

`run/kv_size.py` uses it to reserve memory for training before it sizes the KV cache.
`recipe/memory_text.py` displays it (`sixfold explain`). docs/memory.md explains the formulas.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .kv_budget import HEADROOM, token_bytes, wanted_tokens
from .memory_experts import expert_parts, record_bytes
from .memory_held import held_parts, holdings
from .memory_part import Part, number_width
from .memory_shards import gathered_parts
from .memory_work import rank_tokens, work_parts
from .model_size import ModelSize
from .schema import AlgorithmConfig, LoraConfig, Recipe


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
    engine, embedded = recipe.engine, recipe.rollout.backend.kind == "engine"
    sequence = wanted_tokens(1, longest, engine.block_size) if longest else 0
    wanted = engine.kv_tokens or engine.max_running * sequence
    held = holdings(recipe, size, teacher, draft.parameters if draft else None, ranks)
    if held is None:
        return None
    work = [p for p in work_parts(recipe, size, prompt, held) if embedded or p.trains]
    tokens = rank_tokens(recipe, prompt, held)
    plan = MemoryPlan(
        parts=(
            *held_parts(recipe, held),
            *gathered_parts(recipe, size, held),
            *work,
            *expert_parts(recipe, size, tokens, longest, held.experts),
        ),
        cache_wanted=wanted if embedded else 0,
        cache_least=(engine.kv_tokens or sequence) if embedded else 0,
        cache_token=_cache_token(recipe, size, engine.kv_dtype)
        + record_bytes(recipe, size.experts)
        + (_cache_token(recipe, draft, "auto") if draft else 0),
        sequence=sequence,
        cache_trains=not engine.release_kv,
    )
    if not recipe.full_sft:
        return plan
    model = recipe.model.model_copy(update={"lora": LoraConfig()})
    # The default algorithm has neither a reference nor a critic, and neither has SFT.
    full = recipe.model_copy(update={"model": model, "algorithm": AlgorithmConfig()})
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


def _cache_token(recipe: Recipe, size: ModelSize, kv_dtype: str) -> int:
    """Bytes of one token in a model's KV cache."""
    cached = size.cached(padded=recipe.run.device != "cpu")
    return token_bytes(cached, number_width(recipe), kv_dtype)
