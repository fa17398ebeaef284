"""Memory that a run holds from start to end: weights, gradients, optimizer state, copies. No torch.

docs/memory.md explains the formulas.
"""

from __future__ import annotations

from dataclasses import dataclass

from .algorithm_plan import resolve_algorithm
from .memory_part import GRADIENT, LOWERED, MOMENTS, WEIGHTS, Part, number_width
from .model_size import ModelSize
from .schema import ALL_LINEAR, LoraConfig, Recipe


@dataclass(frozen=True)
class Holdings:
    """Numbers that a run holds.

    Attributes:
        parameters: parameters of the policy, without an adapter.
        lowered: those of them that are stored in bfloat16.
        trained: numbers that the optimizer updates: all parameters, or the adapter's.
        cast: parameters of which the engine has a bfloat16 copy, in a bfloat16 run.
        teacher: parameters of a separate reference model. None: there is none.
        draft: parameters of the draft model. None: there is none.
    """

    parameters: int
    lowered: int
    trained: int
    cast: int
    teacher: int | None = None
    draft: int | None = None

    @property
    def stored(self) -> int:
        """Bytes of the policy's weights, without an adapter."""
        return WEIGHTS * self.parameters - (WEIGHTS - LOWERED) * self.lowered


def adapter_parameters(lora: LoraConfig, size: ModelSize) -> int | None:
    """Parameters of a LoRA adapter. None if the linear modules of the model are not known.

    Each module with i inputs and o outputs has matrices of rank x i and o x rank; DoRA adds o.
    """
    if size.linears is None:
        return None
    chosen = [m for m in size.linears if lora.targets == (ALL_LINEAR,) or m.name in lora.targets]
    magnitudes = int(lora.dora)
    return sum(
        m.count * (lora.rank * (m.inputs + m.outputs) + magnitudes * m.outputs) for m in chosen
    )


def holdings(
    recipe: Recipe, size: ModelSize, teacher: int | None = None, draft: int | None = None
) -> Holdings | None:
    """What the recipe makes a run hold. None if the size of its adapter is not known.

    Args:
        recipe: the whole run.
        size: sizes of the policy, without an adapter.
        teacher: parameters of a separate reference model. None: there is none.
        draft: parameters of the draft model. None: there is none.
    """
    lora = recipe.model.lora
    trained = adapter_parameters(lora, size) if lora.rank else size.parameters
    if trained is None:
        return None
    # A tied head is the embedding, which is looked up in float32.
    head = 0 if size.tied else size.table
    lowered = 0
    if lora.rank and lora.base == "bfloat16":
        lowered = head + sum(m.count * m.inputs * m.outputs for m in size.linears or ())
    cast = cast_parameters(size, lowered)
    return Holdings(size.parameters, lowered, trained, cast, teacher, draft)


def cast_parameters(size: ModelSize, lowered: int) -> int:
    """Parameters of which the engine of a bfloat16 run has a bfloat16 copy.

    They are what matrix products read in float32. An embedding that is not the head is looked up.

    Args:
        size: sizes of the policy.
        lowered: parameters that are stored in bfloat16: none, or all linear modules.
    """
    if lowered:
        return size.table if size.tied else 0
    return size.parameters - (0 if size.tied else size.table)


def checkpoint_bytes(recipe: Recipe, size: ModelSize | None, parameters: int | None) -> int | None:
    """Bytes of a checkpoint: the trained weights and AdamW's moments. None: not known.

    Args:
        recipe: the whole run.
        size: sizes of the policy, if they are known.
        parameters: parameters of the policy, if they are known.
    """
    if recipe.model.lora.rank:
        parameters = None if size is None else adapter_parameters(recipe.model.lora, size)
    return None if parameters is None else (WEIGHTS + MOMENTS) * parameters


def held_parts(recipe: Recipe, held: Holdings) -> tuple[Part, ...]:
    """Memory that is held for the whole run.

    Args:
        recipe: the whole run.
        held: numbers that it holds.
    """
    method, adapter = resolve_algorithm(recipe.algorithm), recipe.model.lora.rank > 0
    trained = "per number of the adapter" if adapter else "per parameter"
    parts = [_weights(held)]
    if adapter:
        size = WEIGHTS * held.trained
        parts.append(Part("adapter", size, f"{held.trained:,} numbers, float32", early=True))
    parts += [
        Part("gradients", GRADIENT * held.trained, f"4 bytes {trained}, float32", samples=False),
        Part("AdamW moments", MOMENTS * held.trained, f"8 bytes {trained}, float32"),
    ]
    if method.needs_reference:
        parts += _reference(recipe, held)
    if method.needs_critic and recipe.critic.body == "own":
        each = WEIGHTS + GRADIENT + MOMENTS
        says = f"{each} bytes per parameter: weights, gradients, moments"
        parts.append(Part("critic", each * held.parameters, says))
    return (*parts, *_sampler(recipe, held))


def _weights(held: Holdings) -> Part:
    says = "4 bytes per parameter, float32"
    if held.lowered:
        says = f"{held.lowered:,} parameters in bfloat16, 2 bytes each; 4 bytes for the others"
    return Part("weights", held.stored, says, early=True)


def _reference(recipe: Recipe, held: Holdings) -> list[Part]:
    if recipe.model.lora.rank and not recipe.reference.path:
        says = "at most an adapter of its own: the reference runs the policy's base"
        return [Part("reference", WEIGHTS * held.trained, says)]
    parameters = held.teacher or held.parameters
    return [Part("reference", WEIGHTS * parameters, "4 bytes per parameter, float32")]


def _sampler(recipe: Recipe, held: Holdings) -> list[Part]:
    """Weights that only the embedded engine reads."""
    if recipe.rollout.backend.kind != "engine":
        return _draft(recipe, held)
    parts = []
    if recipe.model.lora.rank:
        says = "the engine's own copy of the adapter, float32"
        parts.append(Part("engine's adapter", WEIGHTS * held.trained, says, early=True))
    if recipe.run.precision == "bfloat16" and held.cast:
        says = f"2 bytes each for {held.cast:,} parameters that matrix products read, bfloat16"
        parts.append(Part("engine's weights", LOWERED * held.cast, says))
    if recipe.sync.kind != "shared":
        says = f"a copy of the weights: sync.kind = {recipe.sync.kind}"
        parts.append(Part("sync copy", held.stored, says, early=True))
    return parts + _draft(recipe, held)


def _draft(recipe: Recipe, held: Holdings) -> list[Part]:
    if held.draft is None:
        return []
    width = number_width(recipe)
    return [Part("draft model", width * held.draft, f"{width} bytes per parameter", early=True)]
