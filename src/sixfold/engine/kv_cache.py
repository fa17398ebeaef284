"""Paged KV cache, and the layouts of tokens over it: prefill and decode.

A prefill computes prompts, whole or in pieces. A decode computes one token per sequence.

Keys and values of a layer are two pools, [kv_heads, blocks + 1, block_size, D] each. The extra last
block is scratch for padding rows. A pool keeps its buffer until the cache is cleared.
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
"""Query positions per tile of a prefill on the CPU."""


@cache
def triton_serves(device: str) -> bool:
    """True if the Triton kernels can run on a device of this type (a torch device type).

    Triton comes with PyTorch's CUDA builds. The base install does not have it.
    """
    return device == "cuda" and find_spec("triton") is not None


def zeros(like: Tensor, *shape: int) -> Tensor:
    """Zeros of this shape, with the dtype and device of `like`.

    The memory must not be uninitialised: a masked slot enters attention as 0 * value, and 0 * NaN
    is NaN. On Linux, CPU memory uses huge pages if available, which speeds up attention over
    scattered blocks. Pages that no block has touched take no memory.
    """
    if not like.is_cpu or not hasattr(mmap, "MADV_HUGEPAGE"):
        return like.new_zeros(shape)
    room = mmap.mmap(
        -1,
        torch.Size(shape).numel() * like.element_size(),
        flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS,
    )
    with suppress(OSError):  # Linux kernels without huge pages
        room.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(room, dtype=like.dtype).view(shape)


class KVCache:
    """Pools of keys and values for each layer.

    A pool is allocated at the layer's first write, so head counts and sizes may differ by layer.

    Args:
        blocks: number of blocks, without the scratch block.
        block_size: tokens per block.
    """

    exact = True
    """True if reads return exactly what was written. `quantised_cache.py` rounds."""

    def __init__(self, blocks: int, block_size: int) -> None:
        self.blocks = blocks
        self.block_size = block_size
        self.pools: dict[int, tuple[Tensor, Tensor]] = {}
        self.scales: dict[int, tuple[Tensor, Tensor]] = {}
        """Scales of int8 pools, [kv_heads, blocks + 1, block_size, 1] (`quantised_cache.py`). Empty
        for an exact cache."""
        self.routes: Tensor | None = None
        """Experts that computed each cached token, [1, blocks + 1, block_size, layers, k]
        (`routes.py`). None unless they are recorded."""

    @property
    def scratch_slot(self) -> int:
        """First slot of the scratch block."""
        return self.blocks * self.block_size

    def write(self, layer: int, k: Tensor, v: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Write k, v [kv_heads, N, D] into `slots` [N].

        Returns:
            The layer's pools, [kv_heads, blocks + 1, block_size, D] each.
        """
        keys, values = self.layer_pools(layer, k, v)
        k, v = k.to(keys.dtype), v.to(values.dtype)
        keys.view(k.shape[0], -1, k.shape[-1]).index_copy_(1, slots, k)
        values.view(v.shape[0], -1, v.shape[-1]).index_copy_(1, slots, v)
        return keys, values

    def layer_pools(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The layer's pools. Allocates them to fit k, v [kv_heads, N, D] if there are none yet.

        Under autocast, pools have autocast's dtype, although rotated keys are float32.
        """
        if layer not in self.pools:
            device = v.device.type
            if torch.is_autocast_enabled(device):
                k, v = (x.to(torch.get_autocast_dtype(device)) for x in (k, v))
            k = k.to(v.dtype)
            shape = (k.shape[0], self.blocks + 1, self.block_size)
            self.pools[layer] = (zeros(k, *shape, k.shape[-1]), zeros(v, *shape, v.shape[-1]))
        return self.pools[layer]

    def kernels(self, q: Tensor, k: Tensor, v: Tensor) -> CPUKernels | None:
        """The compiled paged attention, or None if it does not support q, k, v [..., D].

        It supports float32 q, k and v. The pools may be bfloat16.
        """
        exact = q.dtype == k.dtype == v.dtype == torch.float32
        return cpu_kernels() if exact and self._fits(k, v) else None

    def _fits(self, k: Tensor, v: Tensor) -> bool:
        """True if the compiled attention supports the head sizes of k and v [..., D]."""
        heads = v.is_cpu and k.shape[-1] == v.shape[-1] and v.shape[-1] % 16 == 0
        return self.exact and heads

    @property
    def steady(self) -> bool:
        """True if the cache has been written and compiled attention can read every layer of it.

        The bits of a row then do not depend on the number of rows.
        """
        readable = (torch.float32, torch.bfloat16)
        return (
            bool(self.pools)
            and cpu_kernels() is not None
            and all(k.dtype in readable and self._fits(k, v) for k, v in self.pools.values())
        )

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copy (from, to) blocks in every layer."""
        sides = self.tensors()
        if not pairs or not sides:
            return
        source, target = torch.tensor(pairs).T.contiguous().to(sides[0].device, non_blocking=True)
        for side in sides:
            side.index_copy_(1, target, side.index_select(1, source))

    def read(self, layer: int, select: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """Apply `select` to the layer's key pool and value pool."""
        keys, values = self.pools[layer]
        return select(keys), select(values)

    def tensors(self) -> list[Tensor]:
        """All allocated pools and scales, each [kv_heads, blocks + 1, block_size, ...].

        If experts are recorded, also `routes`, whose first dimension is 1.
        """
        sides = [side for pair in [*self.pools.values(), *self.scales.values()] for side in pair]
        return sides if self.routes is None else [*sides, self.routes]

    def clear(self) -> None:
        self.pools.clear()
        self.scales.clear()
        self.routes = None


@dataclass(frozen=True)
class Tiles:
    """n tiles of prompt queries with the same tile index t.

    A tile holds the queries at positions [t * size, (t + 1) * size) of one sequence. They attend to
    the keys at positions below (t + 1) * size, under a causal mask.

    Attributes:
        rows: [n, size] row of each query in the forward pass; any valid row where there is no
            query.
        keys: [n, (t + 1) * size] cache slots of the keys.
        at: [M] which of the n * size results are used.
        to: [M] output row of each used result.
    """

    rows: Tensor
    keys: Tensor
    at: Tensor
    to: Tensor


def _take(pool: Tensor, slots: Tensor) -> Tensor:
    """Gather slots [n, S] of one pool -> [n, kv_heads, S, D]."""
    taken = pool.view(pool.shape[0], -1, pool.shape[-1]).index_select(1, slots.view(-1))
    return taken.view(pool.shape[0], *slots.shape, -1).transpose(0, 1)


def gather(pool: Tensor, table: Tensor) -> Tensor:
    """Gather the blocks of table [B, M] from one pool -> [B, kv_heads, M * block_size, D]."""
    taken = pool.index_select(1, table.reshape(-1))
    return taken.view(pool.shape[0], table.shape[0], -1, pool.shape[-1]).transpose(0, 1)


@dataclass(frozen=True)
class DecodeLayout:
    """Layout of B decode rows: the newest token of each sequence, or any tokens of any sequences.

    Attributes:
        slots: [B] cache slot that each token is written to.
        table: [B, M] block table of each row, padded with the scratch block. Attention is
            M * block_size keys wide.
        positions: [B] position of each token in its sequence.
        apart: True if no row reads what another row writes.
    """

    cache: KVCache
    slots: Tensor
    table: Tensor
    positions: Tensor
    apart: bool = False
    _biases: dict[int | None, Tensor] = field(default_factory=dict)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, kernel: AttentionLayer) -> Tensor:
        """Write the new keys and values, then attend over each row's own sequence.

        Shapes are those of `Layout.attend`, with one token per row: N = B.
        """
        kernels = self.cache.kernels(q, k, v)
        if kernels is None:
            return self._reference(q, k, v, kernel)
        qkv = (q[0].transpose(0, 1), k[0].transpose(0, 1), v[0].transpose(0, 1))
        # Bind the copy to a name: the kernel gets a raw pointer, which does not keep it alive.
        sinks = None if kernel.sinks is None else kernel.sinks.float().contiguous()
        return kernels.paged_attention(qkv, self._attention(kernels, q, k, v, kernel, sinks))[None]

    def compiled(
        self, q: Tensor, k: Tensor, v: Tensor, layers: Sequence[AttentionLayer]
    ) -> CompiledAttention | None:
        """The compiled function that `attend` would call, with its arguments for all layers.

        Args:
            q: queries; every layer's queries have the same shape and dtype.
            k: keys, likewise.
            v: values, likewise.

        Returns:
            None if `attend` would not call a compiled function, or if a layer has sinks.
        """
        kernels, array = self.cache.kernels(q, k, v), Attention * len(layers)
        # With sinks, the arguments would point to a copy that nothing keeps alive.
        if kernels is None or any(layer.sinks is not None for layer in layers):
            return None
        return (
            kernels.attend,
            array(*(self._attention(kernels, q, k, v, layer) for layer in layers)),
            self.apart,
        )

    def _attention(
        self,
        kernels: CPUKernels,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kernel: AttentionLayer,
        sinks: Tensor | None = None,
    ) -> Attention:
        pools, where = (
            self.cache.layer_pools(kernel.layer, k[0], v[0]),
            (
                self.slots,
                self.table,
                self.positions,
            ),
        )
        scale = q.shape[-1] ** -0.5 if kernel.scale is None else kernel.scale
        return kernels.attention(
            pools, where, q.shape[1], scale, kernel.window, kernel.softcap, sinks
        )

    def _reference(self, q: Tensor, k: Tensor, v: Tensor, kernel: AttentionLayer) -> Tensor:
        """`attend` in plain PyTorch."""
        self.cache.write(kernel.layer, k[0], v[0], self.slots)
        keys, values = self.cache.read(kernel.layer, partial(gather, table=self.table))
        width = keys.shape[2]
        batch, heads, kv_heads = q.shape[2], q.shape[1], k.shape[1]
        # The query heads of one KV head become its query rows, so no key is repeated. Plain
        # products with the keys as the left factor take a third of the time of the fused CPU
        # kernel, for one or two query rows.
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
        """Attention bias [B, 1, 1, keys]: 0 for visible keys, -inf elsewhere."""
        if window not in self._biases:
            at = torch.arange(keys, device=self.positions.device)
            hidden = at > self.positions[:, None]
            if window is not None:
                hidden |= self.positions[:, None] - at >= window
            bias = torch.zeros(hidden.shape, device=hidden.device).masked_fill_(
                hidden, float("-inf")
            )
            self._biases[window] = bias[:, None, None]
        return self._biases[window]


@dataclass(frozen=True)
class PrefillLayout:
    """Layout of N prompt tokens: pieces of prompts, packed into one row.

    Each piece attends to the cached part of its own sequence and to itself. The results of a token
    have the same bits whether its prompt is computed whole, in pieces, or after a cached prefix.

    Attributes:
        slots: [N] cache slot that each token is written to.
        by_row: makes the layout with one decode row per token, for the CPU kernels.
        tiles: makes the tiles, for attention in PyTorch. Their shape does not depend on the piece
            of the prompt that is computed, nor on what was cached before.
    """

    cache: KVCache
    slots: Tensor
    by_row: Callable[[], DecodeLayout]
    tiles: Callable[[], list[Tiles]]
    _masks: dict[tuple[int, int, int | None], Tensor] = field(default_factory=dict)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, kernel: AttentionLayer) -> Tensor:
        """Write the new keys and values, then attend causally within each sequence.

        Shapes are those of `Layout.attend`; values may have another size D_v.
        """
        if self.cache.kernels(q, k, v) is not None:
            return self.by_row().attend(q, k, v, kernel)
        self.cache.write(kernel.layer, k[0], v[0], self.slots)
        out = q.new_zeros(q.shape[2], q.shape[1], v.shape[3], dtype=v.dtype)
        for tile in self.tiles():
            (n, width), size = tile.keys.shape, tile.rows.shape[1]
            queries = (
                q[0]
                .index_select(1, tile.rows.view(-1))
                .view(q.shape[1], n, size, -1)
                .transpose(0, 1)
            )
            keys, values = self.cache.read(kernel.layer, partial(_take, slots=tile.keys))
            seen = kernel.attend(
                queries.to(keys.dtype), keys, values, self._mask(size, width, kernel.window)
            )
            out.index_copy_(
                0,
                tile.to,
                seen.transpose(1, 2)
                .reshape(n * size, q.shape[1], -1)
                .index_select(0, tile.at)
                .to(out.dtype),
            )
        return out[None]

    def compiled(
        self, q: Tensor, k: Tensor, v: Tensor, layers: Sequence[AttentionLayer]
    ) -> CompiledAttention | None:
        """See `DecodeLayout.compiled`."""
        return (
            None if self.cache.kernels(q, k, v) is None else self.by_row().compiled(q, k, v, layers)
        )

    def _mask(self, size: int, width: int, window: int | None) -> Tensor:
        """Causal mask [size, width] of the last `size` of `width` positions; True = visible."""
        if (size, width, window) not in self._masks:
            keys = torch.arange(width, device=self.slots.device)
            queries = keys[-size:, None]
            seen = keys <= queries
            self._masks[size, width, window] = (
                seen if window is None else seen & (queries - keys < window)
            )
        return self._masks[size, width, window]
