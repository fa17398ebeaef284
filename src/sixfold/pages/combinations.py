"""Pages on which controls combine: outcomes for every combination of positions.

An outcome is joined from parts. Each part depends on some of the controls, so the page holds it for
the combinations of these controls only. The command is joined in the same way from words.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from .lab import Control, Figure, Outcome, Setting, Table, Value

Json = Mapping[str, object]
Positions = Sequence[tuple[Control, Sequence[Setting]]]
"""Controls that move, each with the values that it can have."""


@dataclass(frozen=True)
class Part:
    """Part of an outcome.

    Attributes:
        controls: names of the controls that it depends on.
        run: the part for values of these controls, given as keywords.
    """

    controls: tuple[str, ...]
    run: Callable[..., Outcome]


@dataclass(frozen=True)
class Words:
    """Part of a command.

    Attributes:
        controls: names of the controls that it depends on.
        write: the words for values of these controls, given as keywords. "": none.
    """

    controls: tuple[str, ...]
    write: Callable[..., str]


@dataclass(frozen=True)
class Combinations:
    """What a page shows for any combination of controls.

    Attributes:
        parts: parts of the outcome, in the order to show them.
        words: parts of the command, joined by spaces.
    """

    parts: tuple[Part, ...]
    words: tuple[Words, ...]

    def run(self, **settings: Setting) -> Outcome:
        return join([part.run(**_select(part.controls, settings)) for part in self.parts])

    def command(self, settings: Mapping[str, Setting]) -> str:
        texts = (part.write(**_select(part.controls, settings)) for part in self.words)
        return " ".join(text for text in texts if text)


def _select(names: tuple[str, ...], settings: Mapping[str, Setting]) -> dict[str, Setting]:
    return {name: settings[name] for name in names}


def join(parts: Sequence[Outcome]) -> Outcome:
    """All values, tables, figures and lines. Tables of equal title become one."""
    values: dict[str, Value] = {}
    tables: dict[str, Table] = {}
    figures: list[Figure] = []
    for part in parts:
        values |= part.values
        figures += part.figures
        for table in part.tables:
            before = tables.get(table.title, replace(table, rows=()))
            tables[table.title] = replace(before, rows=[*before.rows, *table.rows])
    lines = [line for part in parts for line in part.lines]
    return Outcome(values, tuple(tables.values()), tuple(figures), tuple(lines))


def combined(
    page: Combinations,
    moving: Positions,
    settings: Mapping[str, Setting],
    encode: Callable[[Outcome], Json],
) -> Json:
    """Outcomes and commands for every combination of positions.

    Args:
        page: parts and words.
        moving: controls that move.
        settings: a value for every control.
        encode: an outcome as the page's script reads it.

    Returns:
        `parts` and `words`. Each has `controls`, the places of its controls in `moving`, and
        `found`, the places of its results in `outcomes` or `texts`. `found` is in the order of
        `itertools.product` over the positions of these controls. Equal results are held once.
    """
    outcomes: dict[str, int] = {}
    texts: dict[str, int] = {}

    def collect(part: Part | Words) -> Json:
        at = [place for place, (control, _) in enumerate(moving) if control.name in part.controls]
        names = [moving[place][0].name for place in at]
        fixed = _select(part.controls, settings)
        found = []
        for values in product(*(moving[place][1] for place in at)):
            asked = {**fixed, **dict(zip(names, values, strict=True))}
            if isinstance(part, Part):
                text = json.dumps(encode(part.run(**asked)), allow_nan=False)
                found.append(outcomes.setdefault(text, len(outcomes)))
            else:
                found.append(texts.setdefault(part.write(**asked), len(texts)))
        return {"controls": at, "found": found}

    return {
        "parts": [collect(part) for part in page.parts],
        "words": [collect(part) for part in page.words],
        "outcomes": [json.loads(text) for text in outcomes],
        "texts": list(texts),
    }


def packed(text: str) -> str:
    """Text as base64 of its zlib stream, which browsers unpack (DecompressionStream)."""
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()
