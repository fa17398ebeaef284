"""Sampling noise as a pure function of (seed, task, sample, position).

The generator is counter-based, so it has no state and the order of calls does not matter. It is
Philox-4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"), which cuRAND and
torch's CUDA generator also use.
"""

from __future__ import annotations

import numpy as np

from ..seeds import NOISE_BYTES, seed_bytes

_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def philox(counter: np.ndarray, key: tuple[int, int]) -> np.ndarray:
    """Philox-4x32-10.

    Args:
        counter: [N, 4] 32-bit words, stored as uint64.
        key: two 32-bit words.

    Returns:
        [N, 4] random 32-bit words, stored as uint64.
    """
    c0, c1, c2, c3 = (counter[:, i].astype(np.uint64) for i in range(4))
    k0, k1 = key
    for _ in range(10):
        p0, p1 = _M0 * c0, _M1 * c2
        c0, c1, c2, c3 = (
            (p1 >> _HALF) ^ c1 ^ np.uint64(k0),
            p1 & _LOW,
            (p0 >> _HALF) ^ c3 ^ np.uint64(k1),
            p0 & _LOW,
        )
        k0, k1 = (k0 + _W0) & 0xFFFFFFFF, (k1 + _W1) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3], axis=1)


def uniforms(
    seed: int,
    task: str,
    sample: int | list[int],
    positions: int,
    purpose: str = "",
    first: int = 0,
) -> np.ndarray:
    """Noise of consecutive positions of one or several samples of a task.

    Position 0 is the task's first sampled token.

    Args:
        sample: sample index, or a list of S indices.
        positions: number of positions.
        purpose: name of an independent stream, at most 16 bytes. The empty name is for drawing
            tokens.
        first: first position. It is above 0 for later turns of an episode.

    Returns:
        float64 in [0, 1): [positions], or [S, positions] for a list of samples.
    """
    digest = seed_bytes(f"{seed}\x00{task}", NOISE_BYTES, purpose)
    k0, k1, word2, word3 = (int.from_bytes(digest[i : i + 4], "little") for i in (0, 4, 8, 12))
    counter = np.empty((*np.shape(sample), positions, 4), dtype=np.uint64)
    counter[..., 0] = np.arange(first, first + positions)
    counter[..., 1] = np.asarray(sample)[..., None]
    counter[..., 2] = word2
    counter[..., 3] = word3
    words = philox(counter.reshape(-1, 4), (k0, k1)).reshape(counter.shape)
    return ((words[..., 0] << np.uint64(21)) ^ (words[..., 1] >> np.uint64(11))).astype(
        np.float64
    ) * 2.0**-53
