"""The paged KV cache and the two ways a forward lays out tokens over it: prefill (prompts, whole or in pieces) and decode (one token a sequence).

Keys and values of a layer are one pool [kv_heads, blocks + 1, block_size, D]; the extra last block is scratch for padding rows. A pool keeps its
buffer for the engine's life.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from importlib.util import find_spec

import torch
from torch import Tensor

from ..kernels.attention import AttentionLayer
from ..kernels.cpu.body_kernels import CompiledAttention
from ..kernels.cpu.engine_kernels import Attention, CPUKernels, cpu_kernels

TILE = 64
"""Query positions that a prefill attends for at a time on the CPU."""


@cache
def triton_serves(device: str) -> bool:
    """Whether `triton_kernels.py` does. device: a torch device's type. Triton comes with PyTorch's CUDA builds; the base install has none."""
    return device == "cuda" and find_spec("triton") is not None


def zeros(like: Tensor, *shape: int) -> Tensor:
    """Zeros, not empty: a masked slot still enters attention as 0 * value, and 0 * NaN is NaN. On Linux in huge pages, as far as there are any, which
    attention over scattered blocks finds sooner; what no block has touched takes no memory."""
    if not like.is_cpu or not hasattr(mmap, "MADV_HUGEPAGE"):
        return like.new_zeros(shape)
    room = mmap.mmap(-1, torch.Size(shape).numel() * like.element_size(), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # of a kernel that has none
        room.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(room, dtype=like.dtype).view(shape)


class KVCache:
    """Pools by layer, made at the layer's first write (so head counts and sizes are the model's own, layer by layer)."""

    exact = True
    """What is read is what was written (`quantised_cache.py` rounds)."""

    def __init__(self, blocks: int, block_size: int) -> None:
        self.blocks = blocks
        self.block_size = block_size
        self.pools: dict[int, tuple[Tensor, Tensor]] = {}
        self.scales: dict[int, tuple[Tensor, Tensor]] = {}
        """Of pools of int8 (`quantised_cache.py`): [kv_heads, blocks + 1, block_size, 1]; none where what is read is what was written."""

    @property
    def scratch_slot(self) -> int:
        """First slot of the scratch block."""
        return self.blocks * self.block_size

    def write(self, layer: int, k: Tensor, v: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Put k, v [kv_heads, N, D] into `slots` [N]; gives back the layer's pools, [kv_heads, blocks + 1, block_size, D]."""
        k = k.to(v.dtype)  # under autocast rotated keys come as float32
        keys, values = self.layer_pools(layer, k, v)
        keys.view(k.shape[0], -1, k.shape[-1]).index_copy_(1, slots, k)
        values.view(v.shape[0], -1, v.shape[-1]).index_copy_(1, slots, v)
        return keys, values

    def layer_pools(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The layer's pools, made for keys and values [kv_heads, N, D] like these if it has none yet."""
        if layer not in self.pools:
            shape = (k.shape[0], self.blocks + 1, self.block_size)
            self.pools[layer] = (zeros(k, *shape, k.shape[-1]), zeros(v, *shape, v.shape[-1]))
        return self.pools[layer]

    def kernels(self, q: Tensor, k: Tensor, v: Tensor) -> CPUKernels | None:
        """The compiled paged attention, where these queries, keys and values [..., D] are what it takes."""
        fits = self.exact and q.dtype == k.dtype == v.dtype == torch.float32 and v.is_cpu and k.shape[-1] == v.shape[-1] and v.shape[-1] % 16 == 0
        return cpu_kernels() if fits else None

    @property
    def steady(self) -> bool:
        """Whether it has been written, and compiled attention reads all of it: a row's bits are then the same however many rows there are."""
        return bool(self.pools) and all(self.kernels(k, k, v) is not None for k, v in self.pools.values())

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copy blocks (from, to) in every layer."""
        sides = self.tensors()
        if not pairs or not sides:
            return
        source, target = torch.tensor(pairs).T.contiguous().to(sides[0].device, non_blocking=True)
        for side in sides:
            side.index_copy_(1, target, side.index_select(1, source))

    def read(self, layer: int, select: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """What `select` takes of the layer's keys and of its values."""
        keys, values = self.pools[layer]
        return select(keys), select(values)

    def tensors(self) -> list[Tensor]:
        """All pools and scales made so far, each [kv_heads, blocks + 1, block_size, ...]."""
        return [side for pair in [*self.pools.values(), *self.scales.values()] for side in pair]

    def clear(self) -> None:
        """Drop the buffers."""
        self.pools.clear()
        self.scales.clear()


@dataclass(frozen=True)
class Tiles:
    """Queries of prompts, a tile of them at a time: those at positions [t * size, (t + 1) * size) of
    a sequence, over all keys up to there.

    Attributes:
        rows: [n, size] where in the forward's row each query is (any valid row where there is none).
        keys: [n, (t + 1) * size] cache slots.
        at: [M] which of the n * size results are wanted.
        to: [M] their rows.
    """

    rows: Tensor
    keys: Tensor
    at: Tensor
    to: Tensor


def _take(pool: Tensor, slots: Tensor) -> Tensor:
    """One side of a layer's pools, slots [n, S] -> [n, kv_heads, S, D]."""
    taken = pool.view(pool.shape[0], -1, pool.shape[-1]).index_select(1, slots.view(-1))
    return taken.view(pool.shape[0], *slots.shape, -1).transpose(0, 1)


def gather(pool: Tensor, table: Tensor) -> Tensor:
    """One side of a layer's pools, table [B, M] of blocks -> [B, kv_heads, M * block_size, D]."""
    taken = pool.index_select(1, table.reshape(-1))
    return taken.view(pool.shape[0], table.shape[0], -1, pool.shape[-1]).transpose(0, 1)


@dataclass(frozen=True)
class DecodeLayout:
    """B tokens by a decode's arithmetic: the newest of each sequence, or any of any sequences.

    slots: [B] where it goes. table: [B, M] blocks of each sequence, padded with scratch; attention is M * block_size keys wide. positions: [B].
    apart: no row reads what another one writes.
    """

    cache: KVCache
    slots: Tensor
    table: Tensor
    positions: Tensor
    apart: bool = False
    _biases: dict[int | None, Tensor] = field(default_factory=dict)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, kernel: AttentionLayer) -> Tensor:
        """Write the new keys and values, then attend over each sequence's own: q [1, H, B, D] -> [1, B, H, D]."""
        kernels = self.cache.kernels(q, k, v)
        if kernels is None:
            return self._reference(q, k, v, kernel)
        qkv = (q[0].transpose(0, 1), k[0].transpose(0, 1), v[0].transpose(0, 1))
        sinks = None if kernel.sinks is None else kernel.sinks.float().contiguous()  # a name of its own keeps a copy alive
        return kernels.paged_attention(qkv, self._attention(kernels, q, k, v, kernel, sinks))[None]

    def compiled(self, q: Tensor, k: Tensor, v: Tensor, layers: Sequence[AttentionLayer]) -> CompiledAttention | None:
        """What `attend` would call, for all layers at once, whose queries, keys and values are like these. None where that is no compiled
        function."""
        kernels, array = self.cache.kernels(q, k, v), Attention * len(layers)
        if kernels is None or any(layer.sinks is not None for layer in layers):  # nothing would keep a copy of sinks alive
            return None
        return kernels.attend, array(*(self._attention(kernels, q, k, v, layer) for layer in layers)), self.apart

    def _attention(
        self,
        kernels: CPUKernels,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kernel: AttentionLayer,
        sinks: Tensor | None = None,
    ) -> Attention:
        pools, where = self.cache.layer_pools(kernel.layer, k[0], v[0]), (self.slots, self.table, self.positions)
        scale = q.shape[-1] ** -0.5 if kernel.scale is None else kernel.scale
        return kernels.attention(pools, where, q.shape[1], scale, kernel.window, kernel.softcap, sinks)

    def _reference(self, q: Tensor, k: Tensor, v: Tensor, kernel: AttentionLayer) -> Tensor:
        """The same by PyTorch's operations."""
        self.cache.write(kernel.layer, k[0], v[0], self.slots)
        keys, values = self.cache.read(kernel.layer, partial(gather, table=self.table))
        width = keys.shape[2]
        batch, heads, kv_heads = q.shape[2], q.shape[1], k.shape[1]
        # The query heads of one KV head become its query rows, so no key is repeated. Plain products, the tall keys first: for one or two query rows
        # they take a third of the time of the fused CPU kernel.
        queries = q[0].transpose(0, 1).reshape(batch, kv_heads, heads // kv_heads, -1)
        scores = torch.matmul(keys, queries.transpose(-1, -2)).transpose(-1, -2)
        scores = scores * (q.shape[-1] ** -0.5 if kernel.scale is None else kernel.scale)
        if kernel.softcap is not None:
            scores = kernel.softcap * torch.tanh(scores / kernel.softcap)
        scores = scores.add_(self._bias(kernel.window, width))
        if kernel.sinks is not None:
            sinks = kernel.sinks.to(scores.dtype).view(kv_heads, -1, 1).expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, sinks], -1)
        scores = scores.softmax(-1, dtype=torch.float32)[..., :width].to(values.dtype)
        return torch.matmul(scores, values).reshape(1, batch, heads, -1)

    def _bias(self, window: int | None, keys: int) -> Tensor:
        """[B, 1, 1, keys]: 0 where a sequence may look, -inf elsewhere."""
        if window not in self._biases:
            at = torch.arange(keys, device=self.positions.device)
            hidden = at > self.positions[:, None]
            if window is not None:
                hidden |= self.positions[:, None] - at >= window
            bias = torch.zeros(hidden.shape, device=hidden.device).masked_fill_(hidden, float("-inf"))
            self._biases[window] = bias[:, None, None]
        return self._biases[window]


@dataclass(frozen=True)
class PrefillLayout:
    """Pieces of prompts one after another in a row, each behind what the cache holds of its own sequence.

    slots: [N] where each token goes. by_row gives every token by itself, as a decode has it, for the CPU kernels. tiles, for PyTorch's operations,
    are of one shape whatever piece of a prompt is computed, and whatever stood in the cache before. Either way a token's numbers are the same bits
    when its prompt is computed whole, in pieces, or behind a cached prefix.
    """

    cache: KVCache
    slots: Tensor
    by_row: Callable[[], DecodeLayout]
    tiles: Callable[[], list[Tiles]]
    _masks: dict[tuple[int, int, int | None], Tensor] = field(default_factory=dict)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, kernel: AttentionLayer) -> Tensor:
        """Write keys and values, then attend causally to one's own sequence: q [1, H, N, D], v [1, H_kv, N, D_v] -> [1, N, H, D_v]."""
        if self.cache.kernels(q, k, v) is not None:
            return self.by_row().attend(q, k, v, kernel)
        self.cache.write(kernel.layer, k[0], v[0], self.slots)
        out = q.new_zeros(q.shape[2], q.shape[1], v.shape[3], dtype=v.dtype)
        for tile in self.tiles():
            (n, width), size = tile.keys.shape, tile.rows.shape[1]
            queries = q[0].index_select(1, tile.rows.view(-1)).view(q.shape[1], n, size, -1).transpose(0, 1)
            keys, values = self.cache.read(kernel.layer, partial(_take, slots=tile.keys))
            seen = kernel.attend(queries.to(keys.dtype), keys, values, self._mask(size, width, kernel.window))
            out.index_copy_(0, tile.to, seen.transpose(1, 2).reshape(n * size, q.shape[1], -1).index_select(0, tile.at).to(out.dtype))
        return out[None]

    def compiled(self, q: Tensor, k: Tensor, v: Tensor, layers: Sequence[AttentionLayer]) -> CompiledAttention | None:
        """As a decode's."""
        return None if self.cache.kernels(q, k, v) is None else self.by_row().compiled(q, k, v, layers)

    def _mask(self, size: int, width: int, window: int | None) -> Tensor:
        """[size, width]: what the last `size` of `width` positions see."""
        if (size, width, window) not in self._masks:
            keys = torch.arange(width, device=self.slots.device)
            queries = keys[-size:, None]
            seen = keys <= queries
            self._masks[size, width, window] = seen if window is None else seen & (queries - keys < window)
        return self._masks[size, width, window]
