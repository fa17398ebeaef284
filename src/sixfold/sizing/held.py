"""Memory that a run holds from start to end: weights, gradients, optimizer state, copies. No torch.

docs/memory.md explains the formulas.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..recipe.algorithm_plan import resolve_algorithm
from ..recipe.preference_plan import keeps_reference
from ..recipe.schema import (
    ALL_LINEAR,
    EngineConfig,
    LoraConfig,
    ParallelConfig,
    Recipe,
    ReferenceConfig,
    SyncConfig,
    TrainerConfig,
)
from .model_size import ModelSize

WEIGHTS, GRADIENT, MOMENTS, LOWERED = 4, 4, 8, 2
"""Bytes per parameter: float32 weights, gradient, AdamW's two moments, a bfloat16 copy."""
BLOCK_8BIT = 256
"""Numbers per block of 8-bit moments: `trainer.lean_adamw.BLOCK`."""
BLOCK_NF4 = 64
"""Numbers of a block of a base in NF4: 4 bits each, and a bfloat16 scale."""
MOMENTS_8BIT = 2 * (BLOCK_8BIT + 4)
"""Bytes per block, for two moments: one byte per number, and a float32 scale."""


@dataclass(frozen=True)
class Part:
    """Memory for one purpose.

    Attributes:
        name: name of the part.
        size: bytes.
        formula: how the bytes follow from sizes and settings.
        trains: allocated while the trainer works.
        samples: allocated while completions are sampled.
        early: already allocated when the KV cache is created.
        host: in host memory, not on the device.
    """

    name: str
    size: int
    formula: str
    trains: bool = True
    samples: bool = True
    early: bool = False
    host: bool = False


@dataclass(frozen=True)
class RankGroups:
    """Processes that torchrun starts, and the groups in which they share what a run holds.

    Attributes:
        ranks: all processes. With several, each engine has its own weights.
        shards: ranks that share one copy of weights, gradients and optimizer state.
        tensor: ranks of a tensor group, which divide the layers. 1: there are none.
        experts: ranks of an expert group, which divide the experts. 1: there are none.
        context: ranks of a context group, which divide the positions of a micro-batch. 1: there
            are none.
    """

    ranks: int = 1
    shards: int = 1
    tensor: int = 1
    experts: int = 1
    context: int = 1


def rank_groups(parallel: ParallelConfig, ranks: int) -> RankGroups:
    if ranks == 1:
        return RankGroups()
    shards = max(1, ranks // parallel.replicas)
    return RankGroups(ranks, shards, parallel.tensor, parallel.experts, parallel.context)


@dataclass(frozen=True)
class Holdings:
    """Counts of the numbers (parameters) that a run keeps in memory.

    Attributes:
        parameters: parameters of the policy, without an adapter.
        matrices: parameters of the policy in matrices and embeddings, not in norms and biases.
        lowered: parameters of the policy that are stored in bfloat16.
        trained: numbers that the optimizer updates: all parameters, or those of the adapter.
        cast: parameters of which the engine of a bfloat16 run has a bfloat16 copy.
        teacher: parameters of a separate reference model. None: there is none.
        draft: parameters of the draft model. None: there is none.
        groups: the processes of the run.
        packed: parameters of the policy that are stored in NF4.
        critic: parameters of a critic with a body of its own, without its value head: those of the
            policy's body, or of an adapter.
    """

    parameters: int
    matrices: int
    lowered: int
    trained: int
    cast: int
    teacher: int | None = None
    draft: int | None = None
    groups: RankGroups = RankGroups()
    packed: int = 0
    critic: int = 0

    @property
    def adapter(self) -> int:
        """Number of parameters in the adapter. 0 if there is none: all weights are trained."""
        return self.trained if self.trained < self.parameters else 0

    @property
    def stored(self) -> int:
        """Bytes of the policy's weights, without an adapter."""
        plain = self.parameters - self.lowered - self.packed
        nf4 = self.packed // 2 + LOWERED * (self.packed // BLOCK_NF4)
        return WEIGHTS * plain + LOWERED * self.lowered + nf4


def adapter_parameters(lora: LoraConfig, size: ModelSize) -> int | None:
    """Parameters of a LoRA adapter. None if the linear modules of the model are unknown.

    For a module with i inputs and o outputs they are rank x (i + o). DoRA adds o.
    """
    if size.linears is None:
        return None
    chosen = [m for m in size.linears if lora.targets == (ALL_LINEAR,) or m.name in lora.targets]
    magnitudes = int(lora.dora)
    return sum(
        m.count * (lora.rank * (m.inputs + m.outputs) + magnitudes * m.outputs) for m in chosen
    )


def holdings(
    recipe: Recipe,
    size: ModelSize,
    teacher: int | None = None,
    draft: int | None = None,
    ranks: int = 1,
) -> Holdings | None:
    """Count the numbers that the recipe's run keeps. None if those of its adapter are unknown.

    Args:
        recipe: the whole run.
        size: sizes of the policy, without an adapter.
        teacher: parameters of a separate reference model. None: there is none.
        draft: parameters of the draft model. None: there is none.
        ranks: processes that torchrun starts.
    """
    lora = recipe.model.lora
    trained = adapter_parameters(lora, size) if lora.rank else size.parameters
    if trained is None:
        return None
    # A tied head is the embedding, which is looked up in float32.
    head = 0 if size.tied else size.table
    linears = sum(m.count * m.inputs * m.outputs for m in size.linears or ())
    matrices = size.table + head + linears if size.linears else size.parameters
    lowered = packed = 0
    if recipe.trainer.weights == "bfloat16":
        lowered = matrices
    elif lora.rank and lora.base == "bfloat16":
        lowered = head + linears
    elif lora.rank and lora.base == "nf4":
        lowered, packed = head, linears
    return Holdings(
        parameters=size.parameters,
        matrices=matrices,
        lowered=lowered,
        trained=trained,
        cast=cast_parameters(size, recipe.trainer, lowered + packed),
        teacher=teacher,
        draft=draft,
        groups=rank_groups(recipe.parallel, ranks),
        packed=packed,
        critic=trained if lora.rank else size.parameters - head,
    )


def cast_parameters(size: ModelSize, trainer: TrainerConfig, lowered: int) -> int:
    """Parameters of which the engine of a bfloat16 run has a bfloat16 copy.

    These are the float32 parameters that matrix products read. An embedding that is not the head
    takes part in no product.

    Args:
        size: sizes of the policy.
        trainer: sets the precision of the trained weights.
        lowered: number of parameters that are stored in bfloat16.
    """
    if trainer.weights == "bfloat16":
        return 0
    if lowered:
        return size.table if size.tied else 0
    return size.parameters - (0 if size.tied else size.table)


def checkpoint_bytes(
    trainer: TrainerConfig, held: Holdings | None, trained: int | None
) -> int | None:
    """Bytes of a checkpoint: trained weights and optimizer state. None: unknown.

    Args:
        trainer: the optimizer, and where its state is.
        held: counts of the numbers that the run keeps. None: unknown.
        trained: parameters that the optimizer updates, if nothing else is known. None: unknown.
    """
    if held is None:
        if trained is None or not trainer.plain_optimizer:
            return None
        return (WEIGHTS + MOMENTS) * trained
    weights = WEIGHTS * held.adapter or held.stored
    return weights + sum(part.size for part in _optimizer(trainer, held))


def held_parts(recipe: Recipe, held: Holdings) -> tuple[Part, ...]:
    """Memory that one rank keeps for the whole run.

    Args:
        recipe: the whole run.
        held: counts of the numbers that the run keeps.
    """
    method, trainer, shards = (
        resolve_algorithm(recipe.algorithm),
        recipe.trainer,
        held.groups.shards,
    )
    # Every rank holds the base of an adapter in full: its engine and its reference run on it.
    base = 1 if held.adapter else shards
    trains = [*_gradients(held), *_optimizer(trainer, held)]
    parts = [_shared(_weights(held), base), *(_shared(part, shards) for part in trains)]
    if method.needs_reference or keeps_reference(recipe.preference):
        among = shards if recipe.reference.path else base
        parts += [_shared(part, among) for part in _reference(recipe.reference, held)]
    if method.needs_critic and recipe.critic.body == "own":
        parts += [_shared(part, shards) for part in _critic(trainer, held)]
    width = recipe.run.product_bytes
    if recipe.engine_here:
        parts += _engine_copies(held, width, recipe.engine, recipe.sync)
    if recipe.engines_apart and recipe.engine_here:
        count = getattr(recipe.placement, "samplers", 1)
        says = f"{count} x a copy of the weights: placement, or rollout.staleness > 0"
        parts.append(Part("samplers", count * held.stored, says, early=True))
    if held.draft is not None:
        says = f"{width} bytes per parameter"
        parts.append(Part("draft model", width * held.draft, says, early=True))
    return tuple(parts)


def _gradients(held: Holdings) -> list[Part]:
    """Gradients, and the adapter if there is one."""
    if not held.adapter:
        says = "4 bytes per parameter, float32"
        return [Part("gradients", GRADIENT * held.trained, says, samples=False)]
    says = f"{held.adapter:,} numbers, float32"
    each = "4 bytes per number of the adapter, float32"
    return [
        Part("adapter", WEIGHTS * held.adapter, says, early=True),
        Part("gradients", GRADIENT * held.trained, each, samples=False),
    ]


def _shared(part: Part, shards: int) -> Part:
    """One rank's share of a part that is divided among `shards` ranks."""
    if shards == 1:
        return part
    return replace(part, size=-(-part.size // shards), formula=f"{part.formula}; 1 / {shards} each")


def _weights(held: Holdings) -> Part:
    says = "4 bytes per parameter, float32"
    if held.packed:
        says = f"{held.packed:,} parameters in NF4, 4.25 bits each; the head in bfloat16"
    elif held.lowered:
        says = f"{held.lowered:,} parameters in bfloat16, 2 bytes each; 4 bytes for the others"
    return Part("weights", held.stored, says, early=True)


def _optimizer(trainer: TrainerConfig, held: Holdings) -> list[Part]:
    """Master weights (float32 copies of bfloat16 weights), if there are any, and moments."""
    matrices = held.adapter or held.matrices
    parts = []
    if trainer.weights == "bfloat16" and trainer.rounding == "master" and not held.adapter:
        says = "4 bytes per parameter of a matrix, float32 copies of bfloat16 weights"
        host = trainer.offload == "optimizer"
        parts.append(Part("master weights", WEIGHTS * matrices, says, host=host))
    return [*parts, _adamw_moments("AdamW moments", trainer, matrices, held.trained - matrices)]


def _adamw_moments(name: str, trainer: TrainerConfig, matrices: int, vectors: int) -> Part:
    """Both moments of trained parameters.

    Args:
        name: name of the part.
        trainer: the optimizer, and where its state is.
        matrices: trained numbers in matrices.
        vectors: other trained numbers.
    """
    size, says = MOMENTS * (matrices + vectors), "8 bytes per trained number, float32"
    if trainer.optimizer == "adamw8bit":
        size = MOMENTS_8BIT * matrices // BLOCK_8BIT + MOMENTS * vectors
        says = "2 bytes per number of a matrix, and 8 bytes per block of 256 for its scales"
    return Part(name, size, says, host=trainer.offload == "optimizer")


def _critic(trainer: TrainerConfig, held: Holdings) -> list[Part]:
    """Weights and moments of a critic with a body of its own.

    It has no gradients while the policy has them: the two are updated in turn.
    """
    body = "an adapter of its own on the policy's base" if held.adapter else "a body of its own"
    vectors = 0 if held.adapter else held.parameters - held.matrices
    return [
        Part("critic", WEIGHTS * held.critic, f"{held.critic:,} numbers, float32: {body}"),
        _adamw_moments("critic's moments", trainer, held.critic - vectors, vectors),
    ]


def _reference(own: ReferenceConfig, held: Holdings) -> list[Part]:
    if held.adapter and not own.path:
        says = "at most an adapter of its own: the reference runs the policy's base"
        return [Part("reference", WEIGHTS * held.adapter, says)]
    parameters, lowered = held.parameters, held.lowered
    if own.path:
        parameters, lowered = held.teacher or held.parameters, 0
    if own.precision == "bfloat16":
        lowered = parameters if own.path else held.matrices
    size = WEIGHTS * parameters - (WEIGHTS - LOWERED) * lowered
    says = "4 bytes per parameter, float32"
    if lowered:
        says = "2 bytes per parameter of a matrix, bfloat16; 4 bytes for the others"
    if not own.offload:
        return [Part("reference", size, says)]
    while_scoring = Part("reference, while it scores", size, says, trains=False)
    return [Part("reference", size, says, host=True), while_scoring]


def _engine_copies(
    held: Holdings, width: int, engine: EngineConfig, sync: SyncConfig
) -> list[Part]:
    """Weights that only the embedded engine reads.

    Args:
        held: counts of the numbers that the run keeps.
        width: bytes per number in products.
        engine: decides whether its weights are freed while the trainer works.
        sync: decides whether it has its own weights.
    """
    parts, ranks = [], held.groups.ranks
    if held.adapter:
        says = "the engine's own copy of the adapter, float32"
        parts.append(Part("engine's adapter", WEIGHTS * held.trained, says, early=True))
    if width == LOWERED and held.cast:
        says = f"2 bytes each for {held.cast:,} parameters that matrix products read, bfloat16"
        trains = not engine.release_kv  # which frees them too
        parts.append(Part("engine's weights", LOWERED * held.cast, says, trains=trains))
    if sync.kind != "shared" or (ranks > 1 and not held.adapter):
        why = f"sync.kind = {sync.kind}" if ranks == 1 else "every rank has all of them"
        parts.append(Part("sync copy", held.stored, f"a copy of the weights: {why}", early=True))
    return parts
