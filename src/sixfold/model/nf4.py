"""Frozen linear modules with 4-bit weights: NF4 (Dettmers et al. 2023, arXiv:2305.14314).

A matrix is divided into blocks of 64 neighbouring numbers. A block has one scale, its largest
absolute value in bfloat16. A number is stored as the index of one of 16 values, the one that is
nearest to number / scale. So a number takes 4.25 bits.

The values of the matrix, VALUES[index] * scale, are rounded to bfloat16. Trainer, reference and
engine all compute these values again in each pass, one matrix at a time. So they all read the same
numbers. Storing the values again changes no bit.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ..errors import UserError

BLOCK = 64
SLICE = 1 << 22
"""Numbers that are converted at once, so that temporary tensors stay small."""
LEAST_SCALE = 2.0**-100
"""Scale of a block of zeros, which cannot be divided by its largest value."""
VALUES = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""The 16 values: quantiles of a normal distribution, so that each is used about as often."""


def _slices(blocks: int, tensor: Tensor) -> range:
    """First blocks of the slices of a matrix. None on the meta device: it has no numbers."""
    return range(0, 0 if tensor.is_meta else blocks, SLICE // BLOCK)


@torch.no_grad()
def to_nf4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Convert a matrix.

    The error of a number is at most 0.157 of the largest absolute value in its block.

    Args:
        weight: finite numbers, of any floating dtype.

    Returns:
        (codes, scales): two indices per byte, uint8 [blocks * 32]; bfloat16 [blocks].
    """
    flat = weight.reshape(-1)
    blocks = -(-flat.numel() // BLOCK)
    codes = torch.empty(blocks * BLOCK // 2, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(blocks, dtype=torch.bfloat16, device=weight.device)
    values = torch.tensor(VALUES, device=weight.device)
    edges = (values[1:] + values[:-1]) / 2
    for first in _slices(blocks, weight):
        last = min(blocks, first + SLICE // BLOCK)
        part = flat[first * BLOCK : last * BLOCK].float()
        part = F.pad(part, (0, (last - first) * BLOCK - part.numel())).view(-1, BLOCK)
        scale = part.abs().amax(1).clamp_min(LEAST_SCALE).bfloat16()
        pairs = torch.bucketize(part / scale.float()[:, None], edges).to(torch.uint8).view(-1, 2)
        codes[first * BLOCK // 2 : last * BLOCK // 2] = pairs[:, 0] | pairs[:, 1] << 4
        scales[first:last] = scale
    return codes, scales


@torch.no_grad()
def from_nf4(codes: Tensor, scales: Tensor, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """The values of a converted matrix: bfloat16 numbers, in `dtype`.

    Args:
        codes: as returned by `to_nf4`.
        scales: as returned by `to_nf4`.
        dtype: bfloat16, or a dtype that contains its numbers.
    """
    values = torch.tensor(VALUES, device=codes.device)
    pairs = torch.stack([values.repeat(16), values.repeat_interleave(16)], 1)  # [256, 2]
    found = torch.empty(len(codes) * 2, dtype=dtype, device=codes.device)
    step = SLICE // BLOCK
    for first in _slices(len(scales), codes):
        part = codes[first * BLOCK // 2 : (first + step) * BLOCK // 2]
        scale = scales[first : first + step].float()
        numbers = F.embedding(part.int(), pairs).view(-1, BLOCK).mul_(scale[:, None])
        found[first * BLOCK : (first + step) * BLOCK] = numbers.bfloat16().view(-1)
    return found[: shape[0] * shape[1]].view(shape)


class Nf4Linear(nn.Linear):
    """A linear module whose frozen weight is stored in NF4.

    Args:
        linear: the module to convert. Its bias is shared.
    """

    codes: Tensor
    scales: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        codes, scales = to_nf4(linear.weight)
        self.register_buffer("codes", codes)
        self.register_buffer("scales", scales)
        self.bias = linear.bias

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The values [out, in], bfloat16, computed at each access."""
        return self.values(torch.bfloat16)

    def values(self, dtype: torch.dtype) -> Tensor:
        """The values [out, in] in `dtype`."""
        return from_nf4(self.codes, self.scales, (self.out_features, self.in_features), dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out], in the dtype of autocast or else of x."""
        device = x.device.type
        lowered = torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if lowered else x.dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        product: Tensor = Nf4Product.apply(x.to(dtype), self, bias)
        return product


class Nf4Product(torch.autograd.Function):
    """x [..., in] -> x @ weight.T + bias.

    The values of the weight are not kept for the backward pass, which computes them again.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, linear: Nf4Linear, bias: Tensor | None) -> Tensor:
        """x [..., in], bias [out] -> [..., out]."""
        ctx.linear = linear
        return F.linear(x, linear.values(x.dtype), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Gradient of x. The weight and the bias are frozen."""
        return grad @ ctx.linear.values(grad.dtype), None, None


def store_in_nf4(model: PreTrainedModel) -> None:
    """Replace all linear modules of the model but the head by `Nf4Linear`, in place.

    Raises:
        UserError: if a linear module is not supported, or a weight is not finite.
    """
    for name, module in _linears(model):
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, Nf4Linear(module))


@torch.no_grad()
def round_to_nf4(model: PreTrainedModel) -> None:
    """Round the weights to the values that `store_in_nf4` gives, in their own dtype, in place.

    Raises:
        UserError: as `store_in_nf4`.
    """
    for _, module in _linears(model):
        weight = module.weight
        weight.copy_(from_nf4(*to_nf4(weight), (weight.shape[0], weight.shape[1]), torch.bfloat16))


def _linears(model: PreTrainedModel) -> list[tuple[str, nn.Linear]]:
    """The modules to convert, with their names."""
    head = model.get_output_embeddings()
    found = []
    for name, module in model.named_modules():
        if isinstance(module, Conv1D):
            raise UserError(
                f"model.lora.base = 'nf4': '{name}' of {type(model).__name__} is a Conv1D, which"
                " is not supported. Use 'bfloat16'"
            )
        # Not subclasses: routers of some models are linear modules that return several tensors.
        if type(module) is not nn.Linear or module is head:
            continue
        if not (module.weight.is_meta or module.weight.isfinite().all()):
            raise UserError(
                f"model.lora.base = 'nf4': weight '{name}.weight' of the model is not finite."
                " Restore the model's files"
            )
        found.append((name, module))
    return found
