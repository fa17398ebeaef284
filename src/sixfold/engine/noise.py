"""Sampling noise as a pure function of (seed, task, sample, position): a counter-based generator, so no state and no order.

Philox-4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"), the generator behind cuRAND and torch's CUDA noise.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np

_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def philox(counter: np.ndarray, key: tuple[int, int]) -> np.ndarray:
    """counter [N, 4] of 32-bit words (held as uint64), key of two 32-bit words -> [N, 4] random 32-bit words."""
    c0, c1, c2, c3 = (counter[:, i].astype(np.uint64) for i in range(4))
    k0, k1 = key
    for _ in range(10):
        p0, p1 = _M0 * c0, _M1 * c2
        c0, c1, c2, c3 = (p1 >> _HALF) ^ c1 ^ np.uint64(k0), p1 & _LOW, (p0 >> _HALF) ^ c3 ^ np.uint64(k1), p0 & _LOW
        k0, k1 = (k0 + _W0) & 0xFFFFFFFF, (k1 + _W1) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3], axis=1)


def uniforms(seed: int, task: str, sample: int | list[int], positions: int, purpose: str = "") -> np.ndarray:
    """[positions] float64 in [0, 1): the noise of completion positions 0, 1, ... of one sample of one task; of S samples [S, positions].

    purpose: at most 16 bytes; each has a stream of its own, independent of the others. The empty one draws tokens.
    """
    digest = blake2b(f"{seed}\x00{task}".encode(), digest_size=16, person=purpose.encode()).digest()
    k0, k1, word2, word3 = (int.from_bytes(digest[i : i + 4], "little") for i in (0, 4, 8, 12))
    counter = np.empty((*np.shape(sample), positions, 4), dtype=np.uint64)
    counter[..., 0] = np.arange(positions)
    counter[..., 1] = np.asarray(sample)[..., None]
    counter[..., 2] = word2
    counter[..., 3] = word3
    words = philox(counter.reshape(-1, 4), (k0, k1)).reshape(counter.shape)
    return ((words[..., 0] << np.uint64(21)) ^ (words[..., 1] >> np.uint64(11))).astype(np.float64) * 2.0**-53
