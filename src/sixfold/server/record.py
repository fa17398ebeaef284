"""Exchanges as trajectories: one JSON line a completion, so that an agent that only knows a base_url can be trained on.

A line is `Trajectory.to_record()` with what was asked beside it. Only the engine's thread writes; a
line is on its way to the disk before the client sees the answer.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import UserError
from ..types import Trajectory


class Recorder:
    """Appends to `FOLDER/exchanges-TIME-PID.jsonl`; one file a server process."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / f"exchanges-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.jsonl"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file: BinaryIO = self.path.open("ab")
        except OSError as error:
            raise UserError(f"--record {folder}: cannot be written ({error.strerror})") from error

    def write(self, trajectory: Trajectory, asked: Mapping[str, Any]) -> None:
        """Append one line. Raises OSError if the disk refuses."""
        self._file.write(json.dumps(trajectory.to_record() | dict(asked), allow_nan=False).encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Bring everything to the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()


def read_trajectories(path: Path) -> list[Trajectory]:
    """The trajectories of a record that can be trained on.

    Left out are aborted ones, whose ends are the client's doing, and those sampled with penalties
    or under a grammar: their log-probs are of a distribution that no trainer follows. So is a last
    line that a kill cut short.
    """
    lines = path.read_bytes().split(b"\n")[:-1]
    records = [json.loads(line) for line in lines]
    trajectories = [Trajectory.from_record(record) for record in records if record.get("trainable", True)]
    return [t for t in trajectories if t.finish_reason != "aborted"]
