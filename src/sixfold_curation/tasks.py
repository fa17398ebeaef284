"""Rows as tasks of a training recipe: what its verifier checks and its model reads."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TypeVar

from sixfold.checkpoint.model_source import model_folder, with_model_folders
from sixfold.data.files import Row
from sixfold.data.rows import rows_to_tasks
from sixfold.errors import UserError
from sixfold.recipe.adapter_folder import folder_hash
from sixfold.recipe.dump import flat
from sixfold.recipe.schema import DataConfig, ModelConfig, Recipe
from sixfold.recipe.toml import load_recipe
from sixfold.run.fingerprint import rewards_fingerprint
from sixfold.run.recipe_environment import task_rewards
from sixfold.seeds import seed_bytes
from sixfold.types import Task

from .stage import Context, Record

T = TypeVar("T")

_TEXTS = (".jinja", ".json", ".model", ".txt")
"""Files of a model folder that hold its configuration, tokenizer and chat template."""


def training_recipe(context: Context, kind: str) -> tuple[Recipe, TaskReader]:
    """The training recipe that a stage needs, and the reader of its tasks.

    Args:
        context: names it.
        kind: kind of the stage, for the message.

    Raises:
        UserError: there is none, or it is wrong.
    """
    if not context.recipe:
        raise UserError(
            f"the stage {kind!r} needs the verifier and the model of a training recipe: set"
            " recipe = 'NAME or FILE.toml' at the top of the curation recipe"
        )
    recipe = with_model_folders(load_recipe(context.recipe, ()))
    rewards = task_rewards(recipe.environment, recipe.eval.strict)
    return recipe, TaskReader(recipe.data, rewards)


def verifier_version(context: Context, kind: str) -> str:
    """Hash of the settings of the training recipe and of the code of its rewards."""
    recipe, _ = training_recipe(context, kind)
    environment = recipe.environment
    code = rewards_fingerprint(environment.rewards, environment.reward_model)
    return seed_bytes(json.dumps([flat(recipe), code], default=str), 16, "verifier").hex()


def model_version(path: str, model: ModelConfig) -> str:
    """Hash of the files of a model, or the name of one on the hub.

    Args:
        path: run, checkpoint, folder or hub id. "": the recipe's model.
        model: the recipe's model.
    """
    place = model_folder(path, "model") if path else model.path
    folder = Path(place)
    if not place or not folder.is_dir():
        return f"{place}@{model.revision}"
    texts = [file for file in sorted(folder.iterdir()) if file.suffix in _TEXTS]
    read = "".join(f"{file.name}\0{file.read_bytes().hex()}\0" for file in texts)
    return folder_hash(folder) + seed_bytes(read, 16, "tokenizer").hex()


class TaskReader:
    """Turns rows into tasks, as training on the written rows will.

    The columns are those of a written row. The texts around a prompt come from the recipe.

    Args:
        data: the recipe's [data] section.
        rewards: names of the rewards that check the tasks (`task_rewards`).
    """

    def __init__(self, data: DataConfig, rewards: tuple[str, ...]) -> None:
        fields = DataConfig.model_fields
        written = ("source", "sources", "format", "answer_field", "answer_after", "id_field")
        usual = {name: fields[name].default for name in (*written, "unanswered")}
        self._data = data.model_copy(update={**usual, "prompt_field": "prompt", "source": "rows"})
        self._rewards = rewards

    def read(self, records: Sequence[Record]) -> list[Task | str]:
        """The task of each row, or what is wrong with the row."""
        try:
            return [*self._tasks(records)]
        except UserError:
            return [one for record in records for one in self._alone(record)]

    def _alone(self, record: Record) -> list[Task | str]:
        try:
            return [*self._tasks([record])]
        except UserError as error:
            return [str(error).removeprefix(f"{record.where}: ")]

    def _tasks(self, records: Sequence[Record]) -> list[Task]:
        rows = [Row(one.where, {**one.fields, "id": one.id}, one.number) for one in records]
        data = self._data
        if data.trace_field and not all(data.trace_field in row.fields for row in rows):
            data = data.model_copy(update={"trace_field": ""})
        return rows_to_tasks(rows, data, name="rows", rewards=self._rewards)[0]


def chunks(rows: Iterable[T], size: int) -> Iterator[list[T]]:
    """Rows in lists of this size, the last of which may be shorter."""
    rest = iter(rows)
    while chunk := list(islice(rest, size)):
        yield chunk
