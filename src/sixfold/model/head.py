"""The matrix product of the output head, with float32 logits under autocast.

Autocast would round logits to bfloat16. Between 16 and 32 they would be multiples of 0.125. The
log-probs of sampler and trainer would differ by that much wherever the two round in different
directions. Here the factors are rounded as under autocast, and the sums stay in float32.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


def head_product(head: nn.Module, hidden: Tensor) -> Tensor:
    """Apply the output head: hidden [N, hidden] -> float32 logits [N, V].

    A head that is not a plain `nn.Linear`, or that has hooks, is called unchanged. Autocast may
    then round its result.
    """
    device = hidden.device.type
    hooked = head._forward_hooks or head._forward_pre_hooks
    if type(head) is not nn.Linear or hooked or not torch.is_autocast_enabled(device):
        logits: Tensor = head(hidden).float()
        return logits
    dtype = torch.get_autocast_dtype(device)
    weight, bias = head.weight, head.bias
    with torch.autocast(device, enabled=False):
        hidden, weight = hidden.to(dtype), weight.to(dtype)  # type: ignore[assignment]
        if not _wide_products(device):
            return F.linear(hidden.float(), weight.float(), None if bias is None else bias.float())
        logits = WideProduct.apply(hidden, weight)
        return logits if bias is None else logits + bias.float()


class WideProduct(torch.autograd.Function):
    """hidden [N, H] @ weight [V, H] transposed, in half precision with float32 sums and results.

    The gradient of the logits is rounded to half precision, as under autocast.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        """hidden [N, H], weight [V, H] -> float32 [N, V]."""
        ctx.save_for_backward(hidden, weight)
        return wide_mm(hidden, weight.t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        """grad [N, V] -> gradients of hidden [N, H] and weight [V, H]."""
        hidden, weight = ctx.saved_tensors
        grad = grad.to(weight.dtype)
        return grad @ weight, grad.t() @ hidden


def wide_mm(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in half precision with a float32 result, in one kernel. Needs CUDA."""
    out: Tensor = torch.mm(a, b, out_dtype=torch.float32)  # type: ignore[call-overload]
    return out


@cache
def _wide_products(device: str) -> bool:
    """True if `wide_mm` runs on the device: CUDA with PyTorch 2.8 or later."""
    return (
        device == "cuda"
        and torch.version.hip is None
        and "out_dtype" in str(torch.ops.aten.mm.dtype._schema)
    )
