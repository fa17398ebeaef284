"""Trajectories made from a mask, for tests whose episodes have observations."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from sixfold.types import Trajectory, Turn


def turns_of(provenance: str) -> tuple[Turn, ...]:
    """One turn for each run of sampled tokens."""
    turns, start = [], 0
    for letter, run in groupby(provenance):
        stop = start + len(list(run))
        if letter == "s":
            turns.append(Turn(start, stop))
        start = stop
    return tuple(turns)


def from_mask(
    task_id: str,
    sample: int,
    tokens: Sequence[int],
    prompt: int,
    mask: Sequence[bool],
    **fields: Any,
) -> Trajectory:
    """Trajectory whose tokens after the prompt are sampled or observed, as `mask` says.

    Args:
        task_id: id of the task.
        sample: index of the sample.
        tokens: [T].
        prompt: number of prompt tokens.
        mask: [T].
        fields: other fields. `logp` is 0 and `version` is 0 at sampled tokens by default.
    """
    assert not any(mask[:prompt])
    provenance = "p" * prompt + "".join("s" if m else "o" for m in mask[prompt:])
    fields = {
        "logp": [0.0] * len(tokens),
        "version": [0 if m else -1 for m in mask],
        "turns": turns_of(provenance),
    } | fields
    return Trajectory(task_id, sample, list(tokens), provenance, **fields)
