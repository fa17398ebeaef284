"""Memory of activations: recompute them in the backward pass, or keep them in host memory.

Activation checkpointing drops a layer's activations after the forward pass:

- full: only the layer's input is kept.
- selective: the results of matrix products and of attention are kept too, so recomputation is
  cheap. Tables of attention scores are never kept.

The layers of transformers checkpoint only while their `training` flag is set. The policy stays in
evaluation mode because the sampler runs the same module. Therefore the flag is set on the layer
alone and not on its submodules, so dropout stays off. Without gradients (sampling, scoring) a layer
runs as usual.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)
from transformers.modeling_layers import GradientCheckpointingLayer

from ..errors import UserError
from ..model.experts import recomputation

Context = AbstractContextManager[object]
Contexts = tuple[Context, Context]
Mode = Literal["none", "selective", "full"]

_KEPT = frozenset(
    {
        torch.ops.aten.mm,
        torch.ops.aten.addmm,
        torch.ops.aten.bmm,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
        torch.ops.aten._scaled_dot_product_flash_attention,
        torch.ops.aten._scaled_dot_product_efficient_attention,
        torch.ops.aten._scaled_dot_product_cudnn_attention,
        torch.ops.aten._flash_attention_forward,
        torch.ops.aten._efficient_attention_forward,
    }
)
# Matched by name: PyTorch defines the first op only when its module is imported.
_KEPT_BY_NAME = frozenset({"torch_attn::_varlen_attn", "sixfold::chunked_attention"})


def keep_result(_: object, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Policy of selective checkpointing: save the results of expensive ops, recompute the rest."""
    keep = op.overloadpacket in _KEPT or op.name() in _KEPT_BY_NAME
    if op.overloadpacket is torch.ops.aten.bmm and keep:
        # A product larger than both its factors is a table of attention scores.
        a, b = args
        keep = a.shape[0] * a.shape[1] * b.shape[2] <= max(a.numel(), b.numel())
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def apply_activation_checkpointing(model: nn.Module, mode: Mode) -> None:
    """Switch the decoder layers of `model` to `mode`. A later call overrides an earlier one.

    Raises:
        UserError: if the layers of this architecture cannot be checkpointed.
    """
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    if mode != "none" and not layers:
        raise UserError(
            f"trainer.activation_checkpointing = '{mode}': the layers of {type(model).__name__}"
            " cannot be recomputed. Use 'none'"
        )
    recompute = _recompute_selected if mode == "selective" else _recompute_all
    for layer in layers:
        # Plain functions, not closures over the layer: a deep copy of the model (reference, engine)
        # would otherwise run the original's layers.
        layer._gradient_checkpointing_func = recompute  # type: ignore[assignment]
        layer.gradient_checkpointing = layer.training = mode != "none"


def _recompute_all(layer: Callable[..., Any], *inputs: Any) -> Any:
    if not torch.is_grad_enabled():
        return layer(*inputs)
    replay = recomputation()
    contexts = noop_context_fn if replay is None else partial(_with_replay, noop_context_fn, replay)
    return checkpoint(layer, *inputs, use_reentrant=False, context_fn=contexts)


def _recompute_selected(layer: Callable[..., Any], *inputs: Any) -> Any:
    if not torch.is_grad_enabled():
        return layer(*inputs)
    replay = recomputation()
    contexts = partial(create_selective_checkpoint_contexts, keep_result)
    if replay is not None:
        contexts = partial(_with_replay, contexts, replay)
    return checkpoint(layer, *inputs, use_reentrant=False, context_fn=contexts)


def _with_replay(contexts: Callable[[], Contexts], replay: Callable[[], Context]) -> Contexts:
    """Contexts of a layer's forward pass and of its recomputation, which replays expert choices."""
    forward, recompute = contexts()
    return forward, _both(recompute, replay())


@contextmanager
def _both(first: Context, second: Context) -> Iterator[None]:
    with first, second:
        yield


Saved = Tensor | tuple[torch.device, Tensor]


def activations_on_host(tokens: int) -> AbstractContextManager[None]:
    """Context for a forward pass whose activations are kept in host memory.

    Only tensors with one entry per token of the micro-batch are moved. Weights stay where they are:
    autograd saves them too, and moving them would cost a copy of the model in each direction.

    Copies to the host use pinned memory and the stream of the forward pass, so the host does not
    wait. On the CPU nothing is copied.

    Args:
        tokens: tokens of the micro-batch. Tensors with a dimension of this size are moved.
    """

    def pack(tensor: Tensor) -> Saved:
        per_token = tensor.is_floating_point() and tokens in tensor.shape
        if tensor.is_cpu or not per_token or isinstance(tensor, torch.nn.Parameter):
            return tensor
        host = torch.empty(
            tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda
        )
        host.copy_(tensor, non_blocking=tensor.is_cuda)
        return tensor.device, host

    def unpack(saved: Saved) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        device, host = saved
        return host.to(device, non_blocking=True)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)
