"""`sixfold lab [NAME] [--CONTROL VALUE ...] [--json] [--html FILE]`."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import make_dataclass
from pathlib import Path
from textwrap import fill
from typing import Any

from sixfold.cli.parsing import VerbParser, argument, option
from sixfold.errors import UserError
from sixfold.pages.lab import Control, Lab
from sixfold.pages.text import as_json, as_text, written

from .catalogue import LABS, find

PURPOSE = "run a small simulator of one idea, in the terminal or as a page with sliders"

TEXT = """\
Run a lab: a small simulator of one idea of RL post-training.

Without NAME, list the labs. `sixfold lab NAME --help` lists the controls of a lab.
"""


def parser(lab: Lab | None = None) -> VerbParser[Any]:
    """Parser of the verb, or of one lab with its controls."""
    verb, about = "lab", TEXT
    first: list[Any] = [("name", str, argument("the lab to run", ""))]
    if lab is not None:
        verb, about = f"lab {lab.name}", "\n\n".join(fill(part, 88) for part in _about(lab))
        first = [(c.name, str, option(_described(c), metavar="VALUE")) for c in lab.controls]
    output = [
        ("json", bool, option("print JSON", False)),
        ("html", str, option("write a page with sliders to FILE", metavar="FILE")),
    ]
    return VerbParser(verb, about, make_dataclass("Options", [*first, *output]))


PARSER = parser()


def run(arguments: Sequence[str]) -> int:
    """List the labs, or run one."""
    if not arguments or arguments[0].startswith("-"):
        given = PARSER.parse(arguments)
        if given.name or given.json or given.html is not None:
            raise UserError("sixfold lab: write NAME before its options: sixfold lab NAME --json")
        width = max(map(len, LABS)) + 2
        columns = shutil.get_terminal_size().columns
        for name in LABS:
            first, rest = f"{name:<{width}}", " " * (width if columns >= 60 else 2)
            print(fill(find(name).title, columns, initial_indent=first, subsequent_indent=rest))
        return 0
    lab = find(arguments[0])
    given = parser(lab).parse(arguments[1:])
    settings = lab.settings(
        {
            control.name: control.parse(text)
            for control in lab.controls
            if (text := getattr(given, control.name)) is not None
        }
    )
    if given.html is not None:
        from sixfold.pages.page import write_page

        path = Path(given.html).expanduser()
        write_page(lab, settings, path)
        print(f"wrote {path}")
        return 0
    outcome = lab.run(**settings)
    print(as_json(lab, settings, outcome) if given.json else as_text(lab, settings, outcome))
    return 0


def _described(control: Control) -> str:
    text = f"{control.help} ({control.accepts}; default {written(control.default)})"
    return text.replace("%", "%%")


def _about(lab: Lab) -> tuple[str, ...]:
    breaks = lab.breaking.breaks
    words = " ".join(f"{lab.control(n).option} {written(value)}" for n, value in breaks.items())
    return lab.title, lab.about, f"It fails with {words}: {lab.breaking.why}"
