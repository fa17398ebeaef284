"""Dumps of all trajectories of a step, token by token: `rollouts/step-000123.jsonl.zst`.

They hold prompts, tokens, rewards and advantages.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import zstandard

from ..errors import UserError, one_line
from ..files.durable import disk_errors, write_bytes_atomic
from ..types import Group, Task, Trajectory

Advantage = float | Sequence[float]
"""One number for the whole completion, or one per token of the trajectory (T numbers)."""

_NAME = re.compile(r"step-(\d{6,})\.jsonl\.zst")


def dumped_steps(folder: Path) -> list[int]:
    """The steps with a dump in a run's rollouts folder, ascending."""
    matches = (_NAME.fullmatch(path.name) for path in folder.iterdir()) if folder.is_dir() else ()
    return sorted(int(match.group(1)) for match in matches if match)


def write_rollouts(
    path: Path,
    groups: Sequence[Group],
    advantages: Sequence[Sequence[Advantage]],
    decode: Callable[[int], str] | None = None,
    trained_version: int | None = None,
    reference_version: int | None = None,
) -> None:
    """Write the dump of one step atomically.

    Each line is `Trajectory.to_record()` plus prompt, answer, source, advantage, pieces and these:

    - `policy_version`: the oldest version that sampled a token. None if nothing was sampled.
    - `stale_by_versions`: `trained_version` minus `policy_version`.
    - `reference_version`.
    - `greedy`: record of the group's greedy baseline, in the first line of a group that has one.

    Args:
        path: `RunFolder.rollout_file(step)`. Its folder is created if another program deleted it.
        advantages: one per trajectory, in the shape of `groups`.
        decode: text of one token id. With it each line has `pieces`, the texts of its tokens.
        trained_version: version of the weights that the step began to train.
        reference_version: version of the policy that the reference is a copy of. None without a
            reference.

    Raises:
        UserError: if the disk cannot be written.
    """
    lines = []
    for group, of_group in zip(groups, advantages, strict=True):
        for trajectory, advantage in zip(group.trajectories, of_group, strict=True):
            more = _versions(trajectory, trained_version)
            more |= {"reference_version": reference_version}
            more |= {"advantage": advantage if isinstance(advantage, float | int) else [*advantage]}
            if group.greedy is not None and trajectory is group.trajectories[0]:
                more["greedy"] = group.greedy.to_record()
            if decode is not None:
                more["pieces"] = [decode(token) for token in trajectory.tokens]
            lines.append(_line(group.task, trajectory, more))
    with disk_errors(f"cannot write {path}"):
        path.parent.mkdir(exist_ok=True)
    write_bytes_atomic(path, zstandard.ZstdCompressor().compress(b"".join(lines)))


def read_rollouts(path: Path) -> list[dict[str, Any]]:
    """The records of a dump.

    Raises:
        UserError: if the file is missing, truncated or not a dump.
    """
    try:
        raw = _decompress(path.read_bytes())
        records = [json.loads(line) for line in raw.splitlines()]
    except FileNotFoundError as error:
        raise UserError(f"no rollout dump at {path}: see log.rollouts_every") from error
    except (zstandard.ZstdError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is not a readable rollout dump ({error}); delete it") from error
    for number, record in enumerate(records, start=1):
        _check(path, number, record)
    return records


def _decompress(data: bytes) -> bytes:
    """The content of all frames. A tool that compresses a stream does not write its size."""
    found = []
    while data:
        frame = zstandard.ZstdDecompressor().decompressobj()
        found.append(frame.decompress(data))
        if not frame.eof:
            raise zstandard.ZstdError("it is cut short")
        data = frame.unused_data
    if not found:
        raise zstandard.ZstdError("it is empty")
    return b"".join(found)


def _check(path: Path, number: int, record: Any) -> None:
    """Check a record, so that readers may index.

    Its streams must have one length, and its reward the known form.
    """
    try:
        trajectory = Trajectory.from_record(record)
        reward = trajectory.reward
        if reward and not all(isinstance(m, dict) for m in (reward.parts, reward.weights)):
            raise TypeError("reward.parts or reward.weights is not an object")
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise UserError(
            f"{path}, line {number} is not a trajectory ({one_line(error)}); delete the file"
        ) from error


def _versions(trajectory: Trajectory, trained: int | None) -> dict[str, Any]:
    sampled = [v for v, m in zip(trajectory.version, trajectory.mask, strict=True) if m]
    oldest = min(sampled, default=None)
    stale = None if oldest is None or trained is None else trained - oldest
    return {"policy_version": oldest, "stale_by_versions": stale}


def _line(task: Task, trajectory: Trajectory, more: Mapping[str, Any]) -> bytes:
    record = trajectory.to_record()
    record |= {"prompt": task.prompt_text, "answer": task.answer, "source": task.source, **more}
    try:
        text = json.dumps(record, allow_nan=False, default=str)
    except ValueError:
        # Write null for a NaN log-prob, so that the line stays JSON and the dump can be read.
        text = json.dumps(_without_nan(record), allow_nan=False, default=str)
    return text.encode() + b"\n"


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
