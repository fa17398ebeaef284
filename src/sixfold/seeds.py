"""Numbers derived from a seed and words, by BLAKE2b. They depend on nothing else.

Every size has a reader that limits it. Changing a size or a text changes every run.
"""

from __future__ import annotations

from hashlib import blake2b

STEP_BYTES = 7
"""Seed of a step: JSON integers and int64 hold it, with no sign."""
SAMPLE_BYTES = 6
"""Seed of one sample in another engine: below 2^53, so every JSON parser reads it exactly."""
ORDER_BYTES = 8
"""Key that puts tasks in a random order: long enough that no two of a data set are equal."""
NOISE_BYTES = 16
"""Key and counter of the generator behind the sampling noise: four words of 32 bits."""


def seed_bytes(text: str, size: int, purpose: str = "") -> bytes:
    """Hash of a text.

    Args:
        text: the seed and the words, joined by a separator.
        size: number of bytes.
        purpose: name of an independent stream, at most 16 bytes.
    """
    return blake2b(text.encode(), digest_size=size, person=purpose.encode()).digest()


def seed_number(text: str, size: int) -> int:
    """Hash of a text as a number below 256 ** size."""
    return int.from_bytes(seed_bytes(text, size), "little")


def sample_seed(seed: int, name: str, sample: int, offset: int = 0) -> int:
    """Seed of one completion in an engine with its own random generator (48 bits).

    It depends only on the arguments, so batching, order and restarts do not change the samples.

    Args:
        seed: seed of the rollout.
        name: name of the task.
        sample: index of the sample within the task.
        offset: sampled and observed tokens before this completion. 0 in the first turn.
    """
    turn = f"\x00{offset}" if offset else ""
    return seed_number(f"{seed}\x00{name}\x00{sample}{turn}", SAMPLE_BYTES)
