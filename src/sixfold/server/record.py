"""Record of exchanges as trajectories, with one JSON line per completion.

With a record, the completions of an agent that only knows a base_url can be used for training. A
line is `Trajectory.to_record()` plus fields of the request. Only the engine's thread writes. A line
is passed to the operating system before the client sees the answer.
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
    """Appends lines to `FOLDER/exchanges-TIME-PID.jsonl`, one file per server process.

    Raises:
        UserError: the folder or the file cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / f"exchanges-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.jsonl"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file: BinaryIO = self.path.open("ab")
        except OSError as error:
            raise UserError(f"--record {folder}: cannot be written ({error.strerror})") from error

    def write(self, trajectory: Trajectory, asked: Mapping[str, Any]) -> None:
        """Append one line.

        Args:
            trajectory: the exchange.
            asked: further fields of the line.

        Raises:
            OSError: the file cannot be written.
            ValueError: a number is NaN or infinite.
        """
        self._file.write(
            json.dumps(trajectory.to_record() | dict(asked), allow_nan=False).encode() + b"\n"
        )
        self._file.flush()

    def close(self) -> None:
        """Write everything to the disk and close the file."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()


def read_trajectories(path: Path) -> list[Trajectory]:
    """Read the trajectories of a record that can be used for training.

    Three kinds of lines are left out:

    - Aborted completions, whose ends the client caused.
    - Completions with penalties or a grammar. The trainer cannot compute log-probs under that
      sampling distribution.
    - A last line that is incomplete because the server was killed.
    """
    lines = path.read_bytes().split(b"\n")[:-1]
    records = [json.loads(line) for line in lines]
    trajectories = [
        Trajectory.from_record(record) for record in records if record.get("trainable", True)
    ]
    return [t for t in trajectories if t.finish_reason != "aborted"]
