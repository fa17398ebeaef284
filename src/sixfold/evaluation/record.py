"""Stored form of an evaluation.

From it come the figures of summary.json, the samples of the report, and a line for the screen.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ..report.numbers import p_value, percent, percent_range, points
from ..report.samples import Sample
from ..types import VERDICTS, Reward, Task
from .evaluate import Evaluation
from .statistics import PairedTest, paired_test, task_means

SHOWN_SAMPLES = 8
_OTHER_ROWS = ("passed", "wrong_answer", "infrastructure_error")
"""Verdicts without a row: the rows of solved tasks and of failed checks show them."""


def record(evaluation: Evaluation) -> dict[str, Any]:
    """JSON form of an evaluation.

    It holds accuracy with its interval and by source, the share solved of each task, score,
    version, failed checks, verdicts, and the first samples.
    """
    mean, *ends = evaluation.interval
    score = evaluation.score
    return {
        "accuracy": mean,
        "interval": ends,
        "sources": evaluation.by_source,
        "values": task_means(evaluation.values),
        "score": score.mean if score else None,
        "version": evaluation.version,
        "tasks": len(evaluation.groups),
        "errors": evaluation.errors,
        "not_applicable": evaluation.not_applicable,
        "verdicts": evaluation.verdicts,
        "strict": evaluation.strict_share,
        "strict_gap": evaluation.strict_gap,
        "samples": [asdict(sample) for sample in _samples(evaluation)],
    }


def task_values(tasks: Sequence[Task], found: Mapping[str, Any]) -> dict[str, float]:
    """Share solved of each task of a record, by a key that the same task has in every run.

    Args:
        tasks: the held-out tasks, in the order of the evaluation.
    """
    values: dict[str, float] = {}
    seen: Counter[str] = Counter()
    for task, value in zip(tasks, found["values"], strict=True):
        text = json.dumps([task.prompt, task.answer, task.world], sort_keys=True, default=str)
        key = hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:16]
        seen[key] += 1  # a dataset may hold a task twice
        values[f"{key}-{seen[key]}"] = value
    return values


def summary_entries(name: str, found: Mapping[str, Any]) -> dict[str, object]:
    """Keys of summary.json for one evaluation.

    They are NAME, NAME_interval, NAME_sources, NAME_score, NAME_verdicts, NAME_strict,
    NAME_strict_gap and NAME_version.
    """
    return {
        name: found["accuracy"],
        f"{name}_interval": found["interval"],
        **({f"{name}_sources": found["sources"]} if found.get("sources") else {}),
        **({f"{name}_score": found["score"]} if found["score"] is not None else {}),
        **({f"{name}_verdicts": found["verdicts"]} if found.get("verdicts") else {}),
        **{
            f"{name}_{key}": found[key]
            for key in ("strict", "strict_gap")
            if found.get(key) is not None
        },
        f"{name}_version": found["version"],
    }


def compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> PairedTest | None:
    """Paired test of two records of the same tasks: `after` minus `before`.

    Returns:
        None if a record lacks the values of its tasks, as those of earlier releases do.
    """
    values = [list(found.get("values") or ()) for found in (after, before)]
    return paired_test(*values) if values[0] and len(values[0]) == len(values[1]) else None


def difference_entry(test: PairedTest) -> dict[str, object]:
    """`heldout_difference` of summary.json: mean and 95% interval of the difference, and p."""
    mean, *ends = test.difference
    return {
        "mean": mean,
        "interval": ends,
        "p_value": test.p_value,
        "test": test.test,
        "better": test.wins,
        "worse": test.losses,
    }


def final_rows(
    before: Mapping[str, Any], after: Mapping[str, Any], test: PairedTest | None
) -> list[tuple[str, str, str]]:
    """Rows (name, before, after) of the table on the screen."""
    records = (before, after)
    rows = [
        ("held-out solved", *(percent(found["accuracy"]) for found in records)),
        ("95% interval", *(percent_range(*found["interval"]) for found in records)),
    ]
    for name, share in (after.get("sources") or {}).items():
        earlier = (before.get("sources") or {}).get(name)
        rows.append((f"  {name}", "" if earlier is None else percent(earlier), percent(share)))
    if before["score"] is not None and after["score"] is not None and _has_partial_scores(*records):
        rows.append(("mean score", *(f"{found['score']:.3g}" for found in records)))
    if after.get("strict") is not None:
        shares = [record.get("strict") for record in records]
        shown_shares = ("" if share is None else percent(share) for share in shares)
        rows.append(("by the strict verifier", *shown_shares))
    if before["errors"] or after["errors"]:
        rows.append(("checks failed", *(str(found["errors"]) for found in records)))
    aside = [found.get("not_applicable", 0) for found in records]
    if any(aside):
        rows.append(("no reward applies", *map(str, aside)))
    counts = [faults(found.get("verdicts") or {}) for found in records]
    rows += [
        (name, *(str(one.get(name, 0)) for one in counts))
        for name in VERDICTS
        if any(name in one for one in counts)
    ]
    if test:
        low, high = (points(end) for end in test.difference[1:])
        difference = f"{points(test.difference.mean)} points ({low} to {high})"
        rows.append(("difference", "", f"{difference}, {p_value(test.p_value)}"))
    return [(name, old, new) for name, old, new in rows]


def _has_partial_scores(*records: Mapping[str, Any]) -> bool:
    """True if the mean score differs from the share solved."""
    return any(abs(found["score"] - found["accuracy"]) >= 5e-4 for found in records)


def shown(found: Mapping[str, Any]) -> str:
    """One line: share solved with its interval and by source, and the mean score if it differs."""
    low, high = found["interval"]
    text = f"{percent(found['accuracy'])} solved ({percent_range(low, high)})"
    if found.get("sources"):
        text += ": " + ", ".join(
            f"{name} {percent(share)}" for name, share in found["sources"].items()
        )
    if found["score"] is not None and abs(found["score"] - found["accuracy"]) >= 5e-4:
        text += f", mean score {found['score']:.3g}"
    if found.get("strict") is not None:
        text += f", {percent(found['strict'])} by the strict verifier"
    text += f", {found['errors']} checks failed" if found["errors"] else ""
    if aside := found.get("not_applicable"):
        text += f", no reward applies to {aside} samples"
    return text + "".join(
        f", {n} {name}" for name, n in faults(found.get("verdicts") or {}).items()
    )


def faults(verdicts: Mapping[str, int]) -> dict[str, int]:
    """Counts of the verdicts that no other figure shows: not passed, wrong or failed."""
    return {name: n for name, n in verdicts.items() if name not in _OTHER_ROWS}


def solved_if(rule: str) -> str:
    """The rule for solved as a sentence. rule: such as "math >= 1", or "reward >= 1" (the sum)."""
    return f"a completion counts as solved if reward {rule.removeprefix('reward ')}"


def samples(found: Mapping[str, Any]) -> list[Sample]:
    return [Sample(**sample) for sample in found.get("samples", [])]


def _samples(evaluation: Evaluation) -> list[Sample]:
    found = []
    for group in evaluation.groups[:SHOWN_SAMPLES]:
        first = group.trajectories[0]
        reward = first.reward or Reward(None)
        found.append(
            Sample(
                group.task.prompt_text,
                "" if group.task.answer is None else str(group.task.answer),
                first.text,
                reward.value,
                reward.solved,
                reward.verdict,
            )
        )
    return found
