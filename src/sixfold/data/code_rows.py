"""Rows of code benchmarks, and checks of tasks that have tests.

A row of a benchmark (`environment.code.formats`) becomes a row with a prompt, tests, an id and, if
it has one, a reference solution. Its other columns stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..environment.code.formats import FORMATS, read_row, recognised
from ..environment.code.languages import LANGUAGES
from ..environment.code.task_tests import Tests, TestsError
from ..environment.code.verifier import task_tests
from ..errors import UserError
from ..recipe.schema import DataConfig
from ..types import Task
from .columns import MISSING, lookup
from .files import Row

CODE_REWARDS = ("code", "code_fraction")


def benchmark_rows(rows: Sequence[Row], data: DataConfig, rewards: Sequence[str]) -> Sequence[Row]:
    """Rows with the columns that the settings name, whatever benchmark they come from.

    Args:
        rows: rows of one file or split.
        data: names the columns and the format.
        rewards: names of the rewards.

    Raises:
        UserError: for the first row that has not the format.
    """
    if data.format == "rows":
        return rows
    code = any(reward in CODE_REWARDS for reward in rewards)
    return [_benchmark_row(row, data, code) for row in rows]


def _benchmark_row(row: Row, data: DataConfig, code: bool) -> Row:
    name = data.format if data.format in FORMATS else recognised(row.fields)
    has_prompt = lookup(row.fields, data.prompt_field) is not MISSING
    plain = data.format == "auto" and ((has_prompt and not code) or "tests" in row.fields)
    if name is None or plain:
        return row
    try:
        found = read_row(name, row.fields)
    except TestsError as error:
        raise UserError(f"{row.where}: {error} (data.format = '{data.format}')") from error
    fields = {key: value for key, value in row.fields.items() if key not in found.replaced}
    fields[data.prompt_field] = found.prompt
    fields["tests"] = found.tests
    if data.id_field and found.identity:
        fields[data.id_field] = found.identity
    if found.solution is not None:
        fields[data.answer_field] = found.solution
    return replace(row, fields=fields)


def check_code_tasks(tasks: Sequence[Task], rows: Sequence[Row], rewards: Sequence[str]) -> None:
    """Check that every task has tests that can run here, if a code reward needs them.

    Raises:
        UserError: for the first task without tests, with malformed tests, or in a language whose
            compiler is missing.
    """
    reward = next((name for name in rewards if name in CODE_REWARDS), None)
    if reward is None:
        return
    for task, row in zip(tasks, rows, strict=True):
        try:
            tests = task_tests(task.columns.get("tests"))
        except TestsError as error:
            raise UserError(
                f"{row.where}: {error}. Reward '{reward}' needs a column 'tests', or rows of a code"
                " benchmark (data.format). docs/environments.md has the forms"
            ) from error
        if isinstance(tests, Tests) and (missing := LANGUAGES[tests.language].missing):
            raise UserError(f"{row.where}: {missing}")
