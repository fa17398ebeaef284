"""Verdicts of checks in words, and the report's view of them: shares by step, and examples."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..types import VERDICTS, Reward
from .numbers import percent
from .run_record import RunRecord
from .untrusted import one_line

PREFIX = "reward/verdict/"
ROWS = 12
"""Maximum number of steps in the table."""
EXAMPLES = 2
"""Maximum number of examples of one verdict."""
SHOWN_CHARACTERS = 600


@dataclass(frozen=True)
class Row:
    """Shares of one step, in words, in the order of the table's columns."""

    step: int
    shares: Sequence[str]


@dataclass(frozen=True)
class Example:
    """A completion with a verdict.

    Attributes:
        about: step, task and sample.
        why: detail of the verdict, or the error of the check.
    """

    verdict: str
    about: str
    why: str
    text: str


@dataclass(frozen=True)
class VerdictView:
    """Table of verdicts by step, and examples of those that are not "passed"."""

    names: Sequence[str]
    rows: Sequence[Row]
    examples: Sequence[Example]


def verdict_counts(rewards: Iterable[Reward | None]) -> dict[str, int]:
    """Number of rewards with each verdict, in the order of `VERDICTS`."""
    found = [reward.verdict for reward in rewards if reward and reward.verdict]
    return {name: found.count(name) for name in VERDICTS if name in found}


def verdict_line(counts: Mapping[str, int], total: int) -> str:
    """Shares in words, such as "passed 40%, timeout 10%". Empty without verdicts."""
    return ", ".join(f"{name} {percent(count / total, 0)}" for name, count in counts.items())


def verdict_view(run: RunRecord) -> VerdictView | None:
    """Verdicts of a run. None if its rewards give plain numbers and no check failed."""
    names = [name for name in VERDICTS if run.series(PREFIX + name)]
    if not names:
        return None
    chosen = _spread(run.metrics)
    rows = [
        Row(int(record["step"]), [_share(record.get(PREFIX + name, 0.0)) for name in names])
        for record in chosen
    ]
    return VerdictView(names, rows, _examples(run))


def _spread(records: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """At most ROWS records with equal distances, the first and the last included."""
    if len(records) <= ROWS:
        return list(records)
    return [records[round(i * (len(records) - 1) / (ROWS - 1))] for i in range(ROWS)]


def _share(value: object) -> str:
    return percent(value) if isinstance(value, float | int) else "—"


def _examples(run: RunRecord) -> list[Example]:
    """The latest examples of each verdict in the dumps that the report reads."""
    found: dict[str, list[Example]] = {name: [] for name in VERDICTS if name != "passed"}
    for step, records in reversed(run.dumps):
        for record in records:
            reward = record.get("reward") or {}
            verdict = reward.get("verdict")
            if verdict in found and len(found[verdict]) < EXAMPLES:
                found[verdict].append(_example(step, record, reward))
    return [example for examples in found.values() for example in examples]


def _example(step: int, record: Mapping[str, Any], reward: Mapping[str, Any]) -> Example:
    task, sample = one_line(str(record.get("task_id", "")), 60), record.get("sample", "?")
    text = str(record.get("text", ""))
    start = "… " if len(text) > SHOWN_CHARACTERS else ""
    return Example(
        str(reward["verdict"]),
        f"step {step}, task {task}, sample {sample}",
        str(reward.get("error") or reward.get("detail") or ""),
        start + text[-SHOWN_CHARACTERS:],
    )
