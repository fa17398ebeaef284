"""A side of a benchmark: a program in a process of its own, whose output lines are JSON objects
with `event` first. Other lines are ignored.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from typing import Any


def emit(event: str, **fields: Any) -> None:
    """Print one line of a side's output."""
    print(json.dumps({"event": event, **fields}), flush=True)


def run_side(
    command: list[str], name: str, threads: int, environment: Mapping[str, str] | None = None
) -> list[dict[str, Any]]:
    """Run a side; its output lines, parsed. One that fails ends the benchmark with its last words,
    under `name`.
    """
    settings = {
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **(environment or {}),
    }
    done = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stderr[-4000:]}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"event"')]
