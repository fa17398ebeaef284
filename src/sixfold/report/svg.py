"""Charts as inline SVG: lines with gaps, interval bands, stacked areas, histograms.

There are no scripts: values appear on hover by CSS. Colours are CSS classes (c0, c1, ...;
`templates/style.css`), so charts follow the page's light or dark scheme. Callers pass plain text.
Every text is escaped here, so the result is `Markup` that a template shows as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeGuard

from markupsafe import Markup

from .numbers import number, percent
from .untrusted import escape

Point = tuple[int, float | None]

WIDTH, HEIGHT = 360, 190
LEFT, RIGHT, TOP, BOTTOM = 46, 10, 22, 24
MAX_STRIPS = 120


@dataclass(frozen=True)
class Line:
    """One curve.

    Attributes:
        label: name in the legend.
        points: (step, value); a value of None is a gap.
        colour: index of the CSS class.
        dots: draw a dot at every point.
        band: (step, low, high) of the band around the curve.
    """

    label: str
    points: Sequence[Point]
    colour: int = 0
    thin: bool = False
    dots: bool = False
    band: Sequence[tuple[int, float, float]] = ()

    @property
    def finite(self) -> list[tuple[int, float]]:
        return [(step, value) for step, value in self.points if drawable(value)]


@dataclass(frozen=True)
class Frame:
    """The plot's coordinates: maps data (step, value) to SVG units.

    `log` puts the values on a logarithmic scale.
    """

    first: float
    last: float
    low: float
    high: float
    log: bool = False

    def x(self, step: float) -> float:
        span = (self.last - self.first) or 1.0
        return round(LEFT + (step - self.first) / span * (WIDTH - LEFT - RIGHT), 1)

    def y(self, value: float) -> float:
        low, high, at = (math.log10(v) if self.log else v for v in (self.low, self.high, value))
        return round(TOP + (1 - (at - low) / ((high - low) or 1.0)) * (HEIGHT - TOP - BOTTOM), 1)


def drawable(value: float | None) -> TypeGuard[float]:
    """True for a finite number that an axis can show without overflow."""
    return value is not None and abs(value) < 1e100


def line_chart(
    lines: Sequence[Line],
    show: Callable[[float], str] = number,
    limits: tuple[float, float] | None = None,
    log: bool = False,
) -> Markup:
    """An SVG with one curve per line.

    Args:
        limits: limits of the value axis. None: fit to the data.
        log: use a logarithmic value axis. Values below 1e-100 become gaps.
    """
    kept = [_positive(line) if log else line for line in lines]
    values = [value for line in kept for _, value in line.finite] + [
        end for line in kept for _, *ends in line.band for end in ends
    ]
    steps = [step for line in kept for step, _ in line.points]
    if not values:
        return _nothing()
    low, high = limits or _axis_limits(min(values), max(values), log)
    frame = Frame(min(steps), max(steps), low, high, log)
    body = _axes(frame, show)
    for line in kept:
        body += _band(frame, line) + _curve(frame, line)
    return _svg(body + _strips(frame, kept, show))


def area_chart(layers: Sequence[Line]) -> Markup:
    """An SVG of stacked layers, the first at the bottom.

    Every layer must have the same steps. A value of None counts as 0.
    """
    steps = [step for step, _ in layers[0].points] if layers else []
    if not steps:
        return _nothing()
    floor = [0.0] * len(steps)
    edges = [floor]
    for layer in layers:
        floor = [
            below + (value or 0.0) for below, (_, value) in zip(floor, layer.points, strict=True)
        ]
        edges.append(floor)
    frame = Frame(steps[0], steps[-1], 0.0, max(floor) or 1.0)
    body = _axes(frame, number)
    for layer, below, above in zip(layers, edges, edges[1:], strict=False):
        outline = [*zip(steps, above, strict=True), *reversed(list(zip(steps, below, strict=True)))]
        body += f'<polygon class="fill c{layer.colour}" points="{_path(frame, outline)}"/>'
    return _svg(body + _strips(frame, layers, number))


def histogram(counts: Sequence[float], edges: Sequence[float], what: str) -> Markup:
    """Bars of counts between `edges`, of what is counted. The first and the last bar are open."""
    total = sum(counts)
    if total <= 0 or len(counts) != len(edges) + 1:
        return _nothing()
    width = (WIDTH - LEFT - RIGHT) / len(counts)
    tallest = max(counts)
    names = [
        f"< {edges[0]:g}",
        *(f"{a:g} to {b:g}" for a, b in pairwise(edges)),
        f"≥ {edges[-1]:g}",
    ]
    body = (
        f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{HEIGHT - BOTTOM}"'
        f' y2="{HEIGHT - BOTTOM}"/>'
    )
    for index, (count, name) in enumerate(zip(counts, names, strict=True)):
        height = count / tallest * (HEIGHT - TOP - BOTTOM)
        x = LEFT + index * width
        body += f'<g class="strip">{_hit(x, width)}'
        body += (
            f'<rect class="fill c0" x="{x + 1:.1f}" y="{HEIGHT - BOTTOM - height:.1f}"'
            f' width="{width - 2:.1f}" height="{height:.1f}"/>'
        )
        body += (
            f'<text class="tip" x="{LEFT}" y="12">{escape(name)}: {count:g} {what}'
            f" ({percent(count / total)})</text></g>"
        )
    for index, edge in enumerate(edges):
        body += (
            f'<text class="tick" x="{LEFT + (index + 1) * width:.1f}" y="{HEIGHT - 8}"'
            f' text-anchor="middle">{edge:g}</text>'
        )
    return _svg(body)


def _positive(line: Line) -> Line:
    points = [
        (step, value if drawable(value) and value > 1e-100 else None) for step, value in line.points
    ]
    return Line(line.label, points, line.colour, line.thin, line.dots)


def _axis_limits(low: float, high: float, log: bool) -> tuple[float, float]:
    if log:
        return 10 ** math.floor(math.log10(low)), 10 ** math.ceil(math.log10(high) + 1e-9)
    pad = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    # Values that are never negative need no axis below 0: a constant 0 is drawn from 0 to 1.
    return (0.0 if 0 <= low <= (high - low) * 0.5 else low - pad), high + pad


def _ticks(low: float, high: float, count: int) -> list[float]:
    """About `count` round numbers in [low, high], spaced by 1, 2, 2.5 or 5 times a power of ten."""
    rough = (high - low) / count
    if rough <= 0 or not math.isfinite(rough):
        return [low]
    power = 10 ** math.floor(math.log10(rough))
    gap = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= rough * 0.999)
    first = math.ceil(low / gap - 1e-9)
    return [i * gap for i in range(first, math.floor(high / gap + 1e-9) + 1)]


def _axes(frame: Frame, show: Callable[[float], str]) -> str:
    if frame.log:
        low, high = round(math.log10(frame.low)), round(math.log10(frame.high))
        levels = [10.0**power for power in range(low, high + 1, max(1, (high - low) // 4))]
    else:
        levels = _ticks(frame.low, frame.high, 4)
    parts = []
    for level in levels:
        y = frame.y(level)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>')
        label = escape(show(level).replace(".0%", "%"))
        parts.append(
            f'<text class="tick" x="{LEFT - 6}" y="{y + 3.5}" text-anchor="end">{label}</text>'
        )
    for step in sorted({round(tick) for tick in _ticks(frame.first, frame.last, 5)}):
        parts.append(
            f'<text class="tick" x="{frame.x(step)}" y="{HEIGHT - 8}"'
            f' text-anchor="middle">{step}</text>'
        )
    return "".join(parts)


def _band(frame: Frame, line: Line) -> str:
    if not line.band:
        return ""
    outline = [(step, high) for step, _, high in line.band] + [
        (step, low) for step, low, _ in reversed(line.band)
    ]
    return f'<polygon class="band c{line.colour}" points="{_path(frame, outline)}"/>'


def _curve(frame: Frame, line: Line) -> str:
    """One polyline for each stretch without a gap. A stretch of one point is a dot."""
    stretches: list[list[tuple[int, float]]] = [[]]
    for step, value in line.points:
        if drawable(value):
            stretches[-1].append((step, value))
        else:
            stretches.append([])
    thin = " thin" if line.thin else ""
    parts = []
    for stretch in stretches:
        if len(stretch) > 1:
            parts.append(
                f'<polyline class="line c{line.colour}{thin}" points="{_path(frame, stretch)}"/>'
            )
        if line.dots or len(stretch) == 1:
            parts += [
                f'<circle class="dot c{line.colour}" cx="{frame.x(step)}" cy="{frame.y(value)}"'
                ' r="2.6"/>'
                for step, value in stretch
            ]
    return "".join(parts)


def _path(frame: Frame, points: Sequence[tuple[int, float]]) -> str:
    return " ".join(f"{frame.x(step):g},{frame.y(value):g}" for step, value in points)


def _strips(frame: Frame, lines: Sequence[Line], show: Callable[[float], str]) -> str:
    """Invisible columns, one per step, that show a hair line and values on hover.

    There are at most MAX_STRIPS.
    """
    at: dict[int, list[str]] = {}
    for line in lines:
        for step, value in line.points:
            at.setdefault(step, []).append(
                f"{line.label} {show(value) if drawable(value) else 'not finite'}"
            )
    steps = sorted(at)
    steps = steps[:: max(1, math.ceil(len(steps) / MAX_STRIPS))]
    width = (WIDTH - LEFT - RIGHT) / max(1, len(steps) - 1)
    parts = []
    for step in steps:
        x = frame.x(step)
        parts.append(f'<g class="strip">{_hit(x - width / 2, width)}')
        parts.append(f'<line class="hair" x1="{x}" x2="{x}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
        parts.append(
            f'<text class="tip" x="{LEFT}" y="12">step {step}:'
            f" {escape(', '.join(at[step]))}</text></g>"
        )
    return "".join(parts)


def _svg(body: str) -> Markup:
    return Markup(f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{body}</svg>')


def _hit(x: float, width: float) -> str:
    return (
        f'<rect class="hit" x="{x:.1f}" y="{TOP}" width="{width:.1f}"'
        f' height="{HEIGHT - TOP - BOTTOM}"/>'
    )


def _nothing() -> Markup:
    return _svg(
        f'<text class="tick" x="{WIDTH / 2}" y="{HEIGHT / 2}" text-anchor="middle">not'
        " measured</text>"
    )
