"""Preempted sequences in host memory: their blocks are copied there and back instead of being computed again, and are the same bits.

`HostBlocks` keeps the books, for the scheduler; `HostPools` holds the numbers, one beside each cache (a draft model has its own). The bound is a
number of blocks, so of bytes. What does not fit goes in order of last use, of one text the end before the beginning, and is computed again as without
all this.
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
    """Which blocks of preempted sequences lie in which of `count` slots of host memory. A prompt's full blocks lie there once for all samples."""

    def __init__(self, count: int, block_size: int) -> None:
        self.count = count
        self._size = block_size
        self._free = list(range(count - 1, -1, -1))
        self._held: OrderedDict[tuple[Request | Sequence, int], tuple[int, int]] = OrderedDict()
        """Owner and index of a block -> slot, and tokens in it. Those used least recently first."""

    def put(self, sequence: Sequence) -> dict[int, int]:
        """Take in a running sequence's blocks, as far as there is room -> what is to be copied: slot -> block. What lies there already is not."""
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
        """Slots of the sequence's blocks first, first + 1, ..., up to one that is not there; they count as used now."""
        wanted = self._blocks(sequence)[first:]
        found = [key for key, _ in takewhile(lambda block: self._held.get(block[0], (-1, 0))[1] == block[1], wanted)]
        for key in reversed(found):
            self._held.move_to_end(key)
        return [self._held[key][0] for key in found]

    def drop(self, owner: Request | Sequence) -> None:
        """Give up a sequence's own blocks (it goes on, or has ended), or those of a request's prompt (none of its samples is left)."""
        limit = owner.limit if isinstance(owner, Request) else owner.request.limit
        for i in range(-(-limit // self._size)):
            if (owner, i) in self._held:
                self._free.append(self._held.pop((owner, i))[0])

    def clear(self) -> None:
        """Give up everything: the weights are others."""
        self._free += [slot for slot, _ in self._held.values()]
        self._held.clear()

    def _blocks(self, sequence: Sequence) -> list[tuple[tuple[Request | Sequence, int], int]]:
        """Key and tokens of every block that a sequence has computed: all its tokens but the newest."""
        cached, size, full = sequence.length - 1, self._size, len(sequence.request.prompt) // self._size
        return [((sequence.request if i < full else sequence, i), min(size, cached - i * size)) for i in range(-(-cached // size))]


class HostPools:
    """Copies of a cache's blocks in host memory: for each of its tensors one [kv_heads, slots, block_size, ...], made when first needed.

    taken_out, brought_back: bytes so far.
    """

    def __init__(self, cache: KVCache) -> None:
        self.taken_out = 0
        self.brought_back = 0
        self._cache = cache
        self._pools: list[Tensor] = []

    def take_out(self, copies: dict[int, int], slots: int) -> None:
        """Copy blocks into slots (slot -> block), of which there are `slots`."""
        if not copies:
            return
        sides = self._cache.tensors()
        self._pools = self._pools or [side.new_empty(side.shape[0], slots, *side.shape[2:], device="cpu") for side in sides]
        to, blocks = torch.tensor(list(copies)), torch.tensor(list(copies.values()))
        there = blocks.to(sides[0].device, non_blocking=True)
        for pool, part in zip(self._pools, _to_host([side.index_select(1, there) for side in sides]), strict=True):
            pool.index_copy_(1, to, part)
            self.taken_out += part.nbytes

    def bring_back(self, pairs: list[tuple[int, int]]) -> None:
        """Copy (slot, block) pairs into the cache."""
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
        """Drop the buffers."""
        self._pools.clear()


def _to_host(parts: list[Tensor]) -> list[Tensor]:
    """The same in host memory; from a GPU in one copy for each dtype, whatever the number of layers."""
    if parts[0].is_cpu:
        return parts
    return _together(parts, lambda flat: _staging(flat).copy_(flat))


def _to_device(parts: list[Tensor], device: torch.device) -> list[Tensor]:
    """The same on the device; on a GPU in one copy for each dtype."""
    if device.type == "cpu":
        return parts
    return _together(parts, lambda flat: (_staging(flat).copy_(flat) if device.type == "cuda" else flat).to(device, non_blocking=True))


def _together(parts: list[Tensor], move: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Each part as `move` leaves it, which is called once for all parts of a dtype."""
    moved: dict[int, Tensor] = {}
    for dtype in {part.dtype: None for part in parts}:
        of = [i for i, part in enumerate(parts) if part.dtype == dtype]
        flat = move(torch.cat([parts[i].reshape(-1) for i in of]))
        for i, piece in zip(of, flat.split([parts[i].numel() for i in of]), strict=True):
            moved[i] = piece.view(parts[i].shape)
    return [moved[i] for i in range(len(parts))]


def _staging(like: Tensor) -> Tensor:
    """Host memory, pinned if there is a GPU: it copies from and to such memory several times faster."""
    return torch.empty(like.shape, dtype=like.dtype, pin_memory=torch.cuda.is_available())
