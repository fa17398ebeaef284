"""HTML page of a lab: one file with sliders, without network access.

A browser cannot run the lab, so the page holds its outcomes: for each control, the outcomes over
the control's values, with the other controls as given. The content security policy admits only the
page's own script, by its hash.
"""

from __future__ import annotations

import base64
import hashlib
import json
import shlex
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path

from markupsafe import Markup

from ..errors import UserError
from ..files.durable import write_text_atomic
from ..report.page import render_page
from ..report.untrusted import visible
from .lab import Bars, Chart, Control, Figure, Lab, Outcome, Setting
from .text import shown, written

MOST_POINTS = 120
"""Points of a curve on the page; longer curves are thinned."""

Json = Mapping[str, object]


def write_page(lab: Lab, settings: Mapping[str, Setting], path: Path) -> None:
    """Write the page of the lab to `path`.

    Args:
        lab: the lab.
        settings: a value for every control, from `Lab.settings`.
        path: file to write.

    Raises:
        UserError: if the folder of `path` does not exist.
    """
    if not path.parent.is_dir():
        raise UserError(f"cannot write {path}: no folder {path.parent}. Create it first")
    write_text_atomic(path, render(lab, settings))


def render(lab: Lab, settings: Mapping[str, Setting]) -> str:
    """The page as a string. `settings` has a value for every control."""
    usual = lab.run(**settings)
    script = resources.files("sixfold.report").joinpath("templates/lab.js").read_text("utf-8")
    moving = [control for control in lab.controls if len(_values(control, settings)) > 1]
    data = {
        "usual": _outcome(usual),
        "command": _command(lab, settings, {}),
        "controls": [_sweep(lab, control, settings, usual) for control in moving],
    }
    return render_page(
        "lab.html",
        lab=lab,
        fixed=[(c, written(settings[c.name])) for c in lab.controls if c not in moving],
        moving=[
            (c, [written(value) for value in _values(c, settings)], _place(c, settings))
            for c in moving
        ],
        outcome=_outcome(usual),
        general=f"sixfold lab {lab.name} "
        + " ".join(f"{control.option} VALUE" for control in lab.controls),
        command=data["command"],
        data=_embedded(data),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


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


def _sweep(lab: Lab, control: Control, settings: Mapping[str, Setting], usual: Outcome) -> Json:
    """Outcomes over the values of one control. None stands for the usual outcome."""
    at = _place(control, settings)
    values = _values(control, settings)
    return {
        "at": at,
        "shown": [written(value) for value in values],
        "commands": [_command(lab, settings, {control.name: value}) for value in values],
        "outcomes": [
            None if index == at else _outcome(lab.run(**{**settings, control.name: value}))
            for index, value in enumerate(values)
        ],
    }


def _command(lab: Lab, settings: Mapping[str, Setting], changed: Mapping[str, Setting]) -> str:
    """Command that prints the outcome; controls at their defaults are left out."""
    words = [
        f"{control.option}={written(value)}"
        if str(value).startswith("-")
        else f"{control.option} {shlex.quote(written(value))}"
        for control in lab.controls
        if (value := {**settings, **changed}[control.name]) != control.default
    ]
    return " ".join(["sixfold lab", lab.name, *words])


def _outcome(outcome: Outcome) -> Json:
    """An outcome with its values as they are shown."""
    return {
        "values": [[name.replace("_", " "), shown(v)] for name, v in outcome.values.items()],
        "tables": [
            {
                "title": table.title,
                "columns": list(table.columns),
                "rows": [[shown(cell) for cell in row] for row in table.rows],
            }
            for table in outcome.tables
        ],
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


def _embedded(data: Json) -> Markup:
    """JSON for a script element: `<` is escaped, so that the text cannot close the element."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return Markup(text.replace("<", "\\u003c"))
