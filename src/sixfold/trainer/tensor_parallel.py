"""Tensor parallelism: the ranks of a tensor group divide every layer and compute it together.

Attention is divided by heads, and the MLP by its inner width (Shoeybi et al. 2019,
arXiv:1909.08053, section 3). The first matrices (q, k, v, gate, up) are divided by rows, so a rank
computes the outputs of its heads and of its part of the MLP. The last matrices (o, down) are
divided by columns: each rank computes a summand of the output, and the group sums them. Embedding
and norms read whole hidden states. All ranks of a group compute them in the same way, so their
gradients are equal. The norms of queries and keys read the heads of one rank, so their gradients
are summed over the group. The positions of the output head are divided in `head_share.py`.

Only layers with exactly these matrices are supported, as in Qwen and Llama. Shapes are checked, so
another architecture is refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from ..errors import UserError
from .group_size import check_group_size

FIRST = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
)
"""Matrices whose outputs are divided."""
LAST = ("self_attn.o_proj", "mlp.down_proj")
"""Matrices whose inputs are divided."""
HEAD_NORMS = ("self_attn.q_norm", "self_attn.k_norm")
"""Norms of each head."""


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The decoder layers of a model, in order."""
    return [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]


def layer_plan(layer: nn.Module) -> dict[str, ParallelStyle]:
    """PyTorch's parallel style of each module of a layer that is divided, by name.

    Hidden states become a distributed tensor once for q, k and v, and once for gate and up. So the
    gradients of these matrices with respect to hidden states are summed before the ranks exchange
    them.
    """
    plan: dict[str, ParallelStyle] = {
        "self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": Replicate()},
            desired_input_kwarg_layouts={"hidden_states": Replicate()},
        ),
        "mlp": PrepareModuleInput(
            input_layouts=(Replicate(),), desired_input_layouts=(Replicate(),)
        ),
        **{name: ColwiseParallel() for name in FIRST},
        **{name: RowwiseParallel() for name in LAST},
    }
    # Queries and keys are [1, N, heads, D]. The style for sequences, on dimension 2, divides heads.
    for name, module in layer.named_modules():
        if name in HEAD_NORMS and next(module.parameters(), None) is not None:
            plan[name] = SequenceParallel(sequence_dim=2, use_local_output=True)
    return plan


def divide_layers(model: nn.Module, mesh: DeviceMesh) -> None:
    """Divide the layers of a model over a tensor group, in place.

    Args:
        model: the model, with equal weights on all ranks.
    """
    trained = {name: p.requires_grad for name, p in model.named_parameters()}
    for layer in decoder_layers(model):
        # Without a source rank, nothing is sent: every rank has the whole weights.
        parallelize_module(layer, mesh, layer_plan(layer), src_data_rank=None)
    # A parallel style makes new parameters, all of which require gradients.
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained[name])


def check_divisible(model: PreTrainedModel, tensor: int, ranks: int) -> None:
    """Check that a tensor group can divide the layers of a model.

    Raises:
        UserError: if the architecture is not supported, or if the size of the group does not divide
            its heads, its MLP or the ranks.
    """
    if tensor == 1:
        return
    for layer in decoder_layers(model) or [model]:
        if found := _reason_against(layer, model.config):
            raise UserError(
                f"parallel.tensor = {tensor}: {found}, which tensor parallelism does not support"
                f" ({type(model).__name__}). Set parallel.tensor = 1"
            )
    sizes = {"ranks of one copy": ranks, **_divided_sizes(model)}
    check_group_size("parallel.tensor", tensor, sizes)


def _divided_sizes(model: PreTrainedModel) -> dict[str, int]:
    """Sizes that a tensor group divides, by name: numbers of heads and width of the MLPs."""
    config = model.config
    widths = {layer.get_submodule("mlp.gate_proj").out_features for layer in decoder_layers(model)}
    return {
        "attention heads": config.num_attention_heads,
        "key-value heads": config.num_key_value_heads,
        "neurons in the MLP": math.gcd(*widths),  # type: ignore[arg-type]
    }


def _reason_against(layer: nn.Module, config: PretrainedConfig) -> str:
    """Reason why a layer cannot be divided, as text. Empty if it can be divided."""
    own = dict(_modules_with_weights(layer))
    missing = [name for name in (*FIRST, *LAST) if type(own.get(name)) is not nn.Linear]
    if missing:
        return f"a layer has no plain linear {missing[0]}"
    hidden, width = own["self_attn.q_proj"].in_features, own["mlp.gate_proj"].out_features
    head = getattr(config, "head_dim", None) or hidden // config.num_attention_heads  # type: ignore[operator]
    queries, keys = (
        head * count for count in (config.num_attention_heads, config.num_key_value_heads)
    )
    expected = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (width, hidden),
        "mlp.up_proj": (width, hidden),
        "mlp.down_proj": (hidden, width),
    }
    for name, module in own.items():
        shape = tuple(next(module.parameters(recurse=False)).shape)
        # A norm of the layer reads whole hidden states, a norm of heads one head at a time.
        right = expected.get(name, (head,) if name in HEAD_NORMS else (hidden,))
        known = name in expected or name in HEAD_NORMS
        if shape != right or not (known or _is_part(name, module)):
            return f"a layer has '{name}' with weights {list(shape)}"
    return ""


def _is_part(name: str, module: nn.Module) -> bool:
    """True for a direct submodule of a layer without submodules of its own, such as a norm."""
    return name != "" and "." not in name and not any(True for _ in module.children())


def _modules_with_weights(layer: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in layer.named_modules():
        if next(module.parameters(recurse=False), None) is not None:
            yield name, module
