"""Prefill work that a shared prompt saves."""

from __future__ import annotations

from . import checks


def prefill_saving(samples: int, completion_share: float) -> float:
    """Factor by which prefix caching reduces work: `K / (1 + K G / P)`.

    It compares K prefills of the prompt with one prefill and K completions. The published formula
    counts completions only after the change, so it understates the saving, and it is below 1 for
    long completions. `kv_cache.group_tokens` counts them on both sides.

    Args:
        samples: samples K per prompt.
        completion_share: completion length divided by prompt length, G / P.

    Raises:
        UserError: if a number is out of range.
    """
    checks.whole(samples=samples)
    checks.not_negative(completion_share=completion_share)
    return samples / (1 + samples * completion_share)


def prefill_seconds(*, seconds_per_prompt: float, samples: int, cached: bool) -> float:
    """Time to prefill the prompt of a group.

    Args:
        seconds_per_prompt: time of one prefill.
        samples: samples per prompt.
        cached: the samples share one prefill.

    Raises:
        UserError: if a number is out of range.
    """
    checks.not_negative(seconds_per_prompt=seconds_per_prompt)
    checks.whole(samples=samples)
    return seconds_per_prompt * (1 if cached else samples)
