"""Shard a model over the ranks of a run (FSDP2).

Every decoder layer is one group of parameters. The root holds the rest: embeddings, last norm and
head. A rank holds its part of every parameter, gradient and optimizer moment. The weights of a
layer are gathered before its forward pass and before its backward pass, and freed after each. Its
gradient is then summed over the ranks. It is not averaged, because the weights of a loss are
already normalised over the whole step.

Sharded parameters are `DTensor`s. `own_part` is the part of this rank; `whole` gathers all parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from ..errors import UserError
from ..ranks import Ranks
from .logprobs import PolicyRoot


def rank_mesh(ranks: Ranks, replicas: int, device: str) -> DeviceMesh:
    """The ranks as a mesh: [shards], or [replicas, shards].

    Args:
        ranks: the ranks.
        replicas: copies of the sharded model.
        device: type of the devices.

    Raises:
        UserError: if the replicas do not divide the ranks.
    """
    if ranks.size % replicas:
        raise UserError(
            f"parallel.replicas = {replicas} does not divide the {ranks.size} ranks. Use a divisor"
            " of the number of ranks, or 1"
        )
    if replicas == 1:
        return init_device_mesh(device, (ranks.size,), mesh_dim_names=("shard",))
    shape = (replicas, ranks.size // replicas)
    return init_device_mesh(device, shape, mesh_dim_names=("replicate", "shard"))


@dataclass(frozen=True)
class Shards:
    """A root that is sharded over the ranks.

    Attributes:
        root: the policy's body and head.
        mesh: mesh of the ranks.
        autocast: precision of the body's forward pass. None: the dtype of the weights.
    """

    root: PolicyRoot
    mesh: DeviceMesh
    autocast: torch.dtype | None

    def shard(self, root: PolicyRoot) -> PolicyRoot:
        """Shard another root, such as a frozen reference, in the same way."""
        shard_root(root, self.mesh, self.autocast)
        return root


def shard_policy(
    root: PolicyRoot, ranks: Ranks, replicas: int, autocast: torch.dtype | None
) -> Shards:
    """Shard the policy over the ranks, in place.

    Args:
        root: body and head, with the same weights on all ranks.
        ranks: the ranks.
        replicas: copies of the sharded model.
        autocast: precision of the body. None: the dtype of the weights.

    Raises:
        UserError: if the replicas do not divide the ranks.
    """
    mesh = rank_mesh(ranks, replicas, next(root.parameters()).device.type)
    shard_root(root, mesh, autocast)
    return Shards(root, mesh, autocast)


def shard_root(root: PolicyRoot, mesh: DeviceMesh, autocast: torch.dtype | None = None) -> None:
    """Shard a root in place. Every rank must have the same weights.

    With autocast to bfloat16, layers are gathered in bfloat16: their matrix products are computed
    in it anyway. The root is gathered in the weights' own dtype, so embeddings, residual stream and
    log-probs are as exact as in one process. Gradients are summed in float32.

    Args:
        root: body and head, on their device.
        mesh: as `rank_mesh` makes it.
        autocast: precision of the body. None: the dtype of the weights.
    """
    layers = [m for m in root.model.modules() if isinstance(m, GradientCheckpointingLayer)]
    sums = torch.float32
    # Inputs are not cast: the residual stream stays in float32, as under autocast alone.
    lower = MixedPrecisionPolicy(autocast, sums, cast_forward_inputs=False)
    exact = MixedPrecisionPolicy(None, sums, cast_forward_inputs=False)
    # Reshard also after the root's forward pass: otherwise `parameters()` would return gathered
    # tensors until the next backward pass, and not those of the optimizer.
    parts: list[tuple[nn.Module, MixedPrecisionPolicy]] = [(m, lower) for m in layers]
    for part, precision in [*parts, (root, exact)]:
        sharded = fully_shard(part, mesh=mesh, mp_policy=precision, reshard_after_forward=True)
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)
        # A parameter without gradient on some ranks (an expert without tokens) counts as zeros.
        sharded.set_reduce_scatter_unused_params(True)
    for method in ("states", "count"):
        register_fsdp_forward_method(root, method)


def whole(tensor: Tensor) -> Tensor:
    """A tensor gathered from all ranks, or the tensor itself if it is not sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def own_part(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank holds. The whole tensor if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


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
    # Without a source rank, nothing is sent: every rank has the whole tensor.
    return distribute_tensor(
        given.to(own.device), own.device_mesh, own.placements, src_data_rank=None
    )


class WholeWeights(Mapping[str, Tensor]):
    """Parameters of a sharded module by name. Reading one gathers it from all ranks."""

    def __init__(self, module: nn.Module) -> None:
        self._parameters = dict(module.named_parameters())

    def __getitem__(self, name: str) -> Tensor:
        return whole(self._parameters[name].detach())

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)
