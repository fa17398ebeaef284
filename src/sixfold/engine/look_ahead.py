"""Blocks for proposed tokens: allocated before a speculative step, freed after it if unused."""

from __future__ import annotations

from .scheduler import Scheduler
from .sequence import Sequence


def look_ahead(scheduler: Scheduler, sequences: list[Sequence], wanted: list[int]) -> list[int]:
    """Allocate blocks for proposed tokens. No sequence is preempted for them.

    Args:
        scheduler: owner of the block manager.
        wanted: number of tokens after the newest one of each sequence.

    Returns:
        Number of proposed tokens that each sequence has room for, at most `wanted`.
    """
    counts, blocks = [], scheduler.blocks
    for sequence, count in zip(sequences, wanted, strict=True):
        short = blocks.blocks_for(sequence.length + count) - len(sequence.blocks)
        if short > 0 and scheduler.room(short):
            sequence.blocks += blocks.allocate(short)
            scheduler.revision += 1
        counts.append(min(count, len(sequence.blocks) * blocks.block_size - sequence.length))
    return counts


def give_back(scheduler: Scheduler, sequences: list[Sequence]) -> None:
    """Free the blocks of rejected tokens: all blocks beyond the cached tokens."""
    for sequence in sequences:
        kept = scheduler.blocks.blocks_for(sequence.length - 1)
        if len(sequence.blocks) > kept:
            scheduler.blocks.release(sequence.blocks[kept:])
            del sequence.blocks[kept:]
            scheduler.revision += 1
