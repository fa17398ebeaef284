"""Held-out completions of the same prompts before and after training: `samples.json`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ..errors import UserError
from ..files.durable import write_text_atomic


@dataclass(frozen=True)
class Sample:
    """One completion of a held-out prompt.

    Attributes:
        reward: None if the check failed.
        solved: see `environment.solved`.
        verdict: how its check ended. None if it was not recorded.
    """

    prompt: str
    answer: str
    completion: str
    reward: float | None
    solved: bool | None = None
    verdict: str | None = None


def write_samples(path: Path, before: Sequence[Sample], after: Sequence[Sample]) -> None:
    """Write `RunFolder.samples` atomically."""
    record = {
        "before": [asdict(sample) for sample in before],
        "after": [asdict(sample) for sample in after],
    }
    # ASCII: a dataset may contain lone surrogates, which UTF-8 cannot encode.
    write_text_atomic(path, json.dumps(record, indent=1))


def read_samples(path: Path) -> tuple[list[Sample], list[Sample]]:
    """Samples before and after training.

    Raises:
        UserError: if the file was not written by `write_samples`.
    """
    try:
        record = json.loads(path.read_bytes())
        before, after = (
            [_sample(entry) for entry in record.get(key, [])] for key in ("before", "after")
        )
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise UserError(
            f"{path} is not a samples file: expected 'before' and 'after' with prompt, answer,"
            " completion, reward"
        ) from error
    return before, after


def pair(
    before: Sequence[Sample], after: Sequence[Sample]
) -> list[tuple[Sample | None, Sample | None]]:
    """Rows of a before/after table, one per prompt.

    The order is that of `after`, then prompts that are only in `before`.
    """
    earlier = {sample.prompt: sample for sample in before}
    later = {sample.prompt for sample in after}
    rows: list[tuple[Sample | None, Sample | None]] = [
        (earlier.get(sample.prompt), sample) for sample in after
    ]
    return rows + [(sample, None) for sample in before if sample.prompt not in later]


def _sample(entry: dict[str, object]) -> Sample:
    reward, solved, verdict = (entry.get(name) for name in ("reward", "solved", "verdict"))
    return Sample(
        prompt=str(entry["prompt"]),
        answer=str(entry.get("answer", "")),
        completion=str(entry["completion"]),
        reward=None if reward is None else float(str(reward)),
        solved=solved if isinstance(solved, bool) else None,
        verdict=verdict if isinstance(verdict, str) else None,
    )
