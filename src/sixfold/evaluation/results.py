"""Files that `sixfold eval` writes: results.json and all completions. Does not import torch.

DIR/evaluations/NAME-001/
  results.json             settings, figures of each checkpoint, comparisons
  completions-1.jsonl      one line per sample of the first checkpoint, -2 of the second, ...
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..files.durable import disk_errors, write_bytes_atomic, write_json_atomic
from ..types import Group


def check_out(out: Path | None) -> None:
    """Check the output folder before anything is computed.

    Raises:
        UserError: if `out` exists and is not an empty folder.
    """
    if out is None:
        return
    with disk_errors(f"cannot write {out}"):
        taken = out.exists() and (not out.is_dir() or any(out.iterdir()))
    if taken:
        raise UserError(
            f"--out {out}: it exists and is not an empty folder; name another one, or remove it"
        )


def make_out(out: Path | None, directory: Path, name: str) -> Path:
    """Create the folder for the results.

    Args:
        out: the user's choice, or None.
        directory: `run.dir`. Without a choice, the next free `evaluations/NAME-001` in it is used.
        name: `run.name`.
    """
    with disk_errors(f"cannot write {out or directory}"):
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            return out
        for number in count(1):
            folder = directory / "evaluations" / f"{name}-{number:03d}"
            try:
                folder.mkdir(parents=True)
            except FileExistsError:  # an earlier evaluation, or another process at the same time
                continue
            return folder
    raise AssertionError("count() does not end")


def write_results(
    folder: Path, results: Mapping[str, Any], groups: Sequence[Sequence[Group]]
) -> Path:
    """Write the completions of each checkpoint and, last, results.json.

    Returns:
        Path of results.json.
    """
    for number, of_checkpoint in enumerate(groups, start=1):
        lines = [json.dumps(line, default=str) for line in _completions(of_checkpoint)]
        write_bytes_atomic(
            folder / completions_file(number), "".join(f"{line}\n" for line in lines).encode()
        )
    path = folder / "results.json"
    write_json_atomic(path, dict(results))
    return path


def completions_file(number: int) -> str:
    """File name for the completions of checkpoint `number` (starting at 1)."""
    return f"completions-{number}.jsonl"


def _completions(groups: Sequence[Group]) -> list[dict[str, Any]]:
    return [
        {
            "task_id": group.task.id,
            "sample": t.sample,
            "prompt": group.task.prompt_text,
            "answer": group.task.answer,
            "completion": t.text,
            "tokens": t.sampled_length,
            "finish_reason": t.finish_reason,
            "reward": t.reward.value if t.reward else None,
            "score": t.reward.score if t.reward else None,
            "solved": t.reward.solved if t.reward else None,
            "parts": dict(t.reward.parts) if t.reward else {},
            "error": t.reward.error if t.reward else None,
            "verdict": t.reward.verdict if t.reward else None,
            "detail": t.reward.detail if t.reward else "",
            "isolation": t.reward.isolation if t.reward else "",
        }
        for group in groups
        for t in group.trajectories
    ]
