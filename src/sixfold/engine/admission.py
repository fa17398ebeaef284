"""Admission control by the worst case.

A sequence starts only if it fits in the KV cache at its maximum length, beside the sequences
already running. So a running sequence never stops for lack of blocks.
"""

from __future__ import annotations

from .block_manager import BlockManager
from .sequence import Request, Sequence


class Reservation:
    """Number of blocks reserved for running sequences at their maximum length, and for prompts.

    It never exceeds the number of blocks in the cache.
    """

    def __init__(self, blocks: BlockManager) -> None:
        self._blocks = blocks
        self.reserved = 0

    def worst(self, request: Request) -> int:
        """Blocks that one sample of the request may need if nothing else is in the cache."""
        return self._blocks.blocks_for(len(request.prompt)) + self._next(request)

    def fits(self, request: Request) -> bool:
        """True if the request's next sample fits beside the reserved blocks."""
        prompt = 0 if request.claimed else self._blocks.blocks_for(len(request.prompt))
        return self.reserved + self._next(request) + prompt <= self._blocks.count

    def claim(self, request: Request) -> None:
        """Reserve the blocks of a request's prompt, before it is computed."""
        if not request.claimed:
            request.claimed = True
            self.reserved += self._blocks.blocks_for(len(request.prompt))

    def start(self, request: Request) -> None:
        """Reserve blocks for a sample that starts.

        The last sample takes over the prompt's partly filled block.
        """
        self.reserved += self._next(request)

    def retire(self, sequence: Sequence) -> None:
        """Free the reservation of a sequence that ended.

        The prompt's full blocks are shared by all samples and are freed with the last one.
        """
        self.reserved -= self._blocks_per_sample(sequence.request)
        if sequence.request.unfinished == 0:
            self.reserved -= self._full(sequence.request)

    def drop(self, request: Request) -> None:
        """Free the reservation of a prompt whose ticket released its blocks.

        The prompt's full blocks stay reserved while samples run on them.
        """
        if not request.claimed:
            return
        if request.unfinished > len(request.samples):
            self.reserved -= self._partial(request)
        else:
            request.claimed = False
            self.reserved -= self._blocks.blocks_for(len(request.prompt))

    def _full(self, request: Request) -> int:
        return len(request.prompt) // self._blocks.block_size

    def _partial(self, request: Request) -> int:
        """1 if the prompt's last block is partly filled, else 0.

        Every sample copies this block, except the last one, which takes it over.
        """
        return self._blocks.blocks_for(len(request.prompt)) - self._full(request)

    def _next(self, request: Request) -> int:
        """Blocks to reserve for the next sample, in addition to the prompt's."""
        return self._blocks_per_sample(request) - (
            self._partial(request) if len(request.samples) == 1 else 0
        )

    def _blocks_per_sample(self, request: Request) -> int:
        """Maximum number of blocks that a sample owns, in addition to the prompt's full blocks."""
        return self._blocks.blocks_for(request.limit) - self._full(request)
