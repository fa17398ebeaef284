"""Documents for pretraining: text files, rows with a text, and tasks with a worked solution.

Invariants: the same settings and seed give the same documents in the same order. No training
document is also held out, and none is a task that `sources.load_tasks` holds out: it draws them by
the same hash. Notes report what was dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..environment.episodes import library_of
from ..environment.registry import SOURCES
from ..errors import UserError
from ..recipe.schema import DataConfig
from ..types import Task
from .columns import lookup
from .files import Row, draw, read_text, text_files
from .json_text import json_type
from .rows import check_value, require
from .sources import as_tasks, check_local, read_source, read_splits, section_of
from .task_set import drawn_tasks, prompt_key


@dataclass(frozen=True)
class Document:
    """A text to train on.

    Args:
        id: unique name: a file below the source, split and number of a row, or the id of a task.
        text: the text. Of a task: its prompt and its worked solution, without a chat template.
        task: the task that the renderer writes out as the document. None: the document is `text`.
    """

    id: str
    text: str
    task: Task | None = None


@dataclass
class TextSet:
    """Documents to train on, and documents that are never trained on.

    Args:
        notes: messages for the user, one line each, such as dropped documents.
        hub_commits: commit of each hub dataset by its id.
    """

    train: list[Document] = field(default_factory=list)
    heldout: list[Document] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    hub_commits: dict[str, str] = field(default_factory=dict)


def load_texts(data: DataConfig, text_field: str, *, seed: int) -> TextSet:
    """The documents of a recipe. Those of several sources follow each other.

    Args:
        data: the recipe's [data] section.
        text_field: column with the text, in sources with rows.
        seed: draws the held-out documents and, with a limit, the documents.

    Raises:
        UserError: if a source is missing, empty or malformed. Names file and line where possible.
    """
    made = TextSet()
    for source in data.sources:
        if source.weight != 1:
            raise UserError(
                f"data.sources: the weight of {source.label!r} has no effect on texts: windows are"
                " drawn from all of them alike. Remove it"
            )
        read = _read(section_of(source, data), text_field, seed, f"{source.label}/")
        made.train += read.train
        made.heldout += read.heldout
        made.notes += [f"{source.label}: {note}" for note in read.notes]
        made.hub_commits |= read.hub_commits
    if not data.sources:
        made = _read(data, text_field, seed)
    if made.heldout or not data.heldout:
        return _disjoint(made)
    if len(made.train) == 1 and made.train[0].task is None:
        return _last_tenth(made)
    return _disjoint(_set_aside(made, data.heldout, seed))


def _read(data: DataConfig, text_field: str, seed: int, prefix: str = "") -> TextSet:
    """Documents of one source. Those of splits that are named as held out are `heldout`."""
    if data.source in SOURCES or library_of(data.source):
        found = read_source(data, seed, as_tasks(()))
        (train, lost), (heldout, also) = map(_worked, (found.train, found.heldout))
        notes = [*found.notes, *_left_out(lost + also, "tasks have no worked solution")]
        made = TextSet(train, heldout, notes)
    elif files := text_files(data.source):
        check_local(data)
        held = _heldout_files(data) if data.heldout_split else []
        files = draw(files, data.limit, seed)
        made = _nonempty(_of_files(files, data.source), _of_files(held, data.heldout_split))
    else:
        splits, commit = read_splits(data, seed)
        read = [_of_rows(rows, text_field, name) for name, rows in splits.items()]
        made = _nonempty(read[0], read[1] if data.heldout_split else [])
        made.hub_commits = {data.source: commit} if commit else {}
    if not made.train:
        raise UserError(f"data.source = {data.source!r} has no text: {'; '.join(made.notes)}")
    for part in (made.train, made.heldout):
        part[:] = [Document(prefix + one.id, one.text, one.task) for one in part]
    return made


def _worked(tasks: Sequence[Task]) -> tuple[list[Document], int]:
    """Documents of the tasks that have a trace or an answer, and the number of the others."""
    made = []
    for task in tasks:
        if task.trace or task.answer is not None:
            worked = task.worked
            text = worked if isinstance(worked, str) else "".join(worked)
            made.append(Document(task.id, task.prompt_text + text, task))
    return made, len(tasks) - len(made)


def _heldout_files(data: DataConfig) -> list[Path]:
    """The text files that `data.heldout_split` names."""
    files = text_files(data.heldout_split)
    if not files:
        raise UserError(
            f"{data.source} has no splits: data.heldout_split is another .txt file or a folder of"
            f" them, or empty, not {data.heldout_split!r}"
        )
    return files


def _of_files(files: Sequence[Path], source: str) -> list[Document]:
    """The documents in files. Their ids, which decide what is held out, do not say where the source
    is.
    """
    below = Path(source) if Path(source).is_dir() else Path(source).parent
    return [Document(path.relative_to(below).as_posix(), read_text(path)) for path in files]


def _of_rows(rows: Sequence[Row], text_field: str, split: str) -> list[Document]:
    if not rows:
        raise UserError(f"split {split!r} of the dataset has 0 rows")
    require(rows, "pretrain.text_field", text_field)
    made = []
    for row in rows:
        text = lookup(row.fields, text_field)
        if not isinstance(text, str | None):
            raise UserError(
                f"{row.where}: {text_field!r} must be text, got {json_type(text)}."
                " pretrain.text_field names another column"
            )
        check_value(row.where, text_field, text)
        made.append(Document(f"{split}-{row.number}", text or ""))
    return made


def _nonempty(train: Sequence[Document], heldout: Sequence[Document]) -> TextSet:
    """The documents that are more than white space, and a note about the others."""
    kept = [[one for one in part if one.text.strip()] for part in (train, heldout)]
    lost = len(train) + len(heldout) - len(kept[0]) - len(kept[1])
    return TextSet(kept[0], kept[1], _left_out(lost, "documents are empty"))


def _left_out(count: int, what: str) -> list[str]:
    return [f"{count} {what} and are left out"] if count else []


def _last_tenth(made: TextSet) -> TextSet:
    """Hold out the end of the only document."""
    (whole,) = made.train
    cut = max(1, len(whole.text) * 9 // 10)
    made.train = [Document(whole.id, whole.text[:cut])]
    made.heldout = [Document(f"{whole.id} (last tenth)", whole.text[cut:])]
    made.notes.append(
        f"{whole.id} is the only document: its last tenth, {len(whole.text) - cut:,} characters, is"
        " held out"
    )
    return made


def _set_aside(made: TextSet, count: int, seed: int) -> TextSet:
    """Hold out the `count` documents whose hash of seed and id is smallest."""
    if count >= len(made.train):
        raise UserError(
            f"data.heldout = {count} of {len(made.train)} documents leaves none to train on: lower"
            " it"
        )
    made.heldout = drawn_tasks(made.train, count, seed)
    chosen = {one.id for one in made.heldout}
    made.train = [one for one in made.train if one.id not in chosen]
    return made


def _disjoint(made: TextSet) -> TextSet:
    """Drop training documents that are also held out. A note says how many."""
    held = {_key(one) for one in made.heldout}
    kept = [one for one in made.train if _key(one) not in held]
    if not kept:
        raise UserError("all training documents are also held out: name other texts in [data]")
    lost = len(made.train) - len(kept)
    made.notes += _left_out(lost, "training documents also occur in the held-out ones")
    made.train = kept
    return made


def _key(document: Document) -> str:
    return prompt_key(document.task) if document.task else document.text
