"""Top of the report: facts about the run, how it ended, the final figures, and the notes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, TypeGuard

from .adapter import adapter_of, table
from .notes import Note
from .numbers import clock, number, p_value, percent, percent_range, points
from .run_record import Interval, RunRecord

_NONE = "—"


@dataclass(frozen=True)
class Fact:
    """One fact about the run."""

    name: str
    text: str


@dataclass(frozen=True)
class Header:
    """Name of the run, and the facts below it."""

    name: str
    facts: Sequence[Fact]


@dataclass(frozen=True)
class Tile:
    """A final figure with its name and a remark."""

    name: str
    value: str
    note: str


@dataclass(frozen=True)
class HeldOut:
    """Share of held-out tasks solved before and after training, in words.

    Attributes:
        rule: rule by which a completion counts as solved. Empty if not recorded.
        before: share before RL.
        after: share after RL.
        note: intervals, weight versions and number of tasks.
    """

    rule: str
    before: str
    after: str
    note: str


@dataclass(frozen=True)
class ShownNote:
    """A note with the steps at which it was made."""

    when: str
    text: str


def header(run: RunRecord) -> Header:
    """Model, adapter, task, algorithm, start and end of a run.

    A fact that is not recorded is left out.
    """
    found = {
        "model": _model(table(run.recipe, "model")),
        "adapter": adapter_of(run.path, run.recipe),
        "task": _task(table(run.recipe, "data")),
        "algorithm": _algorithm(run),
        "started": _text(run.environment.get("started"))[:16].replace("T", " "),
        "ended": _how_it_ended(run),
    }
    return Header(run.name, [Fact(name, text) for name, text in found.items() if text])


def _algorithm(run: RunRecord) -> str:
    """Name of the algorithm. "" for stages without sampling, which do not use the recipe's."""
    sampled = not run.metrics or run.series("reward/mean")
    return _text(table(run.recipe, "algorithm").get("name")) if sampled else ""


def heldout(run: RunRecord) -> HeldOut:
    """Held-out result before and after RL."""
    before, after = run.heldout(0, "heldout_after_sft"), run.heldout(-1, "heldout_after")
    notes = [f"95% intervals {_ends(before)} → {_ends(after)}"]
    versions = [e.version for e in (before, after) if e and e.version is not None]
    if len(versions) == 2:
        notes.append(f"weights version {versions[0]} → version {versions[1]}")
    if isinstance(tasks := run.summary.get("heldout_tasks"), int):
        notes.append(f"{tasks} tasks")
    rule = _text(run.summary.get("heldout_metric"))
    return HeldOut(rule, _share(before), _share(after), ", ".join(notes))


def tiles(run: RunRecord) -> list[Tile]:
    """The other final figures. A figure that was not measured is left out."""
    return [tile for tile in (_difference(run), _best(run), _reward(run), *_progress(run)) if tile]


def warnings(run: RunRecord) -> list[ShownNote]:
    """Warnings of the run and of its pre-flight. Repeated alarms are shown once.

    The summary of an earlier release may have a warning that is not in the notes.
    """
    notes = [note for note in run.notes if note.warning]
    warning = table(run.summary, "preflight").get("warning")
    if isinstance(warning, str) and warning and not any(warning in note.text for note in notes):
        notes.insert(0, Note(0, f"pre-flight: {warning}", True))
    return _merge(notes)


def other_notes(run: RunRecord) -> list[ShownNote]:
    """Notes of the run that are not warnings."""
    return _merge([note for note in run.notes if not note.warning])


def _model(section: Mapping[str, Any]) -> str:
    if path := _text(section.get("path")):
        return path
    scratch = table(section, "scratch")
    if not scratch:
        return ""
    sizes = f"{scratch.get('layers', '?')} layers, hidden size {scratch.get('hidden_size', '?')}"
    return f"from scratch ({sizes})"


def _task(section: Mapping[str, Any]) -> str:
    sources = section.get("sources")
    names = [
        _text(source.get("name")) or _text(source.get("source"))
        for source in (sources if isinstance(sources, list) else ())
        if isinstance(source, Mapping)
    ]
    return ", ".join(filter(None, names)) or _text(section.get("source"))


def _how_it_ended(run: RunRecord) -> str:
    """Why the run ended, or how far it has come."""
    ended = run.summary.get("ended")
    text = ended.get("text") if isinstance(ended, Mapping) else ended
    if isinstance(text, str) and text:
        return text
    if run.summary:
        return "" if run.metrics else "after SFT, without RL"
    return f"not finished: step {run.steps[-1] if run.steps else 0} of {_steps_planned(run)}"


def _difference(run: RunRecord) -> Tile | None:
    """Paired difference of the held-out tasks solved, after minus before."""
    found = table(run.summary, "heldout_difference")
    mean, ends, p = found.get("mean"), found.get("interval"), found.get("p_value")
    if not (_is_number(mean) and _is_number(p) and isinstance(ends, list) and len(ends) == 2):
        return None
    low, high = ends
    if not (_is_number(low) and _is_number(high)):
        return None
    note = f"95% interval {points(low)} to {points(high)}, {p_value(p)} (paired test)"
    return Tile("difference", f"{points(mean)} points", note)


def _best(run: RunRecord) -> Tile | None:
    """Tile of the checkpoint with the best held-out accuracy. None without one."""
    found = table(run.summary, "best_checkpoint")
    accuracy, path = found.get("heldout/accuracy"), _text(found.get("checkpoint"))
    if not (_is_number(accuracy) and path):
        return None
    return Tile("best evaluation", percent(accuracy), path)


def _reward(run: RunRecord) -> Tile | None:
    average = [(step, value) for step, value in run.series("reward/ema") if value is not None]
    if not average:
        return None
    (first, before), (last, after) = average[0], average[-1]
    change = f"{number(before)} → {number(after)}"
    return Tile("reward", change, f"moving average, step {first} → step {last}")


def _progress(run: RunRecord) -> list[Tile]:
    steps = run.steps[-1] if run.steps else 0
    skipped = sum(value or 0 for _, value in run.series("train/skipped"))
    warm_up = run.summary.get("sft_steps")
    remarks = [f"of {_steps_planned(run)} planned"]
    remarks += [f"after {warm_up} steps of SFT"] if isinstance(warm_up, int) and warm_up else []
    remarks += [f"{skipped:g} skipped"] if skipped else []
    seconds = sum(value or 0 for _, value in run.series("time/total_s"))
    whole = run.summary.get("seconds")
    per_step = f"{number(seconds / len(run.metrics))} s per step" if run.metrics else "no step yet"
    tokens = sum(value or 0 for _, value in run.series("rollout/tokens"))
    sampling = sum(value or 0 for _, value in run.series("time/rollout_s"))
    speed = number(tokens / sampling) if sampling else _NONE
    return [
        Tile("steps", str(steps), ", ".join(remarks)),
        Tile(
            "time",
            clock(whole if _is_number(whole) else seconds),
            f"{clock(seconds)} in steps, {per_step}",
        ),
        Tile("tokens per second", speed, f"{number(tokens)} tokens sampled"),
        *_version(run),
    ]


def _version(run: RunRecord) -> list[Tile]:
    release = table(run.environment, "packages").get("sixfold")
    release = release or table(run.summary, "versions").get("sixfold")
    revision = _text(run.environment.get("git_revision"))
    short = revision[:9] + ("-dirty" if revision.endswith("-dirty") else "")
    if not (release or short):
        return []
    return [Tile("sixfold", _text(release) or _NONE, f"revision {short or 'unknown'}")]


def _merge(notes: Sequence[Note]) -> list[ShownNote]:
    """One line for all notes that differ only in their figures, in order of the first."""
    alike: dict[str, list[Note]] = {}
    for note in notes:
        alike.setdefault(re.sub(r"[\d.e+%-]+", "", note.text), []).append(note)
    return [ShownNote(_when(same), same[0].text) for same in alike.values()]


def _when(notes: Sequence[Note]) -> str:
    """`step 35`, and how often the same note was repeated later."""
    first = f"step {notes[0].step}" if notes[0].step else "before step 1"
    return first if len(notes) == 1 else f"{first}, then {len(notes) - 1} more"


def _share(interval: Interval | None) -> str:
    return _NONE if interval is None else percent(interval.value)


def _ends(interval: Interval | None) -> str:
    if interval is None or interval.low is None or interval.high is None:
        return _NONE
    return percent_range(interval.low, interval.high)


def _steps_planned(run: RunRecord) -> str:
    return "?" if run.steps_planned is None else str(run.steps_planned)


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, float | int) and not isinstance(value, bool) and isfinite(value)
