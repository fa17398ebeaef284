"""Run the stages of a recipe, each from the file of rows that the stage before has written.

    OUT/work/00-sources/        rows.jsonl.zst, decisions.jsonl.zst, done.json
    OUT/work/01-duplicates/     the same, and held.jsonl.zst; own/: what the stage itself keeps

`done.json` is written last. It names everything that the stage depends on by one hash, the hash of
the stage before included. So a stage that is done is not repeated, a stage that was killed begins
again, and after a change the first stage that it concerns and all later ones run again.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import shutil
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from modulefinder import ModuleFinder
from pathlib import Path
from typing import IO, Any, Protocol

from sixfold.errors import UserError, is_fault, one_line
from sixfold.files.durable import disk_errors, faultpoint, write_json_atomic, write_text_atomic
from sixfold.plugins import module_spec
from sixfold.recipe.find import find_recipe
from sixfold.version import __version__

from .kinds import STAGES
from .rows_on_disk import LineWriter, StoredRows, json_text, stored
from .settings import Curation, NamedStage
from .sources import Opened, SourceReader, file_hash, open_source
from .stage import Context, Decision, Health, Record

FIRST = "sources"
"""Name of the first stage, which reads the rows."""

EXAMPLES = 4
"""Examples of each reason that are recorded."""

RULES = 3
"""Version of what the stages decide. It grows when one reads or decides the same rows otherwise, so
that folders made before are not taken as done.
"""

_EXCERPT = 300
_HELD = "held"
_PACKAGE = 5  # PKG_DIRECTORY of the former module imp, as ModuleFinder has it


@dataclass(frozen=True)
class Result:
    """What a stage has done, as `done.json` records it.

    Attributes:
        name: name of the stage.
        kind: its kind.
        key: hash of everything that it depends on.
        rows: number of rows that it was given.
        kept: number of rows that go on.
        dropped: number of dropped rows by reason.
        noted: number of kept rows by reason.
        decisions: number of lines of decisions.
        held: number of dropped rows that are stored, to be tried again.
        metric: name of its health metric.
        value: the metric. None: unknown.
        alarm: what is wrong, or "".
        figures: other numbers of its health.
        examples: some decisions: reason, id, text, note.
        origins: rows that go on, as [source, licence, number of rows].
    """

    name: str
    kind: str
    key: str
    rows: int
    kept: int
    dropped: Mapping[str, int]
    noted: Mapping[str, int]
    decisions: int
    held: int
    metric: str
    value: float | None
    alarm: str
    figures: Mapping[str, Any]
    examples: Sequence[Mapping[str, str]]
    origins: Sequence[tuple[str, str, int]]

    @property
    def share(self) -> float | None:
        """Share of the rows that are dropped. A stage may also keep copies. None without rows."""
        return sum(self.dropped.values()) / self.rows if self.rows else None


class Shown(Protocol):
    """Shows what happens."""

    def begin(self, name: str, rows: int) -> None:
        """A stage begins.

        Args:
            name: its name.
            rows: number of rows that it will decide. 0: unknown.
        """

    def advance(self, rows: int) -> None:
        """Rows are read, or decided."""

    def prepare(self, rows: int) -> None:
        """A stage has done something else with rows."""

    def end(self, result: Result, again: bool) -> None:
        """A stage is done.

        Args:
            result: what it has done.
            again: False if an earlier run did it.
        """


@dataclass(frozen=True)
class Step:
    """A stage with its folder.

    Attributes:
        named: the stage. None: the first one, which reads the sources.
        key: hash of everything that it depends on.
        folder: its folder.
    """

    named: NamedStage | None
    key: str
    folder: Path

    @property
    def name(self) -> str:
        return self.named.name if self.named else FIRST

    def result(self) -> Result | None:
        """What the stage has done. None if it is not done, or was done on other data."""
        try:
            found = Result(**json.loads((self.folder / "done.json").read_text()))
        except (OSError, ValueError, TypeError):
            return None
        return found if found.key == self.key else None

    @property
    def rows(self) -> Path:
        return self.folder / "rows.jsonl.zst"

    @property
    def decisions(self) -> Path:
        return self.folder / "decisions.jsonl.zst"

    @property
    def held(self) -> Path:
        return self.folder / "held.jsonl.zst"


def opened_sources(curation: Curation) -> list[Opened]:
    """The sources of a recipe.

    Raises:
        UserError: one is missing.
    """
    settings = curation.settings
    return [open_source(one, settings.seed, settings.longest_row) for one in settings.sources]


def planned(curation: Curation, opened: Sequence[Opened]) -> list[Step]:
    """The stages with their folders, the first one included."""
    settings = curation.settings
    sources = [[one.settings.model_dump(mode="json"), one.content] for one in opened]
    key = _hash(
        [__version__, RULES, settings.seed, settings.bad_rows, settings.longest_row, sources]
    )
    work = curation.out / "work"
    steps = [Step(None, key, work / f"00-{FIRST}")]
    recipe = find_recipe(settings.recipe) if settings.recipe else None
    context = Context(settings.seed, None, settings.recipe)
    for number, named in enumerate(curation.stages, start=1):
        values = named.stage.model_dump(mode="json")
        named_files = [*_files_in([values, str(recipe or "")]), *_code_files(named.kind)]
        files = [file_hash(file) for file in named_files]
        kind = named.kind if named.kind in STAGES else named.kind.rpartition(":")[2]
        key = _hash([key, kind, named.name, values, files, named.stage.depends_on(context)])
        steps.append(Step(named, key, work / f"{number:02d}-{named.name}"))
    return steps


def _code_files(kind: str) -> list[Path]:
    """Files of a user's stage: its file and what that imports from its folder, or those of the
    top folder of its package, with all that is below.
    """
    source = kind.rpartition(":")[0]
    if not source:
        return []
    if not source.endswith(".py"):
        spec = module_spec(source)
        if not spec or not spec.origin or not Path(spec.origin).is_file():
            return []
        top = module_spec(source.partition(".")[0])
        if top and (folders := top.submodule_search_locations):
            return sorted(path for one in folders for path in Path(one).rglob("*.py"))
        source = spec.origin
    finder = _Imports(path=[str(Path(source).parent)])
    finder.run_script(source)
    places = (vars(one)["__file__"] for one in finder.modules.values())
    return sorted(Path(place) for place in places if place)


class _Imports(ModuleFinder):
    """Follows imports, also into folders without `__init__.py`, which have no loader."""

    def find_module(
        self, name: str, path: Any, parent: Any = None
    ) -> tuple[IO[Any] | None, str | None, Any]:
        try:
            return super().find_module(name, path, parent)
        except AttributeError:
            (folder,) = (Path(one) / name for one in path or self.path)
            return None, str(folder), ("", "", _PACKAGE)

    def load_package(self, fqname: str, pathname: str) -> Any:
        if (Path(pathname) / "__init__.py").is_file():
            return super().load_package(fqname, pathname)
        module: Any = self.add_module(fqname)
        module.__path__ = [pathname]
        return module


def _files_in(value: Any) -> Iterator[Path]:
    """Files that settings name, also as file.py:Class."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for one in value:
            yield from _files_in(one)
    elif isinstance(value, str) and value and len(value) < 1000 and "\0" not in value:
        names = (value, value.rpartition(":")[0])
        found = (path for name in names if name and (path := Path(name).expanduser()).is_file())
        yield from found


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


@contextmanager
def locked(curation: Curation) -> Iterator[None]:
    """Context in which no other process writes the data set.

    Raises:
        UserError: another one does, or the folder has something else.
    """
    out = curation.out
    _check_folder(out, curation.settings.name)
    work = out / "work"
    with disk_errors(f"cannot write {work}"):
        work.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(work / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(
                f"another process writes {out}: wait for it, or choose another folder (--out)"
            ) from error
        write_text_atomic(work / "name", curation.settings.name + "\n")
        faultpoint("curation.begun")
        yield
    finally:
        os.close(descriptor)


def _check_folder(out: Path, name: str) -> None:
    """Refuse a folder that holds anything but this data set."""
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file: choose another folder (--out)")
    mark = out / "work" / "name"
    if mark.is_file():
        other = mark.read_text().strip()
        if other != name:
            raise UserError(
                f"{out} holds the data set {other!r}, and this one is {name!r}: choose another"
                " folder (--out)"
            )
    elif out.is_dir() and any(path.name != "work" for path in out.iterdir()):
        raise UserError(
            f"{out} holds something else than a data set of this command: choose another folder"
            " (--out)"
        )


def run_stages(
    curation: Curation, opened: Sequence[Opened], steps: Sequence[Step], shown: Shown
) -> list[Result]:
    """Run the stages that are not done.

    Raises:
        UserError: bad input.
    """
    _remove_others(curation.out / "work", steps)
    results: list[Result] = []
    rows: StoredRows | None = None
    for step in steps:
        result = step.result()
        shown.begin(step.name, len(rows) if rows is not None else 0)
        again, numbers = result is None, None
        if result is None:
            _start(step)
            if rows is None or step.named is None:
                result = _read(curation, opened, step, shown)
            else:
                result, numbers = _decide(curation, step, step.named, rows, shown)
            with disk_errors(f"cannot write {step.folder}"):
                write_json_atomic(step.folder / "done.json", asdict(result))
            faultpoint("curation.done")
        shown.end(result, again)
        results.append(result)
        rows = StoredRows(step.rows, result.kept, numbers)
    return results


def _remove_others(work: Path, steps: Sequence[Step]) -> None:
    """Remove folders of stages that the recipe no longer has."""
    with disk_errors(f"cannot clear {work}"):
        for folder in work.iterdir():
            if folder.is_dir() and folder not in {step.folder for step in steps}:
                shutil.rmtree(folder)


def _start(step: Step) -> None:
    """Make the folder of a stage. What the stage keeps stays only if it was for the same data."""
    mark = step.folder / "key"
    with disk_errors(f"cannot write {step.folder}"):
        if not mark.is_file() or mark.read_text() != step.key:
            if step.folder.exists():
                shutil.rmtree(step.folder)
            (step.folder / "own").mkdir(parents=True)
            write_text_atomic(mark, step.key)
    faultpoint("curation.started")


def _read(curation: Curation, opened: Sequence[Opened], step: Step, shown: Shown) -> Result:
    settings = curation.settings
    with LineWriter(step.rows) as rows, LineWriter(step.decisions) as origins:
        refuse = settings.bad_rows == "refuse"
        reader = SourceReader(rows, origins, settings.longest_row, refuse, shown.advance)
        for source in opened:
            reader.read(source)
    health = _json_health(reader.health())
    return Result(
        FIRST, FIRST, step.key, origins.lines, rows.lines, dict(reader.bad), {}, origins.lines, 0,
        health.metric, _number(health.value), health.alarm, health.figures, reader.examples,
        reader.origins,
    )  # fmt: skip


def _decide(
    curation: Curation, step: Step, named: NamedStage, rows: StoredRows, shown: Shown
) -> tuple[Result, Sequence[int]]:
    """Run a stage. Returns what it has done, and the numbers of the rows that go on."""
    settings = curation.settings
    context = Context(settings.seed, step.folder / "own", settings.recipe, shown.prepare)
    own = named.kind not in STAGES
    with (
        LineWriter(step.rows) as kept,
        LineWriter(step.decisions) as decisions,
        LineWriter(step.held) as held,
    ):
        written = _Written(kept, decisions, held, rows)
        try:
            health = _run(named, rows, context, written, shown)
        except BaseException as error:
            if isinstance(error, UserError) or not own or not is_fault(error):
                raise
            raise UserError(f"stage {named.name!r} ({named.kind}): {one_line(error)}") from error
    result = Result(
        named.name, named.kind, step.key, len(rows), kept.lines, dict(written.dropped),
        dict(written.noted), decisions.lines, held.lines, health.metric, _number(health.value),
        health.alarm, health.figures, written.examples,
        [(*origin, count) for origin, count in written.origins.items()],
    )  # fmt: skip
    return result, written.numbers


def _run(
    named: NamedStage, rows: StoredRows, context: Context, written: _Written, shown: Shown
) -> Health:
    """Take the decisions of a stage, and return its health."""
    run = named.stage.decide(rows, context)
    while True:
        try:
            decision = next(run)
        except StopIteration as end:
            written.check_complete(named.name)
            if not isinstance(end.value, Health):
                raise TypeError("a stage returns its Health") from None
            return _json_health(end.value)
        written.take(decision)
        shown.advance(1)


class _Written:
    """Writes the decisions of a stage.

    Args:
        kept: receives the rows that go on.
        decisions: receives [number, id, kept, reason, note] of decisions that say something.
        held: receives dropped rows that are tried again later.
        rows: the rows that the stage decides.
    """

    def __init__(
        self, kept: LineWriter, decisions: LineWriter, held: LineWriter, rows: StoredRows
    ) -> None:
        self._kept = kept
        self._decisions = decisions
        self._held = held
        self._expected = rows.numbers
        self._at = 0
        self.numbers = array("q")
        self.dropped: Counter[str] = Counter()
        self.noted: Counter[str] = Counter()
        self.examples: list[dict[str, str]] = []
        self._shown: Counter[tuple[bool, str]] = Counter()
        self._ids: set[str] = set()
        self.origins: Counter[tuple[str, str]] = Counter()

    def take(self, decision: Decision) -> None:
        """Write a decision.

        Raises:
            ValueError: it is not about the next row.
        """
        record, kept, reason = decision.record, decision.kept, decision.reason
        if self._at < len(self._expected) and self._expected[self._at] == record.number:
            self._at += 1
            self._ids.clear()
        elif not (kept and self._at and self._expected[self._at - 1] == record.number):
            raise ValueError(f"{record.where}: a stage decides about each row, in their order")
        if kept:
            if record.id in self._ids:
                raise ValueError(f"{record.where}: two rows with the id {record.id}")
            self._ids.add(record.id)
            self.origins[record.source, str(record.fields.get("licence") or "")] += 1
            self._kept.write_line(stored(record))
            self.numbers.append(record.number)
        elif reason.startswith(_HELD):
            self._held.write_line(stored(record))
        if not kept or reason or decision.note:
            counts = self.noted if kept else self.dropped
            counts[reason or "no reason given"] += 1
            self._decisions.write([record.number, record.id, kept, reason, decision.note])
            self._example(decision, record)

    def _example(self, decision: Decision, record: Record) -> None:
        self._shown[decision.kept, decision.reason] += 1
        if self._shown[decision.kept, decision.reason] <= EXAMPLES:
            text = record.prompt[:_EXCERPT] + "…" * (len(record.prompt) > _EXCERPT)
            self.examples.append(
                {"reason": decision.reason, "id": record.id, "text": text, "note": decision.note}
            )

    def check_complete(self, name: str) -> None:
        if self._at < len(self._expected):
            raise ValueError(
                f"stage {name!r} has decided about {self._at} of {len(self._expected)} rows"
            )


def _json_health(health: Health) -> Health:
    """The health with figures that JSON can hold: NaN becomes null.

    Raises:
        TypeError: something of it has no form in JSON, or another type.
    """
    for name in ("metric", "alarm"):
        if not isinstance(getattr(health, name), str):
            raise TypeError(f"{name} of Health is text, got {getattr(health, name)!r}")
    found = replace(health, value=float(health.value), figures=_finite(health.figures))
    json_text(found.figures)
    return found


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): _finite(one) for key, one in value.items()}
    return [_finite(one) for one in value] if isinstance(value, list | tuple) else value


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
