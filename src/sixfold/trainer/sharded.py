"""Shard a model over the ranks of a run (FSDP2).

Every decoder layer is one group of parameters. The root holds the rest: embeddings, last norm and
head. A rank holds its part of every parameter, gradient and optimizer moment. The weights of a
layer are gathered before its forward pass and before its backward pass, and freed after each. Its
gradient is then summed over the ranks. It is not averaged, because the weights of a loss are
already normalised over the whole step.

With `parallel.tensor`, the ranks form tensor groups. The layers are divided within a group first
(`tensor_parallel.py`), and FSDP shards the part of each rank over the ranks with the same place in
their groups. The root is sharded over all ranks.

With `parallel.experts`, the ranks form expert groups, and the experts of every layer are divided
within a group first (`expert_parallel.py`). FSDP shards the experts of each rank over the ranks
that have the same ones. All other weights are sharded over all ranks.

With `parallel.context`, neighbouring ranks divide the positions of each row
(`context_parallel.py`). Weights are sharded over all ranks as before.

Parameters can stay whole: with a LoRA adapter, every rank has all weights of the frozen base, and
only the adapter is sharded.

Sharded parameters are `DTensor`s. `own_part` is the part of this rank; `whole` gathers all parts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from ..errors import UserError
from ..ranks import Ranks, spaced_group
from ..recipe.schema import ParallelConfig
from .context_parallel import ContextGroup
from .expert_parallel import ExpertMesh, check_experts, divide_experts, expert_mesh
from .group_size import check_group_size
from .head_share import HeadShare
from .logprobs import PolicyRoot, ScalarRoot
from .resharding import Layout, at, empty_box, layout_of, reshard, whole_box
from .tensor_parallel import check_divisible, divide_layers

R = TypeVar("R", PolicyRoot, ScalarRoot)


@dataclass(frozen=True)
class RankMesh:
    """Meshes of ranks over which a model is sharded.

    Attributes:
        every: all ranks, [shards] or [replicas, shards].
        data: one rank of each tensor group, those with the position of this rank in its group.
            [shards] or [replicas, shards]. Equal to `every` without tensor parallelism.
        tensor: the tensor group of this rank. None without tensor parallelism.
        experts: the ranks that share experts. None without expert parallelism.
        context: the context group of this rank. None without context parallelism.
    """

    every: DeviceMesh
    data: DeviceMesh
    tensor: DeviceMesh | None = None
    experts: ExpertMesh | None = None
    context: dist.ProcessGroup | None = None

    @property
    def group(self) -> int:
        """Number of ranks of a tensor group."""
        return self.tensor.size() if self.tensor else 1


def rank_mesh(
    ranks: Ranks,
    replicas: int,
    device: str,
    tensor: int = 1,
    experts: int = 1,
) -> RankMesh:
    """Make the meshes of a run. Ranks with consecutive numbers form a group.

    Args:
        replicas: copies of the sharded model.
        tensor: ranks per tensor group. `replicas * tensor` must divide the number of ranks.
        experts: ranks per expert group. `replicas * experts` must divide the number of ranks.
    """
    names = ("shard",) if replicas == 1 else ("replicate", "shard")
    copies = () if replicas == 1 else (replicas,)
    shards = ranks.size // replicas
    every = init_device_mesh(device, (*copies, shards), mesh_dim_names=names)
    sharing = expert_mesh(ranks.size, replicas, device, experts) if experts > 1 else None
    if tensor == 1:
        return RankMesh(every, every, experts=sharing)
    shape = (*copies, shards // tensor, tensor)
    grid = init_device_mesh(device, shape, mesh_dim_names=(*names, "tensor"))
    return RankMesh(every, grid[names], grid["tensor"], sharing)


@dataclass(frozen=True)
class Shards:
    """A root that is sharded over the ranks.

    Attributes:
        ranks: the ranks that share the rows: one of those that compute the same rows.
        autocast: precision of the body's forward pass. None: the dtype of the weights.
    """

    root: PolicyRoot
    mesh: RankMesh
    ranks: Ranks
    autocast: torch.dtype | None

    def shard(self, root: R, kept_whole: Iterable[nn.Parameter] = ()) -> R:
        """Shard another root, such as a frozen reference or a critic, in the same way.

        Args:
            kept_whole: frozen parameters that every rank keeps in full.
        """
        shard_root(root, self.mesh, self.autocast, kept_whole)
        return root


def shard_policy(
    root: PolicyRoot,
    ranks: Ranks,
    parallel: ParallelConfig,
    autocast: torch.dtype | None,
    kept_whole: Iterable[nn.Parameter] = (),
) -> Shards:
    """Shard the policy over the ranks, in place.

    Args:
        root: body and head, with the same weights on all ranks.
        parallel: settings that decide how the ranks share the model.
        autocast: precision of the body's forward pass. None: the dtype of the weights.
        kept_whole: frozen parameters that every rank keeps in full.

    Raises:
        UserError: if the settings do not fit the ranks or the model.
    """
    replicas = parallel.replicas
    if ranks.size % replicas:
        raise UserError(
            f"parallel.replicas = {replicas} does not divide the {ranks.size} ranks. Use a divisor"
            " of the number of ranks, or 1"
        )
    tensor, context = parallel.tensor, parallel.context
    check_divisible(root.model, tensor, ranks.size // replicas)
    check_experts(root.model, parallel.experts, ranks.size // replicas)
    check_context(context, tensor, ranks.size // replicas)
    device = next(root.parameters()).device.type
    mesh = rank_mesh(ranks, replicas, device, tensor, parallel.experts)
    if context > 1:
        # With tensor groups, a context group has the ranks with the same position in them.
        mesh = replace(mesh, context=spaced_group(context, tensor, parallel.timeout_s))
    shard_root(root, mesh, autocast, kept_whole)
    return Shards(root, mesh, ranks.data_ranks(tensor * context), autocast)


def check_context(context: int, tensor: int, ranks: int) -> None:
    """Check the size of a context group.

    Args:
        tensor: ranks of a tensor group. It divides `ranks`.
        ranks: ranks of one copy of the model.

    Raises:
        UserError: if a copy does not consist of whole context groups.
    """
    what = "ranks of one copy" if tensor == 1 else "tensor groups of one copy"
    check_group_size("parallel.context", context, {what: ranks // tensor})


def shard_root(
    root: PolicyRoot | ScalarRoot,
    mesh: RankMesh,
    autocast: torch.dtype | None = None,
    kept_whole: Iterable[nn.Parameter] = (),
) -> None:
    """Shard a root in place. Every rank must have the same weights.

    With autocast to bfloat16, layers are gathered in bfloat16: their matrix products are computed
    in it anyway. The root is gathered in the weights' own dtype, so embeddings, residual stream and
    log-probs are as exact as in one process. Gradients are summed in float32.

    Args:
        root: body and head of a policy, or a value model, on their device.
        mesh: as `rank_mesh` makes it.
        autocast: precision of the body. None: the dtype of the weights.
        kept_whole: frozen parameters that every rank keeps in full.
    """
    ignored = set(kept_whole)
    if mesh.tensor:
        divide_layers(root.model, mesh.tensor)
        if isinstance(root, PolicyRoot):
            root.head_share = HeadShare(mesh.tensor.get_group())
    experts = divide_experts(root.model, mesh.experts) if mesh.experts else []
    meshes = {module: mesh.experts.data for module in experts} if mesh.experts else {}
    if mesh.context:
        root.context = ContextGroup(mesh.context)
        if isinstance(root, PolicyRoot) and root.routing:
            root.routing.over_positions = root.context.sum
    layers = [m for m in root.model.modules() if isinstance(m, GradientCheckpointingLayer)]
    sums = torch.float32
    # Inputs are not cast: the residual stream stays in float32, as under autocast alone.
    lower = MixedPrecisionPolicy(autocast, sums, cast_forward_inputs=False)
    exact = MixedPrecisionPolicy(None, sums, cast_forward_inputs=False)
    # Reshard also after the root's forward pass: otherwise `parameters()` would return gathered
    # tensors until the next backward pass, and not those of the optimizer.
    for part in [*experts, *layers, root]:
        whole_root = part is root
        sharded = fully_shard(
            part,
            mesh=mesh.every if whole_root else meshes.get(part, mesh.data),
            mp_policy=exact if whole_root else lower,
            reshard_after_forward=True,
            ignored_params=ignored,
        )
        # The ranks of a tensor group have equal gradients of embedding and last norm: they count
        # once. Gradients of the head differ, and `head_share.py` allows for the division.
        sharded.set_gradient_divide_factor(float(mesh.group) if whole_root else 1.0)
        sharded.set_force_sum_reduction_for_comms(True)
        # A parameter without gradient on some ranks (an expert without tokens) counts as zeros.
        sharded.set_reduce_scatter_unused_params(True)
    if isinstance(root, PolicyRoot):
        for method in ("states", "count"):
            register_fsdp_forward_method(root, method)


def whole(tensor: Tensor) -> Tensor:
    """A tensor gathered from all ranks, or the tensor itself if it is not sharded."""
    if not isinstance(tensor, DTensor):
        return tensor
    if not in_rank_group(tensor):
        return tensor.full_tensor()
    # Not `full_tensor`: it does not support every size (pytorch/pytorch#168134).
    source = _layout(tensor)
    return reshard(tensor.to_local(), source, [whole_box(tensor.shape)] * len(source))


def whole_at(tensor: Tensor, rank: int) -> Tensor | None:
    """Gather a tensor on one rank. All ranks must call this.

    Args:
        tensor: a sharded tensor, or one that is equal on all ranks.

    Returns:
        The whole tensor on that rank, None on the others.
    """
    if isinstance(tensor, DTensor) and tensor.ndim and _covers(tensor):
        source = _layout(tensor)
        target = [empty_box(tensor.shape)] * len(source)
        target[rank] = whole_box(tensor.shape)
        found = reshard(tensor.to_local(), source, target)
    else:
        found = whole(tensor)
    return found if dist.get_rank() == rank else None


def own_part(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank holds. The whole tensor if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def in_rank_group(tensor: Tensor) -> bool:
    """True for a tensor whose mesh has groups of ranks: tensor groups or expert groups."""
    if not isinstance(tensor, DTensor):
        return False
    return not {"tensor", "experts"}.isdisjoint(tensor.device_mesh.mesh_dim_names or ())


def holders(tensor: Tensor) -> int:
    """Number of ranks that hold the same part of a tensor."""
    if not isinstance(tensor, DTensor):
        return dist.get_world_size()
    kinds = zip(tensor.placements, tensor.device_mesh.shape, strict=True)
    parts = math.prod(size for kind, size in kinds if not kind.is_replicate())
    return dist.get_world_size() // parts


def place(own: Tensor, given: Tensor) -> Tensor:
    """Shard a whole tensor in the way another tensor is sharded. Each rank keeps its part.

    Args:
        own: tensor whose device and sharding are copied.
        given: whole tensor, equal on all ranks. A sharded tensor is returned unchanged.

    Returns:
        The sharded tensor. `given` itself if `own` is not sharded.
    """
    if not isinstance(own, DTensor) or isinstance(given, DTensor):
        return given
    if not in_rank_group(own):
        # Without a source rank, nothing is sent: every rank has the whole tensor.
        return distribute_tensor(
            given.to(own.device), own.device_mesh, own.placements, src_data_rank=None
        )
    part = given[at(layout_of(own)[dist.get_rank()], whole_box(given.shape))]
    return DTensor.from_local(
        part.to(own.device, memory_format=torch.contiguous_format, copy=True),
        own.device_mesh,
        own.placements,
        run_check=False,
        shape=own.shape,
        stride=own.stride(),
    )


def _covers(tensor: DTensor) -> bool:
    """True if the mesh of the tensor contains all ranks of the run."""
    return tensor.device_mesh.size() == dist.get_world_size()


def _layout(tensor: DTensor) -> Layout:
    """The part of a tensor that each rank of the run holds, in rank order.

    The tensor's mesh contains all ranks.
    """
    boxes = layout_of(tensor)
    return [boxes[rank] for rank in range(len(boxes))]
