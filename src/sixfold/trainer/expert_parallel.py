"""Expert parallelism: the ranks of an expert group divide the experts of every layer among them.

Each rank has whole experts: with 8 experts and 2 ranks, the first rank has experts 0 to 3 of every
layer. The ranks of a group compute different tokens. In every expert layer, a rank sends each of
its tokens to the ranks that have the token's experts, and gets the outputs back (an all-to-all each
way). The backward pass sends the gradients the same way. So an expert sees the tokens of the whole
group, and its gradient is the sum over them.

transformers divides the experts and exchanges the tokens, for the families that have a plan for it.
Routers, attention and shared experts are not divided: `sharded.py` shards them over all ranks. It
shards the experts of a rank over the ranks that have the same ones.

All ranks of a group run an expert layer equally often, because all ranks of a run have equally many
micro-batches (`sharing.py`).
"""

from __future__ import annotations

import math
from inspect import signature
from typing import NamedTuple

import transformers
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import PreTrainedModel

from ..errors import UserError
from .group_size import check_group_size

DISPATCH = "ep_dispatch_experts"
"""Style of a module with experts in a plan of transformers: tokens are sent to their experts."""
DIVIDED = "grouped_gemm"
"""Style of a parameter with one entry per expert: the entries are divided."""


class ExpertMesh(NamedTuple):
    """Meshes of the ranks that share experts.

    Attributes:
        data: the ranks with the same experts as this rank. [shards] or [replicas, shards].
        alone: this rank. transformers asks for the ranks that compute the same tokens.
    """

    group: DeviceMesh
    data: DeviceMesh
    alone: DeviceMesh


def expert_mesh(ranks: int, replicas: int, device: str, experts: int) -> ExpertMesh:
    """Make the meshes of expert groups. Ranks with consecutive numbers form a group.

    Args:
        ranks: number of ranks.
        replicas: copies of the sharded model.
        experts: ranks per expert group. `replicas * experts` must divide the number of ranks.
    """
    names = ("shard",) if replicas == 1 else ("replicate", "shard")
    copies = () if replicas == 1 else (replicas,)
    shape = (*copies, ranks // replicas // experts, experts)
    grid = init_device_mesh(device, shape, mesh_dim_names=(*names, "experts"))
    apart = init_device_mesh(device, (ranks, 1), mesh_dim_names=("every", "alone"))
    return ExpertMesh(grid["experts"], grid[names], apart["alone"])


def divide_experts(model: nn.Module, mesh: ExpertMesh) -> list[nn.Module]:
    """Divide the experts of a model over an expert group, in place.

    A reference or a critic may be another model than the policy. If its experts cannot be divided,
    they stay whole: FSDP shards them like all other weights.

    Args:
        model: the model, with equal weights on all ranks.

    Returns:
        The modules with the experts of this rank. Empty if the model has none that can be divided.
    """
    size = mesh.group.size()
    if not isinstance(model, PreTrainedModel) or _reason_against(model):
        return []
    modules = _expert_modules(model)
    if any(_rows(module) % size for module in modules.values()):
        return []
    plan = {f"{n}.{p}": DIVIDED for n, m in modules.items() for p, _ in m.named_parameters()}
    plan |= dict.fromkeys(modules, DISPATCH)
    _apply(model, mesh, plan)
    return list(modules.values())


def check_experts(model: PreTrainedModel, experts: int, ranks: int) -> None:
    """Check that an expert group can divide the experts of a model.

    Raises:
        UserError: if transformers cannot divide the experts of this architecture, or if the size of
            the group does not divide the experts or the ranks.
    """
    if experts == 1:
        return
    if reason := _reason_against(model):
        raise UserError(
            f"parallel.experts = {experts}: {reason} ({type(model).__name__}). Set"
            " parallel.experts = 1"
        )
    counts = {_rows(module) for module in _expert_modules(model).values()}
    sizes = {"ranks of one copy": ranks, "experts of a layer": math.gcd(*counts)}
    check_group_size("parallel.experts", experts, sizes)


def _expert_modules(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Modules with experts that the plan of transformers for the model names, by name."""
    plan = model.ep_plan
    return {
        name: module
        for name, module in model.named_modules()
        if plan.get(_without_numbers(name)) == DISPATCH
    }


def _without_numbers(name: str) -> str:
    """Name of a module in a plan: numbers of layers are `*`."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _rows(module: nn.Module) -> int:
    """Number of experts of a module that `_reason_against` has accepted."""
    return len(next(module.parameters()))


def _reason_against(model: PreTrainedModel) -> str:
    """Reason why the experts of a model cannot be divided, as text. Empty if they can be divided.

    The exchange of tokens is right only if every parameter of the module has one entry per expert,
    and if the module reads nothing but states, choices and weights.
    """
    modules = _expert_modules(model)
    if not modules:
        return "transformers has no plan for dividing experts of this architecture"
    plan = model.ep_plan
    for name, module in modules.items():
        own = dict(module.named_parameters())
        whole = [p for p in own if plan.get(_without_numbers(f"{name}.{p}")) != DIVIDED]
        if whole or not own:
            what = f"the parameter '{whole[0]}'" if whole else "no parameter"
            return f"the experts have {what}, which the plan of transformers does not divide"
        counts = {len(p) for p in own.values()}
        if counts != {vars(module).get("num_experts")}:
            return "the parameters of a layer's experts do not have one entry per expert"
        if len(signature(module.forward).parameters) != 3:
            return "the experts read more than states, choices and weights"
    return ""


def _apply(model: PreTrainedModel, mesh: ExpertMesh, plan: dict[str, str]) -> None:
    """Divide the parameters of a plan, and let its modules exchange tokens."""
    try:
        from transformers.distributed.expert_parallel import apply_expert_parallelism
    except ImportError as error:
        raise UserError(
            "parallel.experts needs transformers 5.23 or later, which exchanges tokens between"
            f" ranks; this is {transformers.__version__}. Update transformers, or set"
            " parallel.experts = 1"
        ) from error
    # Not "auto": without gradients it assumes that all ranks of a group have the same tokens if
    # the group is also the tensor group.
    apply_expert_parallelism(model, mesh.group, mesh.alone, plan, ep_implementation="all_to_all")
