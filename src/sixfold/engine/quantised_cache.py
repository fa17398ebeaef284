"""KV cache in int8, with separate scales for keys and values, one per token and KV head.

It takes half the memory of bfloat16 and a quarter of float32, plus the scales (4 bytes per D
numbers).

Keys and values are quantised once, when they are written. All reads return the quantised numbers,
even in the forward pass that computes them. So the result of a token does not depend on whether the
tokens before it were cached.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .kv_cache import KVCache, triton_serves

LEAST_SCALE = 1e-30
"""Minimum scale. Without it a row of zeros would divide by zero."""


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise rows: scale = max(|x|) / 127, so that |x - dequantise(...)| <= scale / 2.

    Args:
        x: [..., D].

    Returns:
        int8 [..., D], and scales [..., 1] in float32.
    """
    x = x.float()
    peak = x.abs().amax(-1, keepdim=True)
    # On a GPU, PyTorch divides by a number as a product with its reciprocal, which rounds twice.
    scale = (peak / torch.full_like(peak, 127)).clamp_min(LEAST_SCALE)
    return (x / scale + 0.5).floor().clamp(-127, 127).to(torch.int8), scale


def dequantise(numbers: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Dequantise int8 numbers [..., D] with scales [..., 1] -> [..., D] in `dtype`."""
    return (numbers * scale).to(dtype)


class Int8KVCache(KVCache):
    """KV cache with pools of int8 [kv_heads, blocks + 1, block_size, D].

    The scales are [kv_heads, blocks + 1, block_size, 1] in float32.
    """

    exact = False

    def __init__(self, blocks: int, block_size: int) -> None:
        super().__init__(blocks, block_size)
        self._dtype: dict[int, torch.dtype] = {}

    def layer_pools(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The layer's int8 pools.

        Allocates pools and scales to fit k, v [kv_heads, N, D] if there are none yet.
        """
        if layer not in self.pools:
            shape = (k.shape[0], self.blocks + 1, self.block_size)
            self.pools[layer] = tuple(
                x.new_zeros(*shape, x.shape[-1], dtype=torch.int8) for x in (k, v)
            )  # type: ignore[assignment]
            self.scales[layer] = tuple(x.new_zeros(*shape, 1, dtype=torch.float32) for x in (k, v))  # type: ignore[assignment]
            self._dtype[layer] = v.dtype
        return self.pools[layer]

    def write(self, layer: int, k: Tensor, v: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Quantise k, v [kv_heads, N, D] into `slots` [N].

        Returns:
            The layer's int8 pools.
        """
        pools = self.layer_pools(layer, k, v)
        for x, pool, scales in zip((k, v), pools, self.scales[layer], strict=True):
            if triton_serves(x.device.type):
                from ..kernels.triton.attention import write_int8

                write_int8(x, slots, pool, scales)
                continue
            for side, new in zip((pool, scales), quantise(x), strict=True):
                side.view(side.shape[0], -1, side.shape[-1]).index_copy_(1, slots, new)
        return pools

    def read(self, layer: int, select: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """Apply `select` to the layer's keys and values, dequantised to the original dtype."""
        pools = zip(self.pools[layer], self.scales[layer], strict=True)
        k, v = (
            dequantise(select(pool), select(scales), self._dtype[layer]) for pool, scales in pools
        )
        return k, v
