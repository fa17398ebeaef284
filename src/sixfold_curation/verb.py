"""`sixfold data FILE.toml`: make a data set from sources by stages."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console
from rich.table import Table
from rich.text import Text

from sixfold.cli.parsing import VerbParser, argument, option
from sixfold.report.numbers import number, percent
from sixfold.report.untrusted import one_line, visible

if TYPE_CHECKING:
    from .pipeline import Result, Step
    from .settings import Curation
    from .sources import Opened

PURPOSE = "make a data set: read sources, filter them by stages, say why each row was dropped"

TEXT = """\
Make a data set from one or several sources. FILE.toml names them, and the stages that decide which
rows are kept:

    name = "math"
    seed = 0

    [[sources]]
    label = "dapo"
    data = "dapo.parquet"       # file, folder, hub id or generator
    origin = "public"           # human, public, synthetic or logged
    licence = "apache-2.0"      # or licence_field = "license"

    [[stages]]
    kind = "duplicates"         # or file.py:Class, a stage of yours
    threshold = 0.8

The rows are in data/math/train.jsonl, which recipes read: data.source = "data/math/train.jsonl".
Beside them are a report, a card, and the provenance of every row that was read. A run that was
killed goes on if it is called again. After a change, only the stages that it concerns run again.

Two evaluations on the same tasks show whether the training data had the prompts: --leakage BASE
TRAINED, each a completions-N.jsonl of `sixfold eval`, lists the prompts that the trained model
solves so much more often that chance does not explain it, and the rows that have them.

Exit code: 0; 2 for bad input; with --strict, 3 if an alarm rings or a prompt jumps.
"""

_EVERY = 500
"""Rows between two looks at the progress."""

_PLAIN_EVERY_S = 10.0
"""Seconds between lines of progress if standard error is no terminal."""


@dataclass(frozen=True, kw_only=True)
class Options:
    file: Path = argument("the recipe of the data set: a .toml file, or the name of a shipped one")
    out: str = option("folder of the data set (default: the recipe's, or data/NAME)", "")
    set: tuple[str, ...] = option(
        "change a setting: seed=1, sources.LABEL.limit=1000, stages.NAME.threshold=0.7; may be"
        " repeated",
        (),
        action="append",
        metavar="KEY=VALUE",
    )
    plan: bool = option("print what would be done, and do nothing", False, either="what")
    explain: str = option(
        "print what became of a row, by its id in the provenance", "", metavar="ID", either="what"
    )
    leakage: tuple[Path, ...] = option(
        "print which prompts of an evaluation jump from the base model to the trained one, and"
        " which rows of the finished data set have them",
        (),
        nargs=2,
        metavar=("BASE", "TRAINED"),
        either="what",
    )
    strict: bool = option("exit with code 3 if an alarm rings or a prompt jumps", False)


PARSER = VerbParser("data", TEXT, Options)


def run(arguments: Sequence[str]) -> int:
    """Make the data set, or print what would be done, or the story of a row."""
    given = PARSER.parse(arguments)
    from sixfold.recipe.find import find_recipe

    from .pipeline import locked, opened_sources, planned, run_stages
    from .settings import read_curation

    curation = read_curation(find_recipe(str(given.file), "curation"), given.set)
    if given.out:
        settings = curation.settings.model_copy(update={"out": given.out})
        curation = replace(curation, settings=settings)
    if given.explain:
        _explain(curation, given.explain)
        return 0
    if given.leakage:
        return 3 if _leakage(curation, *given.leakage) and given.strict else 0
    opened = opened_sources(curation)
    steps = planned(curation, opened)
    if given.plan:
        _plan(curation, opened, steps)
        return 0
    from .output import write_data_set

    with locked(curation):
        with Progress() as shown:
            results = run_stages(curation, opened, steps, shown)
        rows = write_data_set(curation, steps, results)
    _summary(results, rows, curation.out)
    return 3 if given.strict and any(one.alarm for one in results) else 0


def _explain(curation: Curation, identity: str) -> None:
    from .output import explain

    story = explain(curation.out, identity)
    print(f"{visible(story['id'])}: {story['fate']}\n  read from {visible(story['where'])}")
    for one in story["decisions"]:
        fate = "kept" if one["kept"] else "dropped"
        note = f": {visible(one['note'])}" if one["note"] else ""
        also = f" (as {visible(one['id'])})" if "id" in one else ""
        reason = f", {visible(one['reason'])}" if one["reason"] else ""
        print(f"  {one['stage']}: {fate}{also}{reason}{note}")
    quiet = [one.name for one in curation.stages]
    quiet = [name for name in quiet if all(name != one["stage"] for one in story["decisions"])]
    if quiet and story["fate"] == "kept":
        print(f"  nothing to say: {', '.join(quiet)}")


def _leakage(curation: Curation, base: Path, trained: Path) -> bool:
    """Print the leakage test. Returns True if a prompt jumps."""
    from .leakage import leakage
    from .output import WrittenRows

    result = leakage(base.expanduser(), trained.expanduser(), WrittenRows(curation.out))
    for line in result.lines():
        print(visible(line))
    return bool(result.found)


def _plan(curation: Curation, opened: Sequence[Opened], steps: Sequence[Step]) -> None:
    settings = curation.settings
    print(f"{settings.name}: {curation.out}/train.{settings.format}, seed {settings.seed}")
    for one in opened:
        source = one.settings
        licence = source.licence or f"column {source.licence_field}"
        print(
            f"  source {source.label}: {visible(source.data)} ({one.about}), {source.origin},",
            end="",
        )
        print(f" licence {visible(licence)}, reader {source.reader}")
    for step in steps:
        result = step.result()
        done = f"done, {result.kept:,} of {result.rows:,} rows kept" if result else "to do"
        values = step.named.stage.model_dump(mode="json") if step.named else {}
        told = ", ".join(f"{name} = {value!r}" for name, value in values.items())
        print(one_line(f"  stage {step.name}: {done}{' · ' if told else ''}{told}", 300))


def _summary(results: Sequence[Result], rows: Path, out: Path) -> None:
    """Print the table of stages, the alarms, and where the rows are."""
    console = Console(soft_wrap=False)
    table = Table(box=None, header_style="dim")
    for name in ("stage", "rows in", "rows out", "dropped", "health", "value"):
        left = name in ("stage", "health")
        table.add_column(name, justify="left" if left else "right", overflow="fold")
    for one in results:
        share = "—" if one.share is None else percent(one.share)
        value = "—" if one.value is None else number(one.value)
        cells = (one.name, f"{one.rows:,}", f"{one.kept:,}", share, one.metric)
        styled = Text(value + (" !" if one.alarm else ""), style="bold red" if one.alarm else "")
        table.add_row(*(Text(visible(cell)) for cell in cells), styled)
    console.print(table)
    for one in results:
        if one.alarm:
            print(f"alarm: {visible(one.name)}: {visible(one.alarm)}")
    print(f"{results[-1].kept:,} rows: {rows}\nreport: {out / 'report.html'}")


class Progress:
    """Context manager that shows on standard error which stage runs, and how far it is."""

    def __init__(self) -> None:
        self._console = Console(file=sys.stderr)
        self._bar: Any = None
        self._name, self._rows, self._done, self._prepared, self._due = "", 0, 0, 0, 0.0

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
            from rich.progress import Progress as Bar

            self._bar = Bar(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                console=self._console,
                transient=True,
            )
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar:
            self._bar.stop()

    def begin(self, name: str, rows: int) -> None:
        self._name, self._rows, self._done, self._prepared = name, rows, 0, 0
        self._due = time.monotonic() + _PLAIN_EVERY_S
        if self._bar:
            for task in self._bar.task_ids:
                self._bar.remove_task(task)
            self._bar.add_task(visible(name), total=rows or None)

    def advance(self, rows: int) -> None:
        self._done += rows
        self._show(self._done, rows, "rows")

    def prepare(self, rows: int) -> None:
        self._prepared += rows
        self._show(self._prepared, rows, "rows prepared")

    def _show(self, done: int, more: int, unit: str) -> None:
        if done // _EVERY == (done - more) // _EVERY:
            return
        if self._bar:
            self._bar.update(
                self._bar.task_ids[-1],
                completed=done,
                description=f"{visible(self._name)}: {unit}",
            )
        elif time.monotonic() >= self._due:
            self._due = time.monotonic() + _PLAIN_EVERY_S
            of = f" of {self._rows:,}" if self._rows else ""
            self._console.print(Text(f"{visible(self._name)}: {done:,}{of} {unit}"))

    def end(self, result: Result, again: bool) -> None:
        how = "" if again else " (done before)"
        self._console.print(
            Text(f"{visible(result.name)}: {result.kept:,} of {result.rows:,} rows kept{how}")
        )
