"""Prompts of evaluations, which training data must not contain."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict

from sixfold.data.columns import MISSING, lookup
from sixfold.data.files import Row, is_file_name, read_file
from sixfold.errors import UserError, nearest

_PROMPTS = ("prompt", "problem", "question", "instruction", "input", "query", "messages", "text")


class Evaluation(BaseModel):
    """An evaluation: a file, or a data set of the hub.

    Args:
        data: file or hub id.
        name: name in notes. "": `data`.
        subset: configuration of a hub data set.
        split: split of a hub data set.
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
    rows = _rows(evaluation)
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
    return [EvaluationRow(f"{label}/{row.number}", _prompt(row, field)) for row in rows]


def _rows(evaluation: Evaluation) -> list[Row]:
    if is_file_name(evaluation.data) or Path(evaluation.data).is_file():
        return read_file(Path(evaluation.data), 0, 0)
    from sixfold.data.hub import read_dataset
    from sixfold.recipe.schema import DataConfig

    data = DataConfig(source=evaluation.data, subset=evaluation.subset, split=evaluation.split)
    return read_dataset(data, [evaluation.split], 0)[0][evaluation.split]


def _prompt(row: Row, field: str) -> str:
    found = lookup(row.fields, field)
    if found is MISSING:
        raise UserError(
            f"{row.where}: no column {field!r} with the prompt.{nearest(field, list(row.fields))}"
        )
    text = prompt_text(found)
    if not text.strip():
        raise UserError(f"{row.where}: no text in the column {field!r} with the prompt")
    return text


def prompt_text(value: Any) -> str:
    """Text of a prompt, which may be a list of chat messages: what the user says."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        return ""
    said = [
        str(message.get("content") or message.get("value") or "")
        for message in value
        if isinstance(message, Mapping)
        and (message.get("role") or message.get("from")) in ("user", "human")
    ]
    return "\n".join(said)
