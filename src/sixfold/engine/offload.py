"""Offload the KV cache blocks of preempted sequences to host memory.

The blocks are copied to host memory and back, bit for bit, instead of being computed again.
`HostBlocks` does the accounting for the scheduler. `HostPools` stores the data, one per KV cache (a
draft model has its own cache).

The number of blocks in host memory is bounded. If there is no room, the least recently used blocks
are dropped; within a sequence, later blocks go first. Dropped blocks are computed again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from itertools import takewhile

import torch
from torch import Tensor

from .kv_cache import KVCache
from .sequence import Request, Sequence


class HostBlocks:
    """Maps blocks of preempted sequences to slots of host memory.

    The full blocks of a prompt are stored once for all its samples.

    Args:
        count: number of slots.
        block_size: tokens per block.
    """

    def __init__(self, count: int, block_size: int) -> None:
        self.count = count
        self._size = block_size
        self._free = list(range(count - 1, -1, -1))
        self._held: OrderedDict[tuple[Request | Sequence, int], tuple[int, int]] = OrderedDict()
        """(owner, block index) -> (slot, tokens in the block). Least recently used first."""

    def put(self, sequence: Sequence) -> dict[int, int]:
        """Store the blocks of a running sequence, as many as fit.

        Returns:
            Blocks to copy, as slot -> block. Blocks that are already in host memory are left out.
        """
        copies: dict[int, int] = {}
        for i, (key, tokens) in reversed(list(enumerate(self._blocks(sequence)))):
            slot, held = self._held.pop(key, (-1, 0))
            if slot < 0 and not self._free:
                if not self._held:
                    break
                self._free.append(self._held.popitem(last=False)[1][0])
            slot = self._free.pop() if slot < 0 else slot
            self._held[key] = (slot, tokens)
            if held != tokens:
                copies[slot] = sequence.blocks[i]
        return copies

    def find(self, sequence: Sequence, first: int) -> list[int]:
        """Slots of the sequence's blocks first, first + 1, ..., up to the first missing block.

        The blocks found are marked as used now.
        """
        wanted = self._blocks(sequence)[first:]
        found = [
            key
            for key, _ in takewhile(
                lambda block: self._held.get(block[0], (-1, 0))[1] == block[1], wanted
            )
        ]
        for key in reversed(found):
            self._held.move_to_end(key)
        return [self._held[key][0] for key in found]

    def drop(self, owner: Request | Sequence) -> None:
        """Drop a sequence's own blocks (it resumes or ended), or a prompt's (no sample is left)."""
        limit = owner.limit if isinstance(owner, Request) else owner.request.limit
        for i in range(-(-limit // self._size)):
            if (owner, i) in self._held:
                self._free.append(self._held.pop((owner, i))[0])

    def clear(self) -> None:
        """Drop all blocks, because the weights have changed."""
        self._free += [slot for slot, _ in self._held.values()]
        self._held.clear()

    def _blocks(self, sequence: Sequence) -> list[tuple[tuple[Request | Sequence, int], int]]:
        """Key and token count of each computed block: those of all tokens but the newest."""
        cached, size, full = (
            sequence.length - 1,
            self._size,
            len(sequence.request.prompt) // self._size,
        )
        return [
            ((sequence.request if i < full else sequence, i), min(size, cached - i * size))
            for i in range(-(-cached // size))
        ]


class HostPools:
    """Copies of a KV cache's blocks in host memory.

    Each tensor of the cache has one pool [kv_heads, slots, block_size, ...], allocated on first
    use.

    Attributes:
        taken_out: bytes copied to host memory so far.
        brought_back: bytes copied from host memory so far.
    """

    def __init__(self, cache: KVCache) -> None:
        self.taken_out = 0
        self.brought_back = 0
        self._cache = cache
        self._pools: list[Tensor] = []

    def take_out(self, copies: dict[int, int], slots: int) -> None:
        """Copy blocks to host memory. copies: slot -> block. slots: total number of slots."""
        if not copies:
            return
        sides = self._cache.tensors()
        self._pools = self._pools or [
            side.new_empty(side.shape[0], slots, *side.shape[2:], device="cpu") for side in sides
        ]
        to, blocks = torch.tensor(list(copies)), torch.tensor(list(copies.values()))
        there = blocks.to(sides[0].device, non_blocking=True)
        for pool, part in zip(
            self._pools, _to_host([side.index_select(1, there) for side in sides]), strict=True
        ):
            pool.index_copy_(1, to, part)
            self.taken_out += part.nbytes

    def bring_back(self, pairs: list[tuple[int, int]]) -> None:
        """Copy blocks from host memory into the cache. pairs: (slot, block)."""
        if not pairs:
            return
        slots, blocks = torch.tensor(pairs).T.contiguous()
        sides = self._cache.tensors()
        there = blocks.to(sides[0].device, non_blocking=True)
        parts = [pool.index_select(1, slots) for pool in self._pools]
        for part, side in zip(_to_device(parts, sides[0].device), sides, strict=True):
            side.index_copy_(1, there, part)
            self.brought_back += part.nbytes

    def clear(self) -> None:
        self._pools.clear()


def _to_host(parts: list[Tensor]) -> list[Tensor]:
    """Copy tensors to host memory. From a GPU this takes one copy per dtype, not one per layer."""
    if parts[0].is_cpu:
        return parts
    return _together(parts, lambda flat: _staging(flat).copy_(flat))


def _to_device(parts: list[Tensor], device: torch.device) -> list[Tensor]:
    """Copy tensors to the device. To a GPU this takes one copy per dtype."""
    if device.type == "cpu":
        return parts
    return _together(
        parts,
        lambda flat: (_staging(flat).copy_(flat) if device.type == "cuda" else flat).to(
            device, non_blocking=True
        ),
    )


def _together(parts: list[Tensor], move: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Apply `move` to all parts, concatenated by dtype: one call per dtype."""
    moved: dict[int, Tensor] = {}
    for dtype in {part.dtype: None for part in parts}:
        of = [i for i, part in enumerate(parts) if part.dtype == dtype]
        flat = move(torch.cat([parts[i].reshape(-1) for i in of]))
        for i, piece in zip(of, flat.split([parts[i].numel() for i in of]), strict=True):
            moved[i] = piece.view(parts[i].shape)
    return [moved[i] for i in range(len(parts))]


def _staging(like: Tensor) -> Tensor:
    """Empty host buffer, pinned if there is a GPU: copies are then several times faster."""
    return torch.empty(like.shape, dtype=like.dtype, pin_memory=torch.cuda.is_available())
