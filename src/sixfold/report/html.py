"""`report.html`: one file that shows a run, without scripts, network access or external assets.

All text from a model, a dataset, a recipe or an exception passes through `escape`. The content
security policy blocks whatever might still get through.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..run.durable import write_text_atomic
from ..types import LOG_RATIO_EDGES
from .marks import DOTS, mark
from .notes import Note
from .numbers import clock, number, percent, percent_range
from .run_record import Interval, RunRecord, read_run, series
from .samples import Sample, pair
from .schema import METRICS, ROLES, find, role_seconds
from .style import STYLE
from .svg import Line, area_chart, histogram, line_chart
from .token_view import LEGEND, trajectories
from .untrusted import escape

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
_MISSING = '<p class="remark">not recorded</p>'


def write_report(run_dir: Path) -> Path:
    """Write RUN/report.html from the files in the folder, and return its path.

    Raises:
        UserError: if `run_dir` is not a run.
    """
    path = run_dir / "report.html"
    write_text_atomic(path, render(read_run(run_dir)))
    return path


def render(run: RunRecord) -> str:
    """The page as a string."""
    sections = {
        "Curves": _curves(run),
        "Time": _time(run),
        "Samples": _samples(run.before, run.after),
        "Trajectories": _trajectories(run),
        "Metrics": _metrics(run),
        "Recipe": (
            f'<div class="card"><pre>{escape(run.recipe_text)}</pre></div>'
            if run.recipe_text
            else _MISSING
        ),
        "Environment": _facts(
            {**run.environment, **{f"summary.{key}": value for key, value in run.summary.items()}}
        ),
    }
    links = "".join(f'<a href="#{name.lower()}">{name}</a>' for name in sections)
    body = "".join(
        f'<section id="{name.lower()}"><h2>{name}</h2>{content}</section>'
        for name, content in sections.items()
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta'
        f' http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="referrer"'
        ' content="no-referrer">'
        f"<title>{escape(run.name)} · sixfold</title><style>{STYLE}</style></head><body><main>"
        f"<h1>{escape(run.name)}</h1><nav>{links}</nav>{_tiles(run)}{_notes(run)}{_problems(run)}{body}</main></body></html>\n"
    )


def _tiles(run: RunRecord) -> str:
    """The key figures at the top of the report."""
    before, after = run.heldout(0, "heldout_after_sft"), run.heldout(-1, "heldout_after")
    result = f'{_accuracy(before)} <span class="to">→</span> {_accuracy(after)}'
    metric = run.summary.get("heldout_metric")
    solved = f" ({escape(metric)})" if isinstance(metric, str) else ""
    measured = [
        f"version {e.version}" if e and e.version is not None else "" for e in (before, after)
    ]
    versions = f", {measured[0]} → {measured[1]}" if all(measured) else ""
    about = f"95% intervals {_ends(before)} → {_ends(after)}{versions}"
    tiles = [(f"held-out tasks solved{solved}, before → after training", result, about, " hero")]
    ema = [value for _, value in run.series("reward/ema") if value is not None]
    if ema:
        tiles.append(("reward (average)", number(ema[-1]), f"from {number(ema[0])}", ""))
    planned = "?" if run.steps_planned is None else str(run.steps_planned)
    skipped = sum(value or 0 for _, value in run.series("train/skipped"))
    note = f"of {planned} planned" + (f", {skipped:g} skipped" if skipped else "")
    if isinstance(ended := run.summary.get("ended"), str):
        note += f"; ended: {escape(ended)}"
    tiles.append(("steps", str(run.steps[-1] if run.steps else 0), note, ""))
    seconds = sum(value or 0 for _, value in run.series("time/total_s"))
    per_step = f"{seconds / len(run.metrics):.2f} s a step" if run.metrics else "no step yet"
    tiles.append(("time in steps", clock(seconds), per_step, ""))
    sampled = sum(value or 0 for _, value in run.series("rollout/tokens"))
    tiles.append(
        (
            "tokens sampled",
            number(sampled),
            f"{number(sampled / seconds)} a second" if seconds else "",
            "",
        )
    )
    shown = (
        f'<div class="tile{kind}"><i>{name}</i><b>{value}</b><i>{note}</i></div>'
        for name, value, note, kind in tiles
    )
    return f'<div class="tiles">{"".join(shown)}</div>'


def _accuracy(interval: Interval | None) -> str:
    return "—" if interval is None else percent(interval.value)


def _ends(interval: Interval | None) -> str:
    if interval is None or interval.low is None or interval.high is None:
        return "—"
    return percent_range(interval.low, interval.high)


def _notes(run: RunRecord) -> str:
    """Warnings of the run and of its pre-flight.

    The summary of an earlier release may have a warning that is not in the notes.
    """
    notes = [note for note in run.notes if note.warning]
    preflight = run.summary.get("preflight")
    warning = preflight.get("warning") if isinstance(preflight, Mapping) else None
    if isinstance(warning, str) and warning and not any(warning in note.text for note in notes):
        notes.insert(0, Note(0, f"pre-flight: {warning}", True))
    alike: dict[str, list[Note]] = {}
    for note in notes:  # a repeated alarm has different figures and the same words
        alike.setdefault(re.sub(r"[\d.e+%-]+", "", note.text), []).append(note)
    lines = "".join(
        f"<li><small>{_when(same)}</small> {escape(same[0].text)}</li>" for same in alike.values()
    )
    return (
        f'<div class="card notes"><b>Look at this first</b><ul>{lines}</ul></div>' if lines else ""
    )


def _when(notes: Sequence[Note]) -> str:
    """`step 35`, and how often the same note was repeated later."""
    first = f"step {notes[0].step}" if notes[0].step else "before step 1"
    return first if len(notes) == 1 else f"{first}, then {len(notes) - 1} more"


def _problems(run: RunRecord) -> str:
    lines = "".join(f"<li>{escape(problem)}</li>" for problem in run.problems)
    summary = f"<summary>{len(run.problems)} missing or unreadable</summary>"
    return f'<details class="problems">{summary}<ul>{lines}</ul></details>' if lines else ""


def _line(run: RunRecord, key: str, label: str, colour: int = 0, thin: bool = False) -> Line:
    return Line(label, run.series(key), colour, thin)


def _heldout_line(run: RunRecord) -> Line:
    """Curve of all evaluations, including the first (step 0) and the last."""
    found = run.evaluations()
    band = [(step, e.low, e.high) for step, e in found if e.low is not None and e.high is not None]
    return Line("held-out", [(step, e.value) for step, e in found], 2, dots=True, band=band)


def _curves(run: RunRecord) -> str:
    if not run.metrics:
        return _MISSING
    part_keys = sorted(
        {key for record in run.metrics for key in record if key.startswith("reward/part/")}
    )
    parts = [
        _line(run, key, key.removeprefix("reward/part/"), index % 9)
        for index, key in enumerate(part_keys)
    ]
    reward = [
        _line(run, "reward/mean", "mean", 6, thin=True),
        _line(run, "reward/ema", "moving average"),
    ]
    clip = [
        _line(run, "train/clipped_frac", "outside the band"),
        _line(run, "train/clip_active_frac", "gradient removed", 1),
    ]
    length = [
        _line(run, "rollout/length_mean", "mean"),
        _line(run, "rollout/length_max", "longest", 1, thin=True),
    ]
    speed = [_line(run, "rollout/tok_s", "rollout"), _line(run, "train/tok_s", "trainer", 1)]
    loss = [_line(run, "train/loss", "loss"), _line(run, "train/pg_loss", "policy gradient", 1)]
    mismatch = [
        _line(run, "mismatch/max_abs_logp", "max"),
        _line(run, "mismatch/mean_abs_logp", "mean", 1),
    ]
    waste = [
        _line(run, "group/degenerate_frac", "groups without spread"),
        _line(run, "rollout/truncated_frac", "completions cut", 1),
        _line(run, "reward/error_frac", "checks failed", 3),
    ]
    trained = "dynamic/solved_frac" if run.series("dynamic/solved_frac") else "reward/solved_frac"
    solved = [_line(run, trained, "training samples", 6, thin=True), _heldout_line(run)]
    by_source = [
        Line(name, points, index % 9, dots=True)
        for index, (name, points) in enumerate(run.sources().items())
    ]
    charts = [
        _figure("Reward", reward, line_chart(reward)),
        _figure("Tasks solved", solved, line_chart(solved, percent, limits=(0.0, 1.0))),
        (
            _figure(
                "Held-out tasks solved, by source",
                by_source,
                line_chart(by_source, percent, limits=(0.0, 1.0)),
            )
            if by_source
            else ""
        ),
        _figure("Parts of the reward", parts, line_chart(parts)) if parts else "",
        _figure("KL to the reference, nats", [], line_chart([_line(run, "train/kl", "KL")])),
        _figure("Entropy, nats", [], line_chart([_line(run, "train/entropy", "entropy", 2)])),
        _figure(
            "Gradient norm before clipping",
            [],
            line_chart([_line(run, "train/grad_norm", "norm", 3)]),
        ),
        _figure("Clipped tokens", clip, line_chart(clip, percent)),
        _figure("Log-ratio of the last step", [], histogram(_last_histogram(run), LOG_RATIO_EDGES)),
        _figure("Engine against trainer, |Δ log-prob|", mismatch, line_chart(mismatch, log=True)),
        _figure("Completion length, tokens", length, line_chart(length)),
        _figure("Lost to training", waste, line_chart(waste, percent)),
        _figure("Tokens per second", speed, line_chart(speed)),
        _figure("Loss", loss, line_chart(loss)),
        (
            _figure(
                "SFT warm-up, loss",
                [],
                line_chart([Line("loss", series(run.warm_up, "train/loss"), 4)]),
            )
            if run.warm_up
            else ""
        ),
        _figure(
            "Mean importance ratio", [], line_chart([_line(run, "train/ratio_mean", "ratio", 3)])
        ),
        _figure("Learning rate", [], line_chart([_line(run, "train/learning_rate", "rate", 6)])),
    ]
    return f'<div class="charts">{"".join(charts)}</div>'


def _figure(title: str, lines: Sequence[Line], chart: str) -> str:
    keys = "".join(
        f'<span class="key c{line.colour}">{escape(line.label)}</span>' for line in lines
    )
    return (
        f'<figure><figcaption>{title}<span class="keys">{keys}</span></figcaption>{chart}</figure>'
    )


def _last_histogram(run: RunRecord) -> list[float]:
    found = [
        record["train/ratio_hist"]
        for record in run.metrics
        if isinstance(record.get("train/ratio_hist"), list)
    ]
    return (
        [float(count) if isinstance(count, float | int) else 0.0 for count in found[-1]]
        if found
        else []
    )


def _time(run: RunRecord) -> str:
    """Time by role: shares over the whole run, and seconds per step."""
    per_step = [
        (step, role_seconds(record)) for step, record in zip(run.steps, run.metrics, strict=True)
    ]
    roles = [role for role in (*ROLES, "other") if any(role in seconds for _, seconds in per_step)]
    totals = {role: sum(seconds.get(role, 0.0) for _, seconds in per_step) for role in roles}
    whole = sum(totals.values())
    if not whole:
        return _MISSING
    colours = {role: index for index, role in enumerate((*ROLES, "other"))}
    bar = "".join(
        f'<span class="c{colours[role]}" style="flex-grow:{totals[role] / whole:.5f}"></span>'
        for role in roles
    )
    rows = "".join(
        f'<tr><td><span class="key c{colours[role]}">{role}</span></td><td'
        f' class="n">{percent(totals[role] / whole)}</td><td class="n">{totals[role]:.1f} s</td><td'
        f' class="n">{totals[role] / len(per_step):.3f} s</td></tr>'
        for role in roles
    )
    layers = [
        Line(role, [(step, seconds.get(role, 0.0)) for step, seconds in per_step], colours[role])
        for role in roles
    ]
    table = (
        '<table><tr><th>role</th><th class="n">share</th><th class="n">total</th><th class="n">a'
        f" step</th></tr>{rows}</table>"
    )
    left = (
        '<div class="card"><div'
        f' class="bar">{bar}</div>{table}'
        f"{_rollout_remark(totals.get('rollout', 0.0) / whole)}</div>"
    )
    return f'<div class="two">{left}{_figure("Seconds a step", [], area_chart(layers))}</div>'


def _rollout_remark(share: float) -> str:
    verdict = "within" if 0.60 <= share <= 0.75 else "outside"
    return (
        f'<p class="remark">Rollout takes {percent(share, 0)} of a step, {verdict} the 60–75% that'
        " is usual for large models on GPUs.</p>"
    )


def _samples(before: Sequence[Sample], after: Sequence[Sample]) -> str:
    rows = []
    for old, new in pair(before, after):
        known = new or old
        if known:
            head = f'<td class="text"><pre>{escape(known.prompt)}</pre></td>'
            head += f"<td><pre>{escape(known.answer)}</pre></td>"
            rows.append(f"<tr>{head}{_completion(old)}{_completion(new)}</tr>")
    if not rows:
        return _MISSING
    header = "<tr><th>held-out prompt</th><th>answer</th><th>before</th><th>after</th></tr>"
    return f'<div class="card scroll"><table>{header}{"".join(rows)}</table></div>'


def _completion(sample: Sample | None) -> str:
    if sample is None:
        return "<td>—</td>"
    found = mark(sample.reward, sample.solved)
    figure = "no reward" if sample.reward is None else f"reward {sample.reward:.3g}"
    dot = f'<span class="dot-{found}">{DOTS[found]} <small>{figure}</small></span>'
    return f'<td class="text">{dot}<pre>{escape(sample.completion)}</pre></td>'


def _trajectories(run: RunRecord) -> str:
    last = len(run.dumps) - 1
    shown = [
        trajectories(step, records, first_open=index == last)
        for index, (step, records) in enumerate(run.dumps)
    ]
    return LEGEND + "".join(shown) if shown else _MISSING


def _metrics(run: RunRecord) -> str:
    """Table of every logged key: last, minimum and maximum value, and meaning."""
    logged = {key for record in run.metrics for key in record} - {"step"}
    order = {metric.key: index for index, metric in enumerate(METRICS)}
    known = {key: find(key) for key in logged}
    rows = []
    for key in sorted(
        logged, key=lambda k: (order.get(metric.key, 0) if (metric := known[k]) else len(order), k)
    ):
        metric = known[key]
        values = [value for _, value in run.series(key) if value is not None]
        cells = (
            (number(v) for v in (values[-1], min(values), max(values)))
            if values
            else ("—", "—", "—")
        )
        about = (
            f"{escape(metric.meaning)} <small>{escape(metric.formula)}</small>"
            if metric
            else "not in the schema"
        )
        numbers = "".join(f'<td class="n">{cell}</td>' for cell in cells)
        rows.append(
            f"<tr><td><code>{escape(key)}</code></td>{numbers}"
            f"<td>{metric.unit if metric else ''}</td><td>{about}</td></tr>"
        )
    if not rows:
        return _MISSING
    header = (
        '<tr><th>key</th><th class="n">last</th><th class="n">min</th><th'
        ' class="n">max</th><th>unit</th><th>what it is</th></tr>'
    )
    return (
        f"<details><summary>{len(rows)} metrics</summary><div"
        f' class="scroll"><table>{header}{"".join(rows)}</table></div></details>'
    )


def _facts(record: Mapping[str, Any]) -> str:
    rows = "".join(
        f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in _flat(record)
    )
    return f'<div class="card scroll"><table>{rows}</table></div>' if rows else _MISSING


def _flat(record: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Nested objects with dotted names, in order."""
    pairs: list[tuple[str, Any]] = []
    for key, value in record.items():
        pairs += (
            _flat(value, f"{prefix}{key}.")
            if isinstance(value, Mapping)
            else [(f"{prefix}{key}", value)]
        )
    return pairs
