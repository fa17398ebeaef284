"""What a stage of curation is: rows in order, and a decision about each."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

from pydantic import BaseModel, ConfigDict


@dataclass(frozen=True)
class Record:
    """One row of a data set.

    Args:
        number: position among all rows of all sources, counted from 0.
        id: name that no other row has: the source's label, and the row's own id or number.
        source: label of its source.
        where: place for messages, such as "dapo.parquet: row 17".
        prompt: text of the prompt, by which rows are compared.
        answer: text of the reference answer or of the replies. "" if there is none.
        fields: the columns that are written, `id`, `source`, `prompt` and `answer` among them.
    """

    number: int
    id: str
    source: str
    where: str
    prompt: str
    answer: str
    fields: Mapping[str, Any]


@dataclass(frozen=True)
class Decision:
    """What a stage says about a row.

    Args:
        record: the row, as it goes on.
        kept: whether it goes on.
        reason: kind of decision, such as "near_duplicate", by which decisions are counted. "" if
            there is nothing to say.
        note: what it rests on, for this row: "Jaccard 0.91 with dapo/17".
    """

    record: Record
    kept: bool = True
    reason: str = ""
    note: str = ""


@dataclass(frozen=True)
class Health:
    """State of the data after a stage.

    Args:
        metric: name of the one number to watch.
        value: the number. NaN if it cannot be known.
        alarm: what is wrong and what to do, or "".
        figures: other numbers, and small tables, for the report.
    """

    metric: str
    value: float
    alarm: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)


class Rows(Protocol):
    """Rows that may be read more than once. They are not in memory."""

    def __iter__(self) -> Iterator[Record]: ...

    def __len__(self) -> int: ...


@dataclass(frozen=True)
class Context:
    """What stages share.

    Args:
        seed: seed of everything that is drawn.
        folder: a stage may keep here what must not be computed again after a kill. None: nowhere.
        recipe: training recipe whose verifier, columns and model are used, or "".
        progress: called with a number of rows that a long stage has done besides deciding them.
    """

    seed: int = 0
    folder: Path | None = None
    recipe: str = ""
    progress: Callable[[int], None] = lambda rows: None


class Stage(BaseModel):
    """A stage: its settings, and one method.

    A subclass names its `kind` and declares its settings as fields.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: ClassVar[str]

    def decide(self, rows: Rows, context: Context) -> Generator[Decision, None, Health]:
        """Decide about each row, in order.

        Equal rows, settings and seed give equal decisions. Memory does not grow with the size of
        rows, only by some bytes per row.

        Args:
            rows: what the stage before has kept. It may be read more than once.
            context: what stages share.

        Raises:
            UserError: a setting does not fit the rows.
        """
        raise NotImplementedError

    def depends_on(self, context: Context) -> str:
        """Name of what decisions depend on besides rows, settings and files that settings name.

        For example a hash of the weights of a model. If it changes, the stage runs again.

        Args:
            context: what stages share. Its folder is None.
        """
        return ""


def decided(
    stage: Stage, rows: Rows, context: Context | None = None
) -> tuple[list[Decision], Health]:
    """All decisions of a stage, and the state of the data after it."""
    made, run = [], stage.decide(rows, context or Context())
    while True:
        try:
            made.append(next(run))
        except StopIteration as end:
            return made, end.value
