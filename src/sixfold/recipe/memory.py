"""Memory of a plan, and settings that save some: each alone, and together until a run fits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from ..errors import UserError
from ..sizing.memory import MemoryPlan, memory_plan, ranks_started
from .model_shape import ModelShape, model_shape
from .plan import Plan, make_plan
from .rank_checks import check_ranks
from .schema import LoraConfig, ModelConfig, ParallelConfig, Placement, RayPlacement, Recipe

Settings = Mapping[str, object]
"""Dotted name of a setting -> value."""


@dataclass(frozen=True)
class Together:
    """Settings that save memory together.

    Attributes:
        settings: the settings, in the order in which they were found.
    """

    settings: Settings
    plan: Plan
    memory: MemoryPlan

    def fits(self, total: int) -> bool:
        """Whether the run fits on devices of `total` bytes. A tenth is kept as headroom."""
        return self.memory.cache_that_fits(total) is not None


def ranks_of(placement: Placement) -> int:
    """Number of trainer processes: those that Ray will start, or else that torchrun has started."""
    asked = placement.ranks if isinstance(placement, RayPlacement) else 1
    return asked if asked > 1 else ranks_started()


def memory_of(plan: Plan, ranks: int = 0) -> MemoryPlan | None:
    """Memory of the plan. None if the model's sizes are not known.

    Args:
        ranks: processes of the run. 0: as many as it has.
    """
    policy, speculation, draft = plan.recipe.model, plan.recipe.engine.speculation, None
    size, teacher = plan.model.size, teacher_parameters(policy, plan.recipe.reference.path)
    if speculation.kind == "draft":
        draft = _shape_of(policy, speculation.path, "engine.speculation.path").size
    if size is None or teacher is None or (speculation.kind == "draft" and draft is None):
        return None
    return memory_plan(
        plan.recipe,
        size,
        plan.max_prompt_tokens,
        plan.longest_tokens,
        teacher or None,
        draft,
        ranks or ranks_of(plan.recipe.placement),
    )


def teacher_parameters(policy: ModelConfig, path: str) -> int | None:
    """Parameters of a separate reference model. 0 if there is none, None if not known."""
    return _shape_of(policy, path, "reference.path").parameters if path else 0


def _shape_of(policy: ModelConfig, path: str, setting: str) -> ModelShape:
    """Sizes of another model of the recipe.

    Args:
        policy: settings of the policy, which hold for the other model too.

    Raises:
        UserError: if there is no such model.
    """
    return model_shape(policy.model_copy(update={"path": path, "revision": ""}), setting)


def what_helps(plan: Plan, memory: MemoryPlan, ranks: int = 0) -> list[tuple[str, int]]:
    """(setting, saved bytes) pairs, with the largest saving first. Each setting is tried alone.

    Args:
        ranks: processes of the run. 0: as many as it has.
    """
    ranks = ranks or ranks_of(plan.recipe.placement)
    return [
        (" with ".join(f"{key} = {_shown(value)}" for key, value in settings.items()), saved)
        for settings, saved, changed, _ in _savings(plan, memory, ranks)
        if possible(changed.recipe, ranks)
    ]


def _shown(value: object) -> str:
    return f"'{value}'" if isinstance(value, str) else str(value).lower()


def saving_path(plan: Plan, ranks: int) -> list[Together]:
    """Settings that save memory together: at first none, then one more each.

    Each takes the setting with the largest saving that is left. Empty: the memory is not known.

    Args:
        ranks: processes that torchrun starts.
    """
    memory = memory_of(plan, ranks)
    path = [] if memory is None else [Together({}, plan, memory)]
    while path:
        last = path[-1]
        found = _savings(last.plan, last.memory, ranks)
        best = next((one for one in found if possible(one[2].recipe, ranks)), None)
        if best is None:
            break
        settings, _, changed, held = best
        path.append(Together({**last.settings, **settings}, changed, held))
    return path


def settings_together(path: list[Together], total: int, ranks: int) -> Together | None:
    """Settings with which a run fits on its devices. None: it does not fit with all of the path.

    Settings of the path that turn out not to be needed are left out.

    Args:
        path: from `saving_path`.
        total: bytes of a device. A tenth is kept as headroom.
        ranks: processes that torchrun starts.
    """
    found = next((one for one in path if one.fits(total)), None)
    for key in found.settings if found else ():
        assert found is not None
        fewer = {name: value for name, value in found.settings.items() if name != key}
        changed = replace(path[0].plan, recipe=path[0].plan.recipe.with_settings(fewer))
        held = memory_of(changed, ranks)
        other = None if held is None else Together(fewer, changed, held)
        if other is not None and other.fits(total) and possible(changed.recipe, ranks):
            found = other
    return found


def _savings(
    plan: Plan, memory: MemoryPlan, ranks: int
) -> list[tuple[Settings, int, Plan, MemoryPlan]]:
    """Settings that save memory alone: (settings, bytes, changed plan, its memory), best first."""
    size, found = plan.model.size, []
    experts = size.experts.count if size and size.experts else 0
    for settings in _changes(plan.recipe, experts, ranks):
        changed = replace(plan, recipe=plan.recipe.with_settings(settings))
        other = memory_of(changed, ranks)
        if other is None:
            continue
        saved = memory.needed(memory.cache_least) - other.needed(other.cache_least)
        if saved > 0:
            found.append((settings, saved, changed, other))
    return sorted(found, key=lambda one: -one[1])


def possible(recipe: Recipe, ranks: int) -> bool:
    """Whether a run with this recipe would start."""
    try:
        whole = Recipe.model_validate(recipe.model_dump())
        check_ranks(whole, make_plan(whole).algorithm, ranks)
    except (UserError, ValueError):  # a ValidationError is a ValueError
        return False
    return True


def _changes(recipe: Recipe, experts: int, ranks: int) -> Iterator[Settings]:
    """Settings that may save memory.

    Args:
        experts: experts per layer of the policy. 0: there are none.
        ranks: processes that torchrun starts.
    """
    trainer, running = recipe.trainer, recipe.engine.max_running
    wanted: list[tuple[str, object]] = [
        ("run.precision", "bfloat16"),
        ("trainer.activation_checkpointing", "full"),
        ("trainer.max_tokens_per_microbatch", max(16, trainer.max_tokens_per_microbatch // 2)),
        ("trainer.logprob_chunk", min(trainer.logprob_chunk, 256)),
        ("trainer.activation_offload", True),
        ("engine.release_kv", True),
        ("engine.kv_tokens", 0),
        ("engine.max_running", max(1, running // 4)),
        ("critic.body", "policy"),
        ("sync.kind", "shared"),
        ("parallel.context", _doubled_context(recipe.parallel, ranks)),
    ]
    if not recipe.model.lora.rank and trainer.optimizer != "adamw8bit":
        wanted += [("parallel.experts", _doubled_experts(recipe.parallel, experts, ranks))]
    lowered = recipe.run.precision == "bfloat16"
    if ranks == 1:  # several share the optimizer's state instead
        wanted += [("trainer.optimizer", "adamw8bit"), ("trainer.offload", "optimizer")]
    if not recipe.model.lora.rank:
        wanted += [("reference.offload", True)]
        wanted += [("reference.precision", "bfloat16")] * lowered
        both: dict[str, object] = {"trainer.weights": "bfloat16"}
        if ranks == 1 and trainer.weights != "bfloat16":
            yield both if lowered else {"run.precision": "bfloat16"} | both
    yield from _bases(recipe.model.lora, recipe.run.precision)
    for key, value in wanted:
        section, name = key.split(".")
        if value not in (None, getattr(getattr(recipe, section), name)):
            yield {key: value}


def _bases(lora: LoraConfig, precision: str) -> Iterator[Settings]:
    """Smaller precisions of the frozen base of an adapter. None without an adapter."""
    bases = ("float32", "bfloat16", "nf4")
    for base in bases[bases.index(lora.base) + 1 :] if lora.rank else ():
        lowered = {} if precision == "bfloat16" else {"run.precision": "bfloat16"}
        yield {"model.lora.base": base, **lowered}


def _doubled_context(parallel: ParallelConfig, ranks: int) -> int | None:
    """Twice the size of a context group. None if the ranks of one copy are no such groups."""
    twice = 2 * parallel.context
    divides = ranks % (parallel.replicas * parallel.tensor * twice) == 0
    return twice if divides else None


def _doubled_experts(parallel: ParallelConfig, experts: int, ranks: int) -> int | None:
    """Twice the size of an expert group. None if the run cannot have such groups.

    Args:
        experts: experts per layer of the policy. 0: there are none.
        ranks: processes that torchrun starts.
    """
    twice = 2 * parallel.experts
    if not experts or parallel.tensor > 1:
        return None
    divides = experts % twice == 0 and ranks % (parallel.replicas * twice) == 0
    return twice if divides else None
