"""Keep activations in host memory between the forward and the backward pass.

Only tensors with one entry per token of the micro-batch are moved. Weights stay where they are:
autograd saves them too, and moving them would cost a copy of the model in each direction.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import Tensor

Saved = Tensor | tuple[torch.device, Tensor]


def activations_on_host(tokens: int) -> AbstractContextManager[None]:
    """Context for a forward pass whose activations are kept in host memory.

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
