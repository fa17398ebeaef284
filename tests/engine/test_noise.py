"""The counter-based noise: the published vectors, uniformity, and streams that share nothing."""

from __future__ import annotations

import numpy as np
import pytest

from sixfold.engine.noise import philox, uniforms


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # Random123's known answers for philox4x32-10
        ([0] * 4, (0, 0), [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        (
            [0xFFFFFFFF] * 4,
            (0xFFFFFFFF, 0xFFFFFFFF),
            [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD],
        ),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            (0xA4093822, 0x299F31D0),
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_gives_the_published_numbers(
    counter: list[int], key: tuple[int, int], expected: list[int]
) -> None:
    other = [1, 2, 3, 4]
    assert philox(np.array([other, counter], dtype=np.uint64), key)[1].tolist() == expected


@pytest.mark.slow
def test_uniforms_are_uniform() -> None:
    n = 20_000
    u = uniforms(7, "task-3", 2, n)
    assert u.min() >= 0.0 and u.max() < 1.0
    gap = np.abs(np.sort(u) - (np.arange(n) + 0.5) / n).max()
    assert gap < 1.95 / np.sqrt(n)  # Kolmogorov-Smirnov, 0.1 %
    counts = np.histogram(u, bins=64, range=(0, 1))[0]
    assert (
        (counts - n / 64) ** 2 / (n / 64)
    ).sum() < 103.4  # chi-square, 63 degrees of freedom, 0.1 %
    assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 4 / np.sqrt(n)


def test_uniforms_use_all_53_bits() -> None:
    """Every value is a multiple of 2^-53, and the last bits are as often 1 as 0."""
    scaled = uniforms(0, "bits", 0, 4000) * 2.0**53
    assert np.array_equal(scaled, np.floor(scaled))
    low = scaled.astype(np.uint64) & np.uint64(0xFFFF)
    ones = np.unpackbits(low.astype(">u2").view(np.uint8)).reshape(-1, 16).mean(0)
    assert np.abs(ones - 0.5).max() < 4 * 0.5 / np.sqrt(4000)


def test_a_position_does_not_depend_on_how_many_are_drawn() -> None:
    assert np.array_equal(uniforms(1, "t", 0, 100)[:17], uniforms(1, "t", 0, 17))


def test_seed_task_and_sample_each_give_another_stream() -> None:
    keys = [
        (seed, task, sample)
        for seed in (0, 1, 2**62)
        for task in ("a", "b", "1", "")
        for sample in (0, 1, 77)
    ]
    streams = np.stack([uniforms(*key, 400) for key in keys])
    assert len(np.unique(streams)) == streams.size  # not one shared number
    correlation = np.corrcoef(streams) - np.eye(len(keys))
    assert np.abs(correlation).max() < 5 / np.sqrt(400)


def test_seed_and_task_do_not_run_together() -> None:
    assert uniforms(1, "2", 0, 1)[0] != uniforms(12, "", 0, 1)[0]


def test_noise_is_frozen() -> None:
    """A change of these numbers changes every run: it needs a major version and a word in
    the log.
    """
    assert uniforms(0, "0", 0, 3).tolist() == [
        0.5254656645412419,
        0.8700555289095644,
        0.12083238532728369,
    ]


def test_each_purpose_has_its_own_stream() -> None:
    n = 20_000
    streams = [uniforms(7, "task-3", 2, n, purpose) for purpose in ("", "accept", "residual")]
    assert (streams[0] == uniforms(7, "task-3", 2, n)).all()
    assert np.abs(np.corrcoef(streams) - np.eye(3)).max() < 4 / np.sqrt(n)


def test_a_later_turn_continues_the_noise_of_the_first() -> None:
    """Noise of positions 40 to 49, with `first` and without."""
    for sample in (3, [0, 7]):
        for purpose in ("", "accept"):
            whole = uniforms(1, "t", sample, 50, purpose)
            assert np.array_equal(uniforms(1, "t", sample, 10, purpose, first=40), whole[..., 40:])
