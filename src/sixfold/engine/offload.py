"""Preempted sequences in host memory: their blocks are copied there and back instead of being computed again, and are the same bits.

`HostBlocks` keeps the books, for the scheduler; `HostPools` holds the numbers, one beside each cache (a draft model has its own). The bound is a
number of blocks, so of bytes. What does not fit goes in order of last use, of one text the end before the beginning, and is computed again as without
all this.
"""

from __future__ import annotations

from collections import OrderedDict
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
        for pool, side in zip(self._pools, sides, strict=True):
            staged = _staging(side, len(copies)).copy_(side.index_select(1, blocks.to(side.device)))
            pool.index_copy_(1, to, staged)
            self.taken_out += staged.nbytes

    def bring_back(self, pairs: list[tuple[int, int]]) -> None:
        """Copy (slot, block) pairs into the cache."""
        if not pairs:
            return
        slots, blocks = (torch.tensor(column) for column in zip(*pairs, strict=True))
        for pool, side in zip(self._pools, self._cache.tensors(), strict=True):
            staged = torch.index_select(pool, 1, slots, out=_staging(side, len(pairs)))
            side.index_copy_(1, blocks.to(side.device), staged.to(side.device))
            self.brought_back += staged.nbytes

    def clear(self) -> None:
        """Drop the buffers."""
        self._pools.clear()


def _staging(side: Tensor, blocks: int) -> Tensor:
    """Host memory for some blocks of a tensor of the cache; pinned for a GPU, which copies from and to such memory several times faster."""
    return torch.empty(side.shape[0], blocks, *side.shape[2:], dtype=side.dtype, pin_memory=side.is_cuda)
