"""HTML pages with controls: one file with sliders, without network access.

A browser cannot run a lab, so the page holds outcomes for every combination of positions of its
controls (`combinations`). If these are too many, numbers have fewer positions. The content security
policy admits only the page's own script, by its hash.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from markupsafe import Markup

from ..files.durable import check_target, write_text_atomic
from ..report.page import render_page
from ..report.untrusted import visible
from .combinations import Combinations, Json, Part, Positions, Words, combined, packed
from .lab import Bars, Chart, Control, Figure, Lab, Outcome, Setting
from .text import shown, written

MOST_POINTS = 120
"""Points of a curve on the page; longer curves are thinned."""

MOST_CHARACTERS = 4_000_000
"""Characters of all outcomes of a lab's page before they are packed, about."""

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
        found: makes the outcome, and the command that prints it, for any values of the controls.
        general: the command for any combination of values.
        ending: heading and text of the last section.
        most: most combinations of positions. Numbers have fewer positions if there would be more.
    """

    name: str
    title: str
    about: str
    controls: tuple[Control, ...]
    found: Combinations
    general: str
    ending: tuple[str, str]
    most: int


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
    words = [f"{control.option} VALUE" for control in lab.controls]
    names = tuple(control.name for control in lab.controls)
    command = Words((), lambda: f"sixfold lab {lab.name}")
    size = len(_json(_outcome(lab(), None)))
    return ControlPage(
        name=lab.name,
        title=lab.title,
        about=lab.about,
        controls=lab.controls,
        found=Combinations((Part(names, lab.run),), (command, *map(_option, lab.controls))),
        general=" ".join(["sixfold lab", lab.name, *words]),
        ending=("When it fails", lab.breaking.why),
        most=min(lab.most_outcomes, MOST_CHARACTERS // size),
    )


def _option(control: Control) -> Words:
    """The option for a value of the control. None for its default."""

    def write(**given: Setting) -> str:
        value = given[control.name]
        if value == control.default:
            return ""
        if str(value).startswith("-"):
            return f"{control.option}={written(value)}"
        return f"{control.option} {shlex.quote(written(value))}"

    return Words((control.name,), write)


def render_controls(page: ControlPage, settings: Mapping[str, Setting]) -> str:
    """The page as a string. `settings` has a value for every control."""
    script = resources.files("sixfold.report").joinpath("templates/controls.js").read_text("utf-8")
    every = _positions(page, settings)
    moving = [(control, values) for control, values in every if len(values) > 1]
    places = [values.index(settings[control.name]) for control, values in moving]
    shown = [[_label(control, value) for value in values] for control, values in moving]
    return render_page(
        "controls.html",
        page=page,
        fixed=[(c, _label(c, settings[c.name])) for c, values in every if len(values) < 2],
        moving=[(c, s, at) for (c, _), s, at in zip(moving, shown, places, strict=True)],
        outcome=_outcome(page.found.run(**settings), None),
        command=page.found.command(settings),
        data=_script_data(page, moving, settings, shown, places),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


def _label(control: Control, value: Setting) -> str:
    return f"{written(value)} {control.unit}".rstrip()


def _script_data(
    page: ControlPage,
    moving: Positions,
    settings: Mapping[str, Setting],
    shown: Sequence[Sequence[str]],
    places: Sequence[int],
) -> Markup:
    """What the script reads, packed: outcomes of all combinations, and each distinct table once."""
    tables: Tables = {}
    data: Json = {
        "controls": [{"at": at, "shown": texts} for at, texts in zip(places, shown, strict=True)],
        **combined(page.found, moving, settings, lambda found: _outcome(found, tables)),
    }
    return Markup(packed(_json({**data, "tables": [json.loads(table) for table in tables]})))


def _positions(page: ControlPage, settings: Mapping[str, Setting]) -> Positions:
    """Values of each control on the page. Numbers have fewer if the combinations are too many."""
    every = [_values(control, settings) for control in page.controls]
    for most in range(max(map(len, every)), 1, -1):
        fewer = [
            _spread(values, most, values.index(settings[control.name]))
            if control.numeric
            else values
            for control, values in zip(page.controls, every, strict=True)
        ]
        if math.prod(map(len, fewer)) <= page.most:
            break
    return list(zip(page.controls, fewer, strict=True))


def _spread(values: list[Setting], most: int, kept: int) -> list[Setting]:
    """At most `most` of the values: both ends, one at the place `kept`, and others between them."""
    if len(values) <= most:
        return values
    last = len(values) - 1
    places = [round(at * last / (most - 1)) for at in range(most)]
    is_end = kept in (0, last)
    # An inner value replaces an inner one, so that the ends stay.
    near = min(
        range(most), key=lambda at: ((at in (0, most - 1)) != is_end, abs(places[at] - kept))
    )
    places[near] = kept
    return [values[place] for place in places]


def _values(control: Control, settings: Mapping[str, Setting]) -> list[Setting]:
    """Values of the control on the page, with the given one among them."""
    values = set(control.swept()) | {settings[control.name]}
    if not control.sweep and control.sweep is not None:
        return [settings[control.name]]
    if control.numeric:
        return sorted(values)
    order = [*control.swept(), settings[control.name]]
    return [value for index, value in enumerate(order) if value not in order[:index]]


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
                {"label": curve.label, "points": _thin_out(curve.points)} for curve in figure.curves
            ],
        }
    if isinstance(figure, Bars):
        values = [_round(value) for value in figure.values]
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
        "spans": [[s.row, _round(s.start), _round(s.end), s.kind] for s in figure.spans],
    }


def _thin_out(points: Sequence[tuple[float, float | None]]) -> list[list[float | None]]:
    """At most about MOST_POINTS points, with the first and the last."""
    stride = max(1, -(-len(points) // MOST_POINTS))
    kept = [*points[:-1:stride], *points[-1:]]
    return [[_round(x), None if y is None else _round(y)] for x, y in kept]


def _round(value: float) -> float:
    return float(f"{value:.5g}")


def _json(data: Json) -> str:
    return json.dumps(data, allow_nan=False, separators=(",", ":"))
