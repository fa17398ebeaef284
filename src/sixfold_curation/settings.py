"""The recipe of a data set: a TOML file with sources and stages."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from sixfold.environment.named import Named
from sixfold.errors import UserError, nearest
from sixfold.recipe.find import read_recipe_file
from sixfold.recipe.keys import shown
from sixfold.recipe.schema.base import NAME, PATTERNS, Section, knob
from sixfold.recipe.toml_lines import TomlText, syntax_error

from .kinds import STAGES
from .stage import Stage

Origin = Literal["human", "public", "synthetic", "logged"]
"""Where rows come from: written by people for this purpose, published, made by a model or a
program, or logged from users or scraped.
"""

_LONGEST_ROW = 32 << 20
_KINDS = Named("kind of stage", "Class", STAGES)


class SourceSettings(Section):
    """One source: an entry of [[sources]]."""

    label: str = Field(description="name of the source in ids and reports", pattern=NAME)
    data: str = Field(
        description="a .jsonl/.json/.csv/.tsv/.parquet file (or .gz of it), a folder of them, a hub"
        " id, or the name of a generator such as arithmetic",
        min_length=1,
    )
    origin: Origin = Field(
        description="human (written for this purpose), public (published), synthetic (made by a"
        " model or a program) or logged (from users, or scraped)"
    )
    licence: str = knob("", "licence of all rows, such as apache-2.0; unknown if it is not known")
    licence_field: str = knob("", "column with the licence of each row")
    reader: str = knob("auto", "form of the rows; auto: recognised by their columns")
    split: str = knob("train", "split of a hub data set or of a folder")
    subset: str = knob("", "configuration name of a hub data set")
    revision: str = knob("", "branch, tag or commit of a hub data set")
    limit: int = knob(0, "number of rows, drawn by the seed from all of them (0: all)", ge=0)
    prompt_field: str = knob("", "column with the prompt (empty: that of the form)")
    answer_field: str = knob("", "column with the reference answer (empty: that of the form)")
    answer_after: str = knob("", "marker in the answer column: the answer is what follows it")
    id_field: str = knob("", "column with an id per row (empty: that of the form)")
    columns: tuple[str, ...] = knob((), "other columns to keep (empty: all)")
    options: dict[str, Any] = knob({}, "settings of a generator, as in [data] of a recipe")


class Settings(Section):
    """A recipe as it is written, with its stages unread."""

    name: str = Field(description="name of the data set", pattern=NAME)
    seed: int = knob(0, "seed of everything that is drawn", ge=0)
    recipe: str = knob(
        "", "training recipe whose verifier, columns and model stages use: a file or shipped name"
    )
    out: str = knob("", "folder of the data set (empty: data/NAME)")
    format: Literal["jsonl", "parquet"] = knob("jsonl", "format of the rows")
    bad_rows: Literal["drop", "refuse"] = knob(
        "drop", "what happens to a row that cannot be read: drop (it is counted), or refuse"
    )
    longest_row: int = knob(_LONGEST_ROW, "maximum bytes of a row, as JSON", ge=1)
    sources: tuple[SourceSettings, ...] = Field(description="list of sources")
    stages: tuple[dict[str, Any], ...] = knob((), "list of stages")


@dataclass(frozen=True)
class NamedStage:
    """A stage of a recipe.

    Attributes:
        name: unique among the stages.
        kind: the kind, as the recipe has it.
        stage: the stage with its settings.
    """

    name: str
    kind: str
    stage: Stage


@dataclass(frozen=True)
class Curation:
    """A recipe whose settings are checked.

    Attributes:
        settings: all settings. Those of stages are as they are written.
        stages: the stages.
    """

    settings: Settings
    stages: tuple[NamedStage, ...]

    @property
    def out(self) -> Path:
        return Path(self.settings.out or f"data/{self.settings.name}").expanduser()


Place = Callable[[str], str]
"""File and line of a key."""


def read_curation(path: Path, changes: Sequence[str] = ()) -> Curation:
    """Read a recipe of a data set.

    Args:
        path: the TOML file.
        changes: settings KEY=VALUE that take precedence: seed, sources.LABEL.KEY,
            stages.NAME.KEY.

    Raises:
        UserError: for any mistake, with the line of the file.
    """
    text = read_recipe_file(path.expanduser())
    try:
        asked: dict[str, Any] = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(syntax_error(text, str(path), error)) from error
    for change in changes:
        _change(asked, change)
    file = TomlText(text, str(path))
    _check_tables(asked, file)
    settings: Settings = _validated(Settings, asked, file.place, file)
    _check_sources(settings.sources, file)
    return Curation(settings, _stages(settings.stages, file))


def _change(asked: dict[str, Any], change: str) -> None:
    """Put KEY=VALUE into the values of a file."""
    key, equals, text = change.partition("=")
    if not equals or not key.strip():
        raise UserError(f"--set {change}: expected KEY=VALUE, such as seed=1")
    try:
        parsed = tomllib.loads(f"value = {text}")
        value = parsed["value"] if len(parsed) == 1 else text
    except (ValueError, RecursionError):
        value = text
    first, *rest = key.strip().split(".")
    if first not in ("sources", "stages"):
        asked[key.strip()] = value
        return
    tables = asked.get(first)
    names = _names(tables if isinstance(tables, list) else [], first)
    # A name may have dots.
    found = [name for name in names if ".".join(rest).startswith(f"{name}.")]
    if not found:
        raise UserError(
            f"--set {change}: expected {first}.NAME.KEY=VALUE, where NAME is one of"
            f" {', '.join(names)}.{nearest(rest[0] if rest else '', names)}"
        )
    name = max(found, key=len)
    asked[first][names.index(name)][".".join(rest).removeprefix(f"{name}.")] = value


def _names(tables: Sequence[Any], kind: str) -> list[str]:
    """Names of the tables of a list: labels of sources, names or kinds of stages."""
    entries = [table if isinstance(table, dict) else {} for table in tables]
    if kind == "sources":
        return [str(one.get("label", "")) for one in entries]
    return [str(one.get("name", _KINDS.name(str(one.get("kind", ""))))) for one in entries]


def _check_tables(asked: Mapping[str, Any], file: TomlText) -> None:
    """Refuse lists that are not written as tables, and a recipe without a source."""
    for name in ("sources", "stages"):
        tables = asked.get(name, [])
        if not isinstance(tables, list) or not all(isinstance(one, dict) for one in tables):
            raise UserError(f"{name}: expected tables [[{name}]] ({file.place(name)})")
    if not asked.get("sources"):
        raise UserError(
            f"{file.where} has no source. Add a table [[sources]] with label, data, origin and"
            " licence"
        )


def _check_sources(sources: Sequence[SourceSettings], file: TomlText) -> None:
    labels = [source.label for source in sources]
    for number, source in enumerate(sources):
        place = file.places_in("sources", number)
        if labels.index(source.label) != number:
            raise UserError(
                f"two sources have the label {source.label!r}: change one ({place('label')})"
            )
        if bool(source.licence.strip()) == bool(source.licence_field):
            raise UserError(
                f"source {source.label!r} needs either licence, such as 'apache-2.0' ('unknown' if"
                " it is not known), or licence_field, a column with the licence of each row"
                f" ({place('licence')})"
            )


def _stages(tables: Sequence[Mapping[str, Any]], file: TomlText) -> tuple[NamedStage, ...]:
    found: list[NamedStage] = []
    for number, table in enumerate(tables):
        place = file.places_in("stages", number)
        values = dict(table)
        kind, name = values.pop("kind", None), values.pop("name", None)
        if not isinstance(kind, str):
            raise UserError(
                f"stage {number + 1} has no kind. Use {', '.join(STAGES)} or {_KINDS.forms}"
                f" ({place('')})"
            )
        try:
            made: Any = _KINDS.load(kind)
        except UserError as error:
            raise UserError(f"{error} ({place('kind')})") from error
        if not (isinstance(made, type) and issubclass(made, Stage)):
            raise UserError(f"{kind} is no subclass of {Stage.__module__}.Stage ({place('kind')})")
        name = _KINDS.name(kind) if name is None else name
        if not isinstance(name, str) or not name or any(name == one.name for one in found):
            raise UserError(
                f"stage {number + 1} needs a name of its own: add name = '{kind}-{number + 1}'"
                f" ({place('name')})"
            )
        found.append(NamedStage(name, kind, _validated(made, values, place, None)))
    return tuple(found)


def _validated(made: Any, values: Mapping[str, Any], place: Place, file: TomlText | None) -> Any:
    """An object of a class of settings.

    Args:
        made: the class.
        values: what the file has.
        place: place of a key.
        file: the whole file, if entries of its lists have places of their own.
    """
    _check_names(made, values, place)
    for number, entry in enumerate(values.get("sources", ()) if file else ()):
        _check_names(SourceSettings, entry, file.places_in("sources", number))  # type: ignore[union-attr]
    try:
        # JSON mode is strict, but accepts a list as a tuple. Dates of TOML have no JSON form.
        text = json.dumps(values, default=lambda date: {"date": str(date)})
        return made.model_validate_json(text, strict=True)
    except ValidationError as invalid:
        error = invalid.errors(include_url=False)[0]
        location = error["loc"]
        if file and location[:1] == ("sources",) and len(location) > 1:
            place, location = file.places_in("sources", int(location[1])), location[2:]
        key = ".".join(map(str, location))
        raise UserError(f"{_said(error, key)} ({place(key)})") from invalid


def _check_names(made: Any, values: Mapping[str, Any], place: Place) -> None:
    """Refuse unknown keys and missing ones, with the nearest name and the reason."""
    names = list(made.model_fields)
    for name in values:
        if name not in names:
            known = nearest(name, names) or f" Settings: {', '.join(names)}"
            raise UserError(f"unknown key '{name}'.{known} ({place(name)})")
    for name, field in made.model_fields.items():
        if field.is_required() and name not in values:
            about = f": {field.description}" if field.description else ""
            of = f" of source {values['label']!r}" if "label" in values else ""
            raise UserError(f"{name}{of} is missing{about} ({place('')})")


def _said(error: Any, key: str) -> str:
    """Pydantic's message, with the key and the refused value."""
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "string_pattern_mismatch":
        message = f"expected text {PATTERNS.get(error['ctx']['pattern'], '')}"
    message = message[:1].lower() + message[1:]
    return f"{key}: {message}, got {shown(error['input'])}" if key else message
