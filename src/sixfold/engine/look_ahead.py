"""Blocks for tokens that are only guessed: taken before a speculative step, given back behind it as far as the guesses did not stand."""

from __future__ import annotations

from .scheduler import Scheduler
from .sequence import Sequence


def look_ahead(scheduler: Scheduler, sequences: list[Sequence], wanted: list[int]) -> list[int]:
    """Blocks for `wanted` tokens behind each sequence's newest -> how many there is room for. Nobody is preempted for a guess."""
    counts, blocks = [], scheduler.blocks
    for sequence, count in zip(sequences, wanted, strict=True):
        short = blocks.blocks_for(sequence.length + count) - len(sequence.blocks)
        if short > 0 and scheduler.room(short):
            sequence.blocks += blocks.allocate(short)
            scheduler.revision += 1
        counts.append(min(count, len(sequence.blocks) * blocks.block_size - sequence.length))
    return counts


def give_back(scheduler: Scheduler, sequences: list[Sequence]) -> None:
    """Free the blocks of guesses that did not stand: all beyond the tokens that are cached."""
    for sequence in sequences:
        kept = scheduler.blocks.blocks_for(sequence.length - 1)
        if len(sequence.blocks) > kept:
            scheduler.blocks.release(sequence.blocks[kept:])
            del sequence.blocks[kept:]
            scheduler.revision += 1
