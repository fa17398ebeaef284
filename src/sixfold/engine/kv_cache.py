"""The paged KV cache and the two ways a forward lays out tokens over it: prefill (whole prompts) and decode (one token a sequence).

Keys and values of a layer are one pool [kv_heads, blocks + 1, block_size, D]; the extra last block is scratch for padding rows. A pool keeps its
buffer for the engine's life.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..model.attention import Kernel, causal_attention


class KVCache:
    """Pools by layer, made at the layer's first write (so head counts and sizes are the model's own, layer by layer)."""

    def __init__(self, blocks: int, block_size: int) -> None:
        self.blocks = blocks
        self.block_size = block_size
        self.pools: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def scratch_slot(self) -> int:
        """First slot of the scratch block."""
        return self.blocks * self.block_size

    def write(self, layer: int, k: Tensor, v: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Put k, v [kv_heads, N, D] into `slots` [N]; gives back the layer's pools, [kv_heads, blocks + 1, block_size, D]."""
        k = k.to(v.dtype)  # under autocast rotated keys come as float32
        if layer not in self.pools:
            shape = (k.shape[0], self.blocks + 1, self.block_size)
            # Zeros, not empty: a masked slot still enters attention as 0 * value, and 0 * NaN is NaN.
            self.pools[layer] = (k.new_zeros(*shape, k.shape[-1]), v.new_zeros(*shape, v.shape[-1]))
        keys, values = self.pools[layer]
        keys.view(k.shape[0], -1, k.shape[-1]).index_copy_(1, slots, k)
        values.view(v.shape[0], -1, v.shape[-1]).index_copy_(1, slots, v)
        return keys, values

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copy blocks (from, to) in every layer."""
        if not pairs:
            return
        for pool in self.pools.values():
            for side in pool:
                source, target = (torch.tensor(column, device=side.device) for column in zip(*pairs, strict=True))
                side.index_copy_(1, target, side.index_select(1, source))

    def nbytes(self) -> int:
        """Bytes of all pools made so far."""
        return sum(side.nbytes for pool in self.pools.values() for side in pool)


@dataclass(frozen=True)
class PrefillLayout:
    """Whole prompts one after another in a row. slots: [N] cache slot of each token. spans: each prompt's place in the row."""

    cache: KVCache
    slots: Tensor
    spans: list[tuple[int, int]]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, kernel: Kernel) -> Tensor:
        """Write keys and values, then attend causally within each prompt."""
        self.cache.write(kernel.layer, k[0], v[0], self.slots)
        spans = [causal_attention(q[:, :, a:b], k[:, :, a:b], v[:, :, a:b], kernel) for a, b in self.spans]
        return torch.cat(spans, dim=2).transpose(1, 2)


@dataclass(frozen=True)
class DecodeLayout:
    """One new token for each of B sequences.

    slots: [B] where it goes. table: [B * M] blocks of each sequence, padded with scratch. positions: [B].
    """

    cache: KVCache
    slots: Tensor
    table: Tensor
    positions: Tensor
    _biases: dict[int | None, Tensor] = field(default_factory=dict)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, kernel: Kernel) -> Tensor:
        """Write the new keys and values, then attend over each sequence's blocks: q [1, H, B, D] -> [1, B, H, D]."""
        keys, values = self.cache.write(kernel.layer, k[0], v[0], self.slots)
        batch, heads, kv_heads = q.shape[2], q.shape[1], k.shape[1]
        keys, values = (self._gather(pool, batch) for pool in (keys, values))
        # The query heads of one KV head become its query rows, so no key is repeated. Plain products: for one or two query rows they take half the
        # time of the fused CPU kernel.
        queries = q.view(kv_heads, heads // kv_heads, batch, -1).transpose(1, 2)
        scores = torch.matmul(queries, keys.transpose(-1, -2)).mul_(q.shape[-1] ** -0.5 if kernel.scale is None else kernel.scale)
        if kernel.softcap is not None:
            scores = kernel.softcap * torch.tanh(scores / kernel.softcap)
        scores = scores.add_(self._bias(kernel.window, keys.shape[2])).softmax(-1, dtype=torch.float32).to(values.dtype)
        return torch.matmul(scores, values).permute(1, 0, 2, 3).reshape(1, batch, heads, -1)

    def _gather(self, pool: Tensor, batch: int) -> Tensor:
        """[kv_heads, blocks, block_size, D] -> [kv_heads, B, M * block_size, D] in each sequence's own order."""
        return pool.index_select(1, self.table).view(pool.shape[0], batch, -1, pool.shape[-1])

    def _bias(self, window: int | None, keys: int) -> Tensor:
        """[B, 1, keys]: 0 where a sequence may look, -inf elsewhere."""
        if window not in self._biases:
            at = torch.arange(keys, device=self.positions.device)
            hidden = at > self.positions[:, None]
            if window is not None:
                hidden |= self.positions[:, None] - at >= window
            bias = torch.zeros(hidden.shape, device=hidden.device).masked_fill_(hidden, float("-inf"))
            self._biases[window] = bias[:, None]
        return self._biases[window]
