"""`sixfold lab [NAME] [--CONTROL VALUE ...] [--json] [--html FILE]`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from textwrap import fill

from ..errors import UserError
from ..labs.catalogue import LABS, find
from ..labs.lab import Control, Lab
from ..labs.text import as_json, as_text, written
from .parsing import VerbParser

TEXT = """\
Run a lab: a small simulator of one idea of RL post-training.

Without NAME, list the labs. `sixfold lab NAME --help` lists the controls of a lab.
"""


def parser(lab: Lab | None = None) -> VerbParser:
    """Arguments of the verb, or of one lab with its controls."""
    about = TEXT if lab is None else "\n\n".join(fill(part, 88) for part in _about(lab))
    arguments = VerbParser("lab" if lab is None else f"lab {lab.name}", about)
    if lab is None:
        arguments.add_argument("name", metavar="NAME", nargs="?", help="the lab to run")
    for control in lab.controls if lab else ():
        arguments.add_argument(
            control.option, metavar="VALUE", dest=control.name, help=_described(control)
        )
    arguments.add_argument("--json", dest="as_json", action="store_true", help="print JSON")
    arguments.add_argument(
        "--html", metavar="FILE", dest="html_file", help="write a page with sliders to FILE"
    )
    return arguments


def run(argv: Sequence[str]) -> int:
    """List the labs, or run one."""
    if not argv or argv[0].startswith("-"):
        given, _ = parser().parse(argv)
        if given.name or given.as_json or given.html_file is not None:
            raise UserError("sixfold lab: write NAME before its options: sixfold lab NAME --json")
        width = max(map(len, LABS)) + 2
        for name in LABS:
            print(f"{name:<{width}}{find(name).title}")
        return 0
    lab = find(argv[0])
    given, _ = parser(lab).parse(argv[1:])
    settings = lab.settings(
        {
            control.name: control.parse(text)
            for control in lab.controls
            if (text := getattr(given, control.name)) is not None
        }
    )
    if given.html_file is not None:
        from ..labs.page import write_page

        path = Path(given.html_file).expanduser()
        write_page(lab, settings, path)
        print(f"wrote {path}")
        return 0
    outcome = lab.run(**settings)
    print(as_json(lab, settings, outcome) if given.as_json else as_text(lab, settings, outcome))
    return 0


def _described(control: Control) -> str:
    text = f"{control.help} ({control.accepts}; default {written(control.default)})"
    return text.replace("%", "%%")


def _about(lab: Lab) -> tuple[str, ...]:
    breaks = lab.breaking.breaks
    words = " ".join(f"{lab.control(n).option} {written(value)}" for n, value in breaks.items())
    return lab.title, lab.about, f"It fails with {words}: {lab.breaking.why}"
