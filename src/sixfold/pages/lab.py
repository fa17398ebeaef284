"""Types of a lab: controls, outcome, and the settings that make it break.

A lab is a pure function of its controls. Random numbers come from a seed, so equal controls give
equal outcomes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ..errors import UserError, nearest

Setting = bool | int | float | str
"""Value of a control."""

Value = bool | int | float | str | list[float] | list[int] | list[str] | None
"""Value of an outcome. None: the value is not defined for these controls."""

SWEEP_POINTS = 25
"""Most values of one numeric control that the HTML page shows."""

ON_OFF = {"on": True, "true": True, "yes": True, "1": True}
ON_OFF |= {"off": False, "false": False, "no": False, "0": False}


@dataclass(frozen=True)
class Control:
    """One input of a lab. The type of `default` decides the kind of control.

    int or float: a number in [low, high]. bool: a switch, on or off. str with `choices`: one of
    them. str without `choices`: free text.

    Attributes:
        name: name in Python and, with dashes for underscores, on the command line.
        default: value if none is given.
        help: meaning and unit, one line.
        low: least value of a number.
        high: greatest value of a number.
        step: spacing of the slider. Any number in the range is valid, on the grid or not.
        choices: valid values of a str control.
        sweep: values that the HTML page shows. None: all choices, or a grid over the range. An
            empty tuple: the control is not on the page.
        unit: unit of a number, which the HTML page shows after it.
    """

    name: str
    default: Setting
    help: str
    low: float = -math.inf
    high: float = math.inf
    step: float = 1
    choices: tuple[str, ...] = ()
    sweep: tuple[Setting, ...] | None = None
    unit: str = ""

    @property
    def option(self) -> str:
        """Name on the command line: --clip-high."""
        return f"--{self.name.replace('_', '-')}"

    @property
    def numeric(self) -> bool:
        return not isinstance(self.default, bool | str)

    @property
    def accepts(self) -> str:
        """Valid values in words: `0.01 to 2`, `on or off`, `a, b or c`."""
        if isinstance(self.default, bool):
            return "on or off"
        if self.choices:
            return one_of(self.choices)
        if isinstance(self.default, str):
            return "text"
        kind = "an integer, " if isinstance(self.default, int) else ""
        return f"{kind}{self.low:g} to {self.high:g}"

    def parse(self, text: str) -> Setting:
        """Value that the user wrote on the command line.

        Raises:
            UserError: if it is not a valid value.
        """
        if isinstance(self.default, bool):
            if text.lower() not in ON_OFF:
                raise self._refuse(text)
            return ON_OFF[text.lower()]
        if isinstance(self.default, str):
            return self.check(text)
        try:
            value = int(text) if isinstance(self.default, int) else float(text)
            return self.check(value)
        except (ValueError, UserError):
            raise self._refuse(text) from None

    def check(self, value: Setting) -> Setting:
        """`value`, as a float if the control is one.

        Raises:
            UserError: if the value has the wrong type or is outside the range.
        """
        if isinstance(self.default, float) and type(value) is int:
            value = float(value)
        if type(value) is not type(self.default):
            raise self._refuse(value)
        if isinstance(value, str):
            if self.choices and value not in self.choices:
                raise self._refuse(value)
        elif not self.low <= value <= self.high:
            raise self._refuse(value)
        return value

    def swept(self) -> tuple[Setting, ...]:
        """Values that the HTML page shows, in order, with the default among them."""
        if self.sweep is not None:
            return self.sweep
        if isinstance(self.default, bool):
            return (False, True)
        if isinstance(self.default, str):
            return self.choices or (self.default,)
        return _grid(self.default, self.low, self.high, self.step)

    def _refuse(self, value: Setting) -> UserError:
        hint = nearest(str(value), list(self.choices)) if self.choices else ""
        return UserError(f"{self.option}: '{value}' is not valid.{hint} Use {self.accepts}")


@dataclass(frozen=True)
class Table:
    """A table of an outcome. Every row has one cell per column."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[Sequence[Value]]


@dataclass(frozen=True)
class Curve:
    """One curve of a chart: points (x, y). A y of None is a gap."""

    label: str
    points: Sequence[tuple[float, float | None]]


@dataclass(frozen=True)
class Chart:
    """Curves over a common x axis. `x` and `y` name the axes, with units."""

    title: str
    x: str
    y: str
    curves: Sequence[Curve]


@dataclass(frozen=True)
class Bars:
    """One bar per label. `y` names the value axis, with its unit."""

    title: str
    y: str
    labels: Sequence[str]
    values: Sequence[float]


@dataclass(frozen=True)
class Span:
    """One bar of a timeline, from `start` to `end`. Spans of equal `kind` have one colour."""

    row: str
    start: float
    end: float
    kind: str


@dataclass(frozen=True)
class Timeline:
    """Gantt chart. `x` names the time axis, with its unit."""

    title: str
    x: str
    spans: Sequence[Span]


Figure = Chart | Bars | Timeline


@dataclass(frozen=True)
class Outcome:
    """What a lab shows for one setting of its controls.

    Attributes:
        values: name to value. Names are snake_case and are shown with spaces; units belong to the
            name (`kv_gib`, `step_seconds`) unless the value is a count or a share.
        tables: tables, in the order to show them.
        figures: charts of the HTML page. `--json` prints them too; the text output does not.
        lines: remarks about this outcome, one sentence each.
    """

    values: Mapping[str, Value]
    tables: tuple[Table, ...] = ()
    figures: tuple[Figure, ...] = ()
    lines: tuple[str, ...] = ()

    def number(self, name: str) -> float:
        """A value that is a number.

        Raises:
            TypeError: if it is not.
        """
        value = self.values[name]
        if not isinstance(value, int | float):
            raise TypeError(f"value '{name}' is not a number: {value!r}")
        return value


@dataclass(frozen=True)
class Breaking:
    """Settings under which the simulated method fails, and settings under which it does not.

    Attributes:
        breaks: controls that make it fail. Controls that are not named have their default.
        safe: controls under which it works.
        why: why it fails, one sentence.
        failed: True if the outcome shows the failure.
    """

    breaks: Mapping[str, Setting]
    safe: Mapping[str, Setting]
    why: str
    failed: Callable[[Outcome], bool]


@dataclass(frozen=True)
class Lab:
    """A simulator with named controls.

    Attributes:
        name: name on the command line, lower case with dashes.
        title: one line for the list of labs.
        about: what is simulated, with its formula and source. Plain text.
        controls: inputs, in the order to show them.
        run: pure function that takes every control as a keyword.
        breaking: a setting that fails and one that does not.
        most_outcomes: most outcomes on the HTML page. Fewer for a lab that takes long.
    """

    name: str
    title: str
    about: str
    controls: tuple[Control, ...]
    run: Callable[..., Outcome]
    breaking: Breaking
    most_outcomes: int = 40_000

    def control(self, name: str) -> Control:
        """The control of this name, written with underscores or dashes.

        Raises:
            UserError: if the lab has no such control.
        """
        known = {control.name: control for control in self.controls}
        key = name.replace("-", "_")
        if key not in known:
            options = ", ".join(control.option for control in self.controls)
            near = nearest(key, list(known)).replace("_", "-")
            raise UserError(
                f"sixfold lab {self.name}: no control '{name}'.{near} Controls: {options}"
            )
        return known[key]

    def settings(self, given: Mapping[str, Setting]) -> dict[str, Setting]:
        """Value of every control: the given one, checked, or its default.

        Raises:
            UserError: for an unknown control or an invalid value.
        """
        checked = {
            (control := self.control(name)).name: control.check(value)
            for name, value in given.items()
        }
        return {control.name: control.default for control in self.controls} | checked

    def __call__(self, **given: Setting) -> Outcome:
        """Outcome for the given controls; the others have their defaults.

        Raises:
            UserError: for an unknown control or an invalid value.
        """
        return self.run(**self.settings(given))


def one_of(names: Sequence[str]) -> str:
    """`a, b or c`."""
    return " or ".join(part for part in (", ".join(names[:-1]), names[-1]) if part)


def _grid(default: float, low: float, high: float, step: float) -> tuple[Setting, ...]:
    """At most SWEEP_POINTS values on the grid of `step`, plus the default."""
    count = math.floor((high - low) / step + 1e-9)
    stride = max(1, math.ceil(count / (SWEEP_POINTS - 1)))
    grid = [round(low + index * step, 10) for index in range(0, count + 1, stride)]
    values = {type(default)(value) for value in (*grid, high, default)}
    return tuple(sorted(values))
