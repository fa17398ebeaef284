"""Shard a model over the ranks of a run (FSDP2).

Every decoder layer is a group of parameters, and the root holds the rest: embeddings, last norm and
head. A rank holds its part of every parameter, gradient and optimizer moment. The weights of a
layer are gathered before its forward and its backward pass and freed after it; its gradient is
then summed over the ranks. It is a sum and not a mean: the weights of a loss are already averaged
over the whole step.

Sharded parameters are `DTensor`s. Each rank computes with its part; `whole` gathers one.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor
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


def shard_root(root: PolicyRoot, mesh: DeviceMesh, autocast: torch.dtype | None = None) -> None:
    """Shard a root in place. Every rank must have the same weights.

    The layers of a bfloat16 run are gathered in bfloat16, in which their products are computed
    anyway. The root is gathered in the weights' own dtype, so embeddings, residual stream and
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
    # Also after the root's forward pass: otherwise `parameters()` would give gathered tensors until
    # the next backward pass, and not those that the optimizer has.
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
    """The part of a tensor that this rank holds: all of it if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
