"""The matrix product of the output head, with float32 logits under autocast.

Autocast would round logits to bfloat16. Between 16 and 32 they would be multiples of 0.125. The
log-probs of sampler and trainer would differ by that much wherever the two round in different
directions. Here the factors are rounded as under autocast, and the sums stay in float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


def is_plain(head: nn.Module) -> TypeGuard[nn.Linear]:
    """True for an `nn.Linear` without hooks: its output is hidden @ weight.T + bias."""
    return type(head) is nn.Linear and not (head._forward_hooks or head._forward_pre_hooks)


class LogitFinish(NamedTuple):
    """Scaling and soft cap that an architecture applies to its logits. None: not applied.

    Attributes:
        divisor: logits are divided by it (Granite).
        factor: logits are multiplied by it (Cohere).
        cap: logits become cap * tanh(logits / cap) (Gemma 2 and 3).
    """

    divisor: float | None = None
    factor: float | None = None
    cap: float | None = None

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> LogitFinish:
        """From the attributes of a model's config."""
        return cls(
            settings.get("logits_scaling"),
            settings.get("logit_scale"),
            settings.get("final_logit_softcapping"),
        )

    def apply(self, logits: Tensor) -> Tensor:
        """Apply scaling and soft cap to logits [N, V]. The input is not changed."""
        if self.divisor is not None:
            logits = logits / self.divisor
        if self.factor is not None:
            logits = logits * self.factor
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)

    def apply_(self, logits: Tensor, keep_cap: bool) -> tuple[Tensor, Tensor | None]:
        """Apply scaling and soft cap in place.

        Args:
            logits: [N, V]; overwritten.
            keep_cap: also return tanh(logits / cap), which `backward_` needs. The finished logits
                are then in new memory.

        Returns:
            The finished logits, and the tanh values. The latter are None without a soft cap or
            without `keep_cap`.
        """
        if self.divisor is not None:
            logits = logits.div_(self.divisor)
        if self.factor is not None:
            logits = logits.mul_(self.factor)
        if self.cap is None:
            return logits, None
        bent = logits.div_(self.cap).tanh_()
        return (bent * self.cap, bent) if keep_cap else (bent.mul_(self.cap), None)

    def backward_(self, grad: Tensor, bent: Tensor | None) -> Tensor:
        """Gradient with respect to the raw logits. It overwrites `grad`.

        Args:
            grad: [N, V] gradient with respect to the finished logits; overwritten.
            bent: tanh values that `apply_` returned; overwritten. None: there is no soft cap.
        """
        if bent is not None:  # d tanh(x) = 1 - tanh(x)^2; the cap's factor and divisor cancel
            grad = grad.mul_(bent.square_().neg_().add_(1.0))
        if self.factor is not None:
            grad = grad.mul_(self.factor)
        return grad if self.divisor is None else grad.div_(self.divisor)


def head_product(head: nn.Module, hidden: Tensor) -> Tensor:
    """Apply the output head: hidden [N, hidden] -> float32 logits [N, V].

    A head that is not a plain `nn.Linear`, or that has hooks, is called unchanged. Autocast may
    then round its result.
    """
    device = hidden.device.type
    if not is_plain(head) or not torch.is_autocast_enabled(device):
        logits: Tensor = head(hidden).float()
        return logits
    dtype = torch.get_autocast_dtype(device)
    weight, bias = head.weight, head.bias
    with torch.autocast(device, enabled=False):
        hidden, weight = hidden.to(dtype), weight.to(dtype)  # type: ignore[assignment]
        if not wide_products(device):
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
def wide_products(device: str) -> bool:
    """True if `wide_mm` runs on the device: CUDA with PyTorch 2.8 or later."""
    return (
        device == "cuda"
        and torch.version.hip is None
        and "out_dtype" in str(torch.ops.aten.mm.dtype._schema)
    )
