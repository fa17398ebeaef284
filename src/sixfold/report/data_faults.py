"""Six symptoms of faulty data in a finished or running run, each with its stage and a remedy.

The detectors read records of metrics.jsonl. Each compares the last WINDOW steps with earlier ones,
and says nothing if a figure is missing. Limits that a live alarm has too are those of the alarm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, variance
from typing import Any

from .alarms import RESIDUAL, STRICT_GAP
from .numbers import number, percent

WINDOW = 20
"""Steps per mean."""
CLEAR = 3.0
"""Standard errors above which a mean has changed."""
POOL_SOLVED = 0.95
"""Share of solved samples above which the tasks teach little."""
LONGER = 1.5
"""Growth of the mean length that needs a reason."""
COLLAPSED = 0.2
"""Share of the first entropy that is left in a collapsed policy."""
CEILING = 0.95
"""Held-out accuracy that counts as its ceiling."""
DEGENERATE = 0.4
"""Share of groups with equal rewards that a stall is due to. Dynamic sampling has `RESIDUAL`."""
GAP = 0.2
"""Held-out accuracy minus the share of solved training samples that greedy decoding and a smaller
held-out set do not explain.
"""

Records = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Symptom:
    """A symptom of faulty data.

    Attributes:
        looks_like: what is seen.
        find: function of the records that returns the evidence, or "" if there is none.
    """

    name: str
    looks_like: str
    stage: str
    remedy: str
    find: Callable[[Records], str]


@dataclass(frozen=True)
class Diagnosis:
    """A symptom, and the evidence for it in a run. "": none."""

    symptom: Symptom
    evidence: str


def diagnose(records: Records) -> list[Diagnosis]:
    """All six symptoms with the evidence for each, in the order of `SYMPTOMS`.

    Args:
        records: steps of a run, as in metrics.jsonl.
    """
    return [Diagnosis(symptom, symptom.find(records)) for symptom in SYMPTOMS]


def _pool_solved(records: Records) -> str:
    solved = _windows(records, *_SOLVED)
    if len(solved) < 2 or fmean(solved[-1]) < POOL_SOLVED:
        return ""
    return f"{percent(fmean(solved[-1]))} of the samples of the last {WINDOW} steps are solved"


def _length_explosion(records: Records) -> str:
    lengths = [fmean(window) for window in _windows(records, "rollout/length_mean")]
    for back, before in _earlier(lengths):
        if lengths[-1] >= LONGER * before and not _learned(records, back):
            return (
                f"completions have grown from {number(before)} to {number(lengths[-1])} tokens in"
                f" {back * WINDOW} steps, and no larger share is solved"
            )
    return ""


def _mode_collapse(records: Records) -> str:
    entropy = [fmean(window) for window in _windows(records, "train/entropy")]
    if _nearly_solved(records):
        return ""
    for back, before in _earlier(entropy):
        if entropy[-1] <= COLLAPSED * before and not _learned(records, back):
            return (
                f"the entropy has fallen from {number(before)} to {number(entropy[-1])} nats per"
                f" token in {back * WINDOW} steps, and no larger share is solved"
            )
    return ""


def _contamination(records: Records) -> str:
    accuracy = [value for _, value in _values(records, "heldout/accuracy")][-2:]
    solved = _windows(records, *_SOLVED)
    sorted_out = any("data/easy_frac" in record for record in records)  # solved tasks have left
    if len(accuracy) < 2 or len(solved) < 2 or sorted_out:
        return ""
    share = fmean(solved[-1])
    if min(accuracy) < CEILING or min(accuracy) - share < GAP:
        return ""
    return (
        f"the held-out set is at its ceiling ({percent(min(accuracy))}), but only"
        f" {percent(share)} of the training samples are solved"
    )


def _verifier_exploit(records: Records) -> str:
    gaps = [value for _, value in _values(records, "heldout/strict_gap")]
    if gaps and gaps[-1] > STRICT_GAP:
        return f"the strict verifier refuses {percent(gaps[-1])} of what the usual one accepts"
    fell = [step for step, value in _values(records, "heldout/diverged") if value]
    if fell:
        return f"held-out accuracy fell while the training reward rose (step {fell[-1]})"
    return ""


def _degenerate(records: Records) -> str:
    left = _windows(records, "dynamic/degenerate_frac")
    limit, when = (RESIDUAL, " after dynamic sampling") if left else (DEGENERATE, "")
    shares = left or _windows(records, "group/degenerate_frac")
    if len(shares) < 2 or _nearly_solved(records) or _learned(records, 1):
        return ""
    if (share := fmean(shares[-1])) <= limit:
        return ""
    return f"{percent(share)} of the groups have equal rewards{when}, and training stalls"


_SOLVED = ("dynamic/solved_frac", "reward/solved_frac")

SYMPTOMS = (
    Symptom(
        "pool solved",
        "the reward is flat, near its maximum",
        "5 stratify",
        "Measure the pass rates again (sixfold data with a stage stratify, or"
        " data.curriculum.every), and add harder tasks.",
        _pool_solved,
    ),
    Symptom(
        "length explosion",
        "completions get longer and longer, without being right more often",
        "6 mix",
        "A learned reward may pay for length: whiten per source (algorithm.whiten = 'source'),"
        " bound it (environment.reward_model.limit), or penalise long completions"
        " (algorithm.overlong_buffer).",
        _length_explosion,
    ),
    Symptom(
        "mode collapse",
        "the policy has one phrasing for everything",
        "8 recycle",
        "Mix other data into what is imitated, keep fewer solutions of one form, and use an"
        " entropy bonus (algorithm.entropy_target).",
        _mode_collapse,
    ),
    Symptom(
        "contamination",
        "the held-out set is at its ceiling while training tasks stay unsolved",
        "4 decontaminate",
        "Compare the held-out tasks with all data the model was trained on (sixfold data with a"
        " stage decontaminate), or evaluate on tasks that are newer than the model.",
        _contamination,
    ),
    Symptom(
        "verifier exploit",
        "the reward rises by answers that are not right",
        "3 feasibility",
        "Read solved samples in the report, test the verifier (sixfold audit), and watch a"
        " stricter one (eval.strict).",
        _verifier_exploit,
    ),
    Symptom(
        "degenerate groups",
        "training stalls: most groups are all right or all wrong",
        "7 online filter, then 5 stratify",
        "Filter groups (algorithm.dynamic_sampling), and sort the tasks by pass rate"
        " (data.curriculum.every).",
        _degenerate,
    ),
)
"""Symptoms in the order of the table in docs/curriculum.md."""


def _values(records: Records, *keys: str) -> list[tuple[int, float]]:
    """(step, value) of the first of the keys that has finite values."""
    for key in keys:
        found = [
            (int(record["step"]), float(value))
            for record in records
            if isinstance(value := record.get(key), int | float) and math.isfinite(value)
        ]
        if found:
            return found
    return []


def _windows(records: Records, *keys: str) -> list[list[float]]:
    """Values in windows of WINDOW steps, the newest last. Older ones that fill none are left."""
    values = [value for _, value in _values(records, *keys)]
    return [values[i : i + WINDOW] for i in range(len(values) % WINDOW, len(values), WINDOW)]


def _earlier(means: Sequence[float]) -> list[tuple[int, float]]:
    """(windows back from the last, mean) of each window before the last."""
    return [(back, means[-1 - back]) for back in range(1, len(means))]


def _nearly_solved(records: Records) -> bool:
    solved = _windows(records, *_SOLVED)
    return bool(solved) and fmean(solved[-1]) >= POOL_SOLVED


def _learned(records: Records, back: int) -> bool:
    """True if a clearly larger share is solved than in the window so many windows before."""
    solved = _windows(records, *_SOLVED)
    if len(solved) <= back:
        return False
    before, now = solved[-1 - back], solved[-1]
    error = math.sqrt((variance(before) + variance(now)) / WINDOW)
    return fmean(now) - fmean(before) > CLEAR * error
