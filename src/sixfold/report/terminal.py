"""Trajectories on a terminal, token by token: `sixfold show`.

Each row has tokens of one origin, with its name on the left. The colour shows the origin, and for
sampled tokens the probability. Every second token is underlined, so that token borders are visible.
Without colour, no escape sequence is written. Control characters and invisible characters of the
dump are replaced by visible ones (`untrusted.visible`).
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from typing import TextIO

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from ..types import OBSERVATION, PROMPT, SAMPLED, TEMPLATE
from .trajectory import (
    ORIGINS,
    Event,
    Part,
    Record,
    Token,
    facts,
    figure,
    other_events,
    parts,
    problem,
)
from .untrusted import one_line, visible

EVENT_CHARACTERS = 400
PLAIN_WIDTH = 100
"""Width if the output is not a terminal and COLUMNS is not set."""

_LEVELS = ("color(34)", "color(106)", "color(178)", "color(208)", "color(196)")
"""Colours of a sampled token, from likely to unlikely."""
_EDGES = (0.9, 0.5, 0.1, 0.01)
_STYLES = {PROMPT: "color(33)", TEMPLATE: "color(244)", OBSERVATION: "italic color(37)"}


class Screen:
    """Prints rows to a file, which may be a terminal.

    Args:
        colour: write escape sequences for colours.
    """

    def __init__(self, file: TextIO, colour: bool) -> None:
        self.colour = colour
        self._file = file
        fixed = None if file.isatty() or "COLUMNS" in os.environ else PLAIN_WIDTH
        self._console = Console(
            file=file,
            width=fixed,
            force_terminal=colour,
            color_system="256" if colour else None,
            markup=False,
            emoji=False,
            highlight=False,
            legacy_windows=False,
        )

    def show(self, *rows: RenderableType) -> None:
        """Print rows. Only tables are wrapped at the width; the terminal wraps other rows."""
        for row in rows:
            with self._console.capture() as captured:
                self._console.print(row, soft_wrap=not isinstance(row, Table))
            lines = captured.get().splitlines() or [""]
            # Remove the padding of table cells.
            self._file.writelines(f"{line.rstrip()}\n" for line in lines)


def legend(colour: bool) -> Text:
    """One line that explains the colours, or without colours the rows."""
    if not colour:
        return Text(
            "Each row has tokens of one origin: prompt, turn (sampled by the policy), template,"
            " observation (environment). --tokens lists tokens with their log-probs."
        )
    text = Text()
    for letter in (PROMPT, TEMPLATE, OBSERVATION):
        text.append(ORIGINS[letter], _STYLES[letter]).append(" · ")
    text.append("sampled with p ")
    names = [f"≥ {100 * edge:g}%" for edge in _EDGES] + [f"< {100 * _EDGES[-1]:g}%"]
    for name, style in zip(names, _LEVELS, strict=True):
        text.append(name, style).append("  ")
    return text.append("· every second token is underlined")


def trajectory_rows(record: Record, why: str, *, tokens: bool) -> Iterator[RenderableType]:
    """Rows for one trajectory.

    Args:
        why: reason why it is shown, or "".
        tokens: list the tokens one by one, with log-prob, advantage and version.
    """
    name = f"task {record['task_id']} · sample {record['sample']}"
    yield Text(one_line(name, 200) + (f" · {why}" if why else ""), "bold")
    yield Text("  " + one_line(" · ".join(facts(record)), 2000))
    if said := problem(record):
        yield Text("  " + one_line(said, 2000), "red")
    yield Text("  " + one_line(f"reference answer {record.get('answer')}", 400), "dim")
    yield _list(parts(record)) if tokens else _rows(parts(record))
    for event in other_events(record):
        yield _event(event)
    yield Text()


def _rows(found: Sequence[Part]) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold", ratio=1)
    for part in found:
        table.add_row(Text("  " + part.label, "bold" if part.turn else "dim"), _text(part))
        if part.turn:
            table.add_row(Text(), Text(" · ".join(part.facts), "dim"))
        for event in part.events:
            table.add_row(Text("  " + one_line(event.label, 40), "dim"), _event(event, label=False))
    return table


def _text(part: Part) -> Text:
    """The tokens of a part. A newline of the template is shown as a sign without a line break."""
    text = Text()
    for number, token in enumerate(part.tokens):
        newline = "⏎" if part.origin == TEMPLATE else "⏎\n"
        shown = visible(token.shown).replace("\t", "→").replace("\n", newline)
        text.append(shown, _style(token) + (" underline" if number % 2 else ""))
    return text


def _list(found: Sequence[Part]) -> Table:
    """One row per token, with id, log-prob, probability, advantage and version."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("index", "origin", "id", "text", "log-prob", "p", "advantage", "version"):
        right = name not in ("origin", "text")
        table.add_column(name, justify="right" if right else "left", overflow="fold")
    for part in found:
        for token in part.tokens:
            table.add_row(str(token.index), part.label, str(token.id), *_numbers(token))
    return table


def _numbers(token: Token) -> Iterator[Text | str]:
    shown = one_line(token.shown, 60)
    yield Text(f"“{shown}”", _style(token))
    if token.origin != SAMPLED:
        yield from ("",) * 4
        return
    known = token.logp is not None and math.isfinite(token.logp)
    yield f"{token.logp:.4f}" if known else "not finite"
    yield figure(_probability(token)) if known else ""
    yield figure(token.advantage)
    yield str(token.version)


def _style(token: Token) -> str:
    if token.origin != SAMPLED:
        return _STYLES[token.origin]
    if token.logp is None or not math.isfinite(token.logp):
        return "reverse " + _LEVELS[-1]
    return _LEVELS[sum(_probability(token) < edge for edge in _EDGES)]


def _probability(token: Token) -> float:
    return math.exp(min(token.logp or 0.0, 0.0))


def _event(event: Event, label: bool = True) -> Text:
    said = f"  {event.label} {event.text}" if label else event.text
    return Text(one_line(said, EVENT_CHARACTERS), "red" if event.failed else "")
