"""RMSNorm with a hand-written backward pass.

transformers writes the norm as seven small operations. With autograd through each of them, the norm
is the most expensive part of training a small model on the CPU, after the matrix products.

The module and its weights stay the same; only its forward method is replaced. In float32 on the CPU
the output is the same bit for bit. On a GPU the replacement is PyTorch's fused kernel: one launch
instead of seven.
"""

from __future__ import annotations

import inspect
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel


def inverse_rms(x: Tensor, epsilon: float) -> Tensor:
    """1 / sqrt(mean(x^2) + epsilon) over the last dimension: x [..., D] -> [..., 1].

    Zhang & Sennrich 2019, arXiv:1910.07467.
    """
    return x.pow(2).mean(-1, keepdim=True).add_(epsilon).rsqrt_()


class RMSNorm(torch.autograd.Function):
    """weight * x / rms(x) for x [..., D] and weight [D] -> [..., D]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        scale = inverse_rms(x, epsilon)
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        """Gradients of x and weight, with n = x / rms:

        d weight = sum over rows of grad * n
        d x = (grad * weight - n * mean(grad * weight * n)) / rms
        """
        x, weight, scale = ctx.saved_tensors
        normed = x * scale
        product = normed * grad
        weight_grad = product.flatten(0, -2).sum(0)
        mean = product.mul_(weight).mean(-1, keepdim=True)
        return (
            torch.mul(grad, weight, out=product).addcmul_(normed, mean, value=-1).mul_(scale),
            weight_grad,
            None,
        )


def fuse_norms(model: PreTrainedModel) -> None:
    """Replace the forward method of every plain RMSNorm in the model.

    Other norms keep their forward method: Gemma's 1 + weight, LayerNorm.
    """
    for module in model.modules():
        if _is_plain(module):
            # A bound method, not a closure: a deep copy of the model then binds its own module.
            module.forward = MethodType(_forward, module)


def _forward(module: Any, x: Tensor) -> Tensor:
    weight, epsilon = module.weight, module.variance_epsilon
    if x.device.type != "cpu":
        dtype = torch.promote_types(x.dtype, weight.dtype)  # the result dtype of weight * x
        return F.rms_norm(x.to(dtype), weight.shape, weight.to(dtype), epsilon)
    if not x.dtype == weight.dtype == torch.float32:
        return type(module).forward(module, x)  # type: ignore[no-any-return]
    if torch.is_grad_enabled():
        return RMSNorm.apply(x, weight, epsilon)
    return (x * inverse_rms(x, epsilon)).mul_(weight)


@torch.no_grad()
def _is_plain(module: nn.Module) -> bool:
    """True if the module's forward gives the same bits as `x * inverse_rms(x) * weight`.

    The check runs on the CPU with a probe input and a probe weight, wherever the module is.
    """
    epsilon, weight = (
        vars(module).get("variance_epsilon"),
        dict(module.named_parameters()).get("weight"),
    )
    if not isinstance(epsilon, float) or weight is None or weight.dim() != 1:
        return False
    if (
        len(inspect.signature(module.forward).parameters) != 1
    ):  # takes more than x, for example a gate
        return False
    x, probe = (
        torch.linspace(-3, 2, 4 * len(weight)).view(4, -1),
        torch.linspace(0.5, 2, len(weight)),
    )
    theirs = torch.func.functional_call(module, {"weight": probe}, (x,))
    return torch.equal(theirs, (x * inverse_rms(x, epsilon)).mul_(probe))
