"""Admission by the worst case: a sequence starts only if its longest possible self fits into the cache beside those already running. So nothing
that started ever has to stop for lack of blocks."""

from __future__ import annotations

from .block_manager import BlockManager
from .sequence import Request, Sequence


class Reservation:
    """Blocks that running sequences may come to need, and those that prompts hold. Never more than there are."""

    def __init__(self, blocks: BlockManager) -> None:
        self._blocks = blocks
        self.reserved = 0

    def worst(self, request: Request) -> int:
        """Blocks that one sample of the request may need if it has the cache to itself."""
        return self._blocks.blocks_for(len(request.prompt)) + self._next(request)

    def fits(self, request: Request) -> bool:
        """True if the request's next sample can start beside what is reserved."""
        prompt = 0 if request.claimed else self._blocks.blocks_for(len(request.prompt))
        return self.reserved + self._next(request) + prompt <= self._blocks.count

    def claim(self, request: Request) -> None:
        """The request's prompt begins to be computed."""
        if not request.claimed:
            request.claimed = True
            self.reserved += self._blocks.blocks_for(len(request.prompt))

    def start(self, request: Request) -> None:
        """A sample starts: the last one takes over the prompt's partly filled block."""
        self.reserved += self._next(request)

    def retire(self, sequence: Sequence) -> None:
        """A sequence ended; the prompt's full blocks, shared by all samples, go with the last of them."""
        self.reserved -= self._own(sequence.request)
        if sequence.request.unfinished == 0:
            self.reserved -= self._full(sequence.request)

    def drop(self, request: Request) -> None:
        """The queue gave up the prompt's blocks. Its full ones stay reserved while samples run on them."""
        if not request.claimed:
            return
        if request.unfinished > len(request.samples):
            self.reserved -= self._partial(request)
        else:
            request.claimed = False
            self.reserved -= self._blocks.blocks_for(len(request.prompt))

    def _full(self, request: Request) -> int:
        """Blocks that the prompt fills."""
        return len(request.prompt) // self._blocks.block_size

    def _partial(self, request: Request) -> int:
        """1 if the prompt's last block is partly filled: all samples copy it but the last, which takes it over."""
        return self._blocks.blocks_for(len(request.prompt)) - self._full(request)

    def _next(self, request: Request) -> int:
        """Blocks to reserve for the sample that starts next, beside the prompt's."""
        return self._own(request) - (self._partial(request) if len(request.samples) == 1 else 0)

    def _own(self, request: Request) -> int:
        """Most blocks a sample can come to own beside the prompt's full ones."""
        return self._blocks.blocks_for(request.limit) - self._full(request)
