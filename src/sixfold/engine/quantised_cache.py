"""A KV cache of int8 numbers: one scale for each token and key head, keys and values apart.

Half the memory of bfloat16 and a quarter of float32, but for the scales (4 bytes for D numbers). A key or value is quantised once, as it is written,
and everything reads it back from there, the prompt that computes it too: so what a token sees does not depend on whether its past was cached.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .kv_cache import KVCache, triton_serves

LEAST_SCALE = 1e-30
"""A row of zeros would divide by zero."""


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., D] -> int8 [..., D] and scale [..., 1] in float32, the row's largest over 127, so that |x - dequantise| <= scale / 2."""
    x = x.float()
    scale = (x.abs().amax(-1, keepdim=True) / 127).clamp_min(LEAST_SCALE)
    return (x / scale + 0.5).floor().clamp(-127, 127).to(torch.int8), scale


def dequantise(numbers: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """int8 [..., D] and scale [..., 1] -> [..., D]."""
    return (numbers * scale).to(dtype)


class Int8KVCache(KVCache):
    """Pools of int8 [kv_heads, blocks + 1, block_size, D], and beside them scales [kv_heads, blocks + 1, block_size, 1]."""

    exact = False

    def __init__(self, blocks: int, block_size: int) -> None:
        super().__init__(blocks, block_size)
        self._dtype: dict[int, torch.dtype] = {}

    def layer_pools(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The layer's int8 pools, made together with their scales for keys and values [kv_heads, N, D] like these if it has none yet."""
        if layer not in self.pools:
            shape = (k.shape[0], self.blocks + 1, self.block_size)
            self.pools[layer] = tuple(x.new_zeros(*shape, x.shape[-1], dtype=torch.int8) for x in (k, v))  # type: ignore[assignment]
            self.scales[layer] = tuple(x.new_zeros(*shape, 1, dtype=torch.float32) for x in (k, v))  # type: ignore[assignment]
            self._dtype[layer] = v.dtype
        return self.pools[layer]

    def write(self, layer: int, k: Tensor, v: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Quantise k, v [kv_heads, N, D] into `slots` [N]; gives back the layer's int8 pools."""
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
        """What `select` takes of the layer's keys and of its values, in the dtype that they were written in."""
        pools = zip(self.pools[layer], self.scales[layer], strict=True)
        k, v = (dequantise(select(pool), select(scales), self._dtype[layer]) for pool, scales in pools)
        return k, v
