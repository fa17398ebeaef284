"""Matrix products of the CPU kernels, and checks that hold for float32 and bfloat16 weights."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sixfold.kernels.cpu.body_kernels import BodyKernels


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def product(
    kernels: BodyKernels,
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor | None],
    before: Tensor | None = None,
    half: bool = False,
) -> Tensor:
    """The product, written into the middle of longer rows, which must not change around it."""
    packed = kernels.pack(weights, biases, half=half)
    room = torch.full((len(x) + 2, packed.outputs + 9), 7.0)
    out = room[1:-1, 4:-5]
    out.copy_(torch.full_like(out, math.nan) if before is None else before)
    kernels.product(x, packed, out, add=before is not None)
    around = torch.ones_like(room, dtype=torch.bool)
    around[1:-1, 4:-5] = False
    assert bool((room[around] == 7).all())
    return out


def check_product(
    kernels: BodyKernels, rows: int, depth: int, outputs: list[int], half: bool = False
) -> None:
    """Compare with the product in double precision. Sums are those of float32.

    Args:
        kernels: compiled kernels.
        rows: rows of the input.
        depth: columns of the input.
        outputs: outputs of each layer that reads the input.
        half: inputs and weights are rounded to bfloat16.
    """
    x = random(rows, depth + 3)[:, :depth]  # rows lie apart
    weights = [random(n, depth, seed=n) for n in outputs]
    biases = [random(n, seed=-n) if n % 2 else None for n in outputs]
    bias = torch.cat(
        [torch.zeros(n) if b is None else b for n, b in zip(outputs, biases, strict=True)]
    )
    before = random(rows, sum(outputs), seed=5)
    factors = [x, torch.cat(weights)]
    left, right = (t.bfloat16().double() if half else t.double() for t in factors)
    exact = left @ right.T + bias.double()
    most = left.abs() @ right.abs().T + bias.abs().double() + 3
    for added in (None, before):
        ours = product(kernels, x, weights, biases, added, half)
        wanted = exact if added is None else exact + added.double()
        assert bool(((ours.double() - wanted).abs() <= 6e-8 * (depth**0.5 + 2) * most).all())


def check_not_finite(kernels: BodyKernels, half: bool = False) -> None:
    """A NaN in the input stays in its row, and an infinite weight in its column."""
    x, weight = random(9, 20), random(19, 20, seed=1)
    x[3, 7], weight[18, 2] = math.nan, math.inf
    wrong = ~product(kernels, x, [weight], [None], half=half).isfinite()
    assert wrong[3].all() and wrong[:, 18].all() and int(wrong.sum()) == 19 + 8
