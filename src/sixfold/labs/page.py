"""HTML pages with controls: one file with sliders, without network access.

A browser cannot run a lab, so the page holds outcomes: for each control, the outcomes over its
values, with the other controls as given. The page of `sixfold plan` holds outcomes for every
combination of values (`combinations`). The content security policy admits only the page's own
script, by its hash.
"""

from __future__ import annotations

import base64
import hashlib
import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from markupsafe import Markup

from ..files.durable import check_target, write_text_atomic
from ..report.page import render_page
from ..report.untrusted import visible
from .combinations import Combinations, Json, combined, packed
from .lab import Bars, Chart, Control, Figure, Lab, Outcome, Setting
from .text import shown, written

MOST_POINTS = 120
"""Points of a curve on the page; longer curves are thinned."""

Tables = dict[str, int]
"""Tables of a page as JSON, with the position of each."""


@dataclass(frozen=True)
class ControlPage:
    """What a page with controls shows.

    Attributes:
        name: title of the browser's tab.
        title: heading.
        about: text below the heading.
        controls: inputs, in the order to show them.
        run: outcome for a value of every control, given as keywords.
        command: the command that prints the outcome for a value of every control.
        general: the command for any combination of values.
        ending: heading and text of the last section.
        combinations: makes all controls combine. None: one control moves at a time.
    """

    name: str
    title: str
    about: str
    controls: tuple[Control, ...]
    run: Callable[..., Outcome]
    command: Callable[[Mapping[str, Setting]], str]
    general: str
    ending: tuple[str, str]
    combinations: Combinations | None = None


def write_page(lab: Lab, settings: Mapping[str, Setting], path: Path) -> None:
    """Write the page of the lab to `path`.

    Args:
        lab: the lab.
        settings: a value for every control, from `Lab.settings`.
        path: file to write.

    Raises:
        UserError: if `path` is a folder, or its folder does not exist.
    """
    write_controls(page_of(lab), settings, path)


def write_controls(page: ControlPage, settings: Mapping[str, Setting], path: Path) -> None:
    """Write a page to `path`.

    Args:
        page: what the page shows.
        settings: a value for every control.
        path: file to write.

    Raises:
        UserError: if `path` is a folder, or its folder does not exist.
    """
    check_target(path)
    write_text_atomic(path, render_controls(page, settings))


def page_of(lab: Lab) -> ControlPage:
    """What the page of a lab shows."""
    words = [f"{control.option} VALUE" for control in lab.controls]
    return ControlPage(
        name=lab.name,
        title=lab.title,
        about=lab.about,
        controls=lab.controls,
        run=lab.run,
        command=lambda settings: _command(lab, settings),
        general=" ".join(["sixfold lab", lab.name, *words]),
        ending=("When it fails", lab.breaking.why),
    )


def _command(lab: Lab, settings: Mapping[str, Setting]) -> str:
    """Command that prints the outcome; controls at their defaults are left out."""
    words = [
        f"{control.option}={written(value)}"
        if str(value).startswith("-")
        else f"{control.option} {shlex.quote(written(value))}"
        for control in lab.controls
        if (value := settings[control.name]) != control.default
    ]
    return " ".join(["sixfold lab", lab.name, *words])


def render_controls(page: ControlPage, settings: Mapping[str, Setting]) -> str:
    """The page as a string. `settings` has a value for every control."""
    script = resources.files("sixfold.report").joinpath("templates/controls.js").read_text("utf-8")
    moving = [control for control in page.controls if len(_values(control, settings)) > 1]
    outcome = page.run(**settings)
    return render_page(
        "controls.html",
        page=page,
        fixed=[(c, written(settings[c.name])) for c in page.controls if c not in moving],
        moving=[
            (c, [written(value) for value in _values(c, settings)], _place(c, settings))
            for c in moving
        ],
        outcome=_outcome(outcome, None),
        command=page.command(settings),
        data=_embedded(page, moving, settings),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


def _embedded(page: ControlPage, moving: list[Control], settings: Mapping[str, Setting]) -> Markup:
    """What the script reads: outcomes, and every distinct table once.

    Outcomes of all combinations are packed. In plain JSON `<` is escaped, so that the text cannot
    close its element.
    """
    tables: Tables = {}
    data: Json
    if page.combinations is None:
        data = {
            "usual": _outcome(page.run(**settings), tables),
            "command": page.command(settings),
            "controls": [_sweep(page, control, settings, tables) for control in moving],
        }
    else:
        positions = [(control, _values(control, settings)) for control in moving]
        shown = [[written(value) for value in values] for _, values in positions]
        places = [_place(control, settings) for control in moving]
        data = {
            "controls": [{"at": a, "shown": s} for a, s in zip(places, shown, strict=True)],
            **combined(
                page.combinations, positions, settings, lambda found: _outcome(found, tables)
            ),
        }
    text = _json({**data, "tables": [json.loads(table) for table in tables]})
    if page.combinations is not None:
        return Markup(packed(text))
    return Markup(text.replace("<", "\\u003c"))


def _values(control: Control, settings: Mapping[str, Setting]) -> list[Setting]:
    """Values of the control on the page, with the given one among them."""
    values = set(control.swept()) | {settings[control.name]}
    if not control.sweep and control.sweep is not None:
        return [settings[control.name]]
    if control.numeric:
        return sorted(values)
    order = [*control.swept(), settings[control.name]]
    return [value for index, value in enumerate(order) if value not in order[:index]]


def _place(control: Control, settings: Mapping[str, Setting]) -> int:
    return _values(control, settings).index(settings[control.name])


def _sweep(
    page: ControlPage, control: Control, settings: Mapping[str, Setting], tables: Tables
) -> Json:
    """Outcomes over the values of one control. None stands for the usual outcome."""
    at = _place(control, settings)
    values = _values(control, settings)
    states = [{**settings, control.name: value} for value in values]
    return {
        "at": at,
        "shown": [written(value) for value in values],
        "commands": [page.command(state) for state in states],
        "outcomes": [
            None if index == at else _outcome(page.run(**state), tables)
            for index, state in enumerate(states)
        ],
    }


def _outcome(outcome: Outcome, tables: Tables | None) -> Json:
    """An outcome with its values as they are shown.

    Args:
        outcome: the outcome.
        tables: tables of the page, which this outcome adds to. The outcome then has their
            positions. None: it has the tables.
    """
    own: list[Json] = [
        {
            "title": table.title,
            "columns": list(table.columns),
            "rows": [[shown(cell) for cell in row] for row in table.rows],
        }
        for table in outcome.tables
    ]
    places = None if tables is None else [tables.setdefault(_json(t), len(tables)) for t in own]
    return {
        "values": [[name.replace("_", " "), shown(v)] for name, v in outcome.values.items()],
        "tables": own if places is None else places,
        "figures": [_figure(figure) for figure in outcome.figures],
        "lines": [visible(line) for line in outcome.lines],
    }


def _figure(figure: Figure) -> Json:
    if isinstance(figure, Chart):
        return {
            "kind": "chart",
            "title": figure.title,
            "x": figure.x,
            "y": figure.y,
            "curves": [
                {"label": curve.label, "points": _thinned(curve.points)} for curve in figure.curves
            ],
        }
    if isinstance(figure, Bars):
        values = [_rounded(value) for value in figure.values]
        names = [visible(label) for label in figure.labels]
        return {
            "kind": "bars",
            "title": figure.title,
            "y": figure.y,
            "labels": names,
            "values": values,
            "shown": [shown(value) for value in figure.values],
        }
    return {
        "kind": "timeline",
        "title": figure.title,
        "x": figure.x,
        "spans": [[s.row, _rounded(s.start), _rounded(s.end), s.kind] for s in figure.spans],
    }


def _thinned(points: Sequence[tuple[float, float | None]]) -> list[list[float | None]]:
    """At most about MOST_POINTS points, with the first and the last."""
    stride = max(1, -(-len(points) // MOST_POINTS))
    kept = [*points[:-1:stride], *points[-1:]]
    return [[_rounded(x), None if y is None else _rounded(y)] for x, y in kept]


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")


def _json(data: Json) -> str:
    return json.dumps(data, allow_nan=False, separators=(",", ":"))
