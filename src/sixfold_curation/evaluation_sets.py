"""Prompts of evaluations, which training data must not contain."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict

from sixfold.data.columns import MISSING, lookup
from sixfold.data.files import Row
from sixfold.data.messages import stored_messages
from sixfold.environment.registry import SOURCES
from sixfold.errors import UserError, nearest

from .settings import SourceSettings
from .sources import Opened, open_source

_PROMPTS = (
    "prompt", "problem", "question", "instruction", "question_content", "problem_statement",
    "input", "query", "messages", "text",
)  # fmt: skip


class Evaluation(BaseModel):
    """An evaluation: a file, a folder, a data set of the hub, or what a generator makes.

    Args:
        data: file, folder of files, hub id or generator.
        name: name in notes. "": `data`.
        subset: configuration of a hub data set.
        split: split of a hub data set or of a folder.
        prompt_field: column with the prompt. "": the first of the usual names that is there.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    data: str
    name: str = ""
    subset: str = ""
    split: str = "test"
    prompt_field: str = ""


class EvaluationRow(NamedTuple):
    """One prompt of an evaluation, and the name that notes give it."""

    name: str
    prompt: str


def read_evaluation(evaluation: Evaluation) -> list[EvaluationRow]:
    """The prompts of an evaluation.

    Raises:
        UserError: it cannot be read, has no rows, or a row has no prompt.
    """
    rows = [read() for _, read in open_evaluation(evaluation).rows()]
    if not rows:
        raise UserError(f"evaluation {evaluation.data!r} has no rows")
    field = evaluation.prompt_field or next(
        (name for name in _PROMPTS if lookup(rows[0].fields, name) is not MISSING), ""
    )
    if not field:
        raise UserError(
            f"{rows[0].where}: no column of the evaluation is called {', '.join(_PROMPTS)} (it has"
            f" {', '.join(rows[0].fields)}); name the column of prompts by prompt_field"
        )
    label = evaluation.name or Path(evaluation.data).stem
    return [EvaluationRow(f"{label}/{at}", _prompt(row, field)) for at, row in enumerate(rows)]


def open_evaluation(evaluation: Evaluation) -> Opened:
    """Find an evaluation, as a source of a data set is found.

    Raises:
        UserError: there is none.
    """
    given = evaluation.model_dump(include={"data", "subset", "split"})
    if Path(evaluation.data).expanduser().is_file() or evaluation.data in SOURCES:
        del given["split"]
    source = SourceSettings(label="evaluation", origin="public", licence="unknown", **given)
    return open_source(source, 0, 0)


def _prompt(row: Row, field: str) -> str:
    found = lookup(row.fields, field)
    if found is MISSING:
        raise UserError(
            f"{row.where}: no column {field!r} with the prompt.{nearest(field, list(row.fields))}"
        )
    text = _said(row.where, found)
    if not text.strip():
        raise UserError(f"{row.where}: no text in the column {field!r} with the prompt")
    return text


def _said(where: str, value: Any) -> str:
    """Text of a prompt, which may be a list of chat messages, or its JSON: what the user says."""
    value = stored_messages(where, value)
    if isinstance(value, str):
        return value
    said = [one for one in value if _is_user(one)] if isinstance(value, list) else []
    return "\n".join(_text(one.get("content") or one.get("value")) for one in said)


def _text(content: Any) -> str:
    """Text of a message, also beside images."""
    if not isinstance(content, list):
        return content if isinstance(content, str) else ""
    return "".join(str(one.get("text") or "") for one in content if isinstance(one, Mapping))


def _is_user(message: Any) -> bool:
    of_user = ("user", "human")
    return isinstance(message, Mapping) and (message.get("role") or message.get("from")) in of_user
