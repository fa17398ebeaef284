"""Rows of code benchmarks, and checks of tasks that have tests.

A row of a benchmark (`formats`) becomes a row with a prompt, tests, an id and, if it has one, a
reference solution. Its other columns stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sixfold.data.columns import MISSING, lookup
from sixfold.data.files import Row
from sixfold.errors import UserError
from sixfold.recipe.schema import DataConfig

from .formats import FORMATS, CodeRow, read_row, recognise_format
from .languages import LANGUAGES
from .task_tests import Tests, TestsError
from .verifier import task_tests

CODE_REWARDS = ("code", "code_fraction")


def benchmark_rows(
    rows: Sequence[Row], data: DataConfig, rewards: Sequence[str], name: str
) -> tuple[Sequence[Row], list[str]]:
    """Rows with the columns that the settings name, whatever benchmark they come from.

    If there is a code reward, every row has tests that can run here.

    Args:
        rows: rows of one file or split.
        data: names the columns and the format, and says what happens to a row without tests.

    Returns:
        The rows, and a note if rows are left out.

    Raises:
        UserError: for the first row that has not the format, or has no usable tests.
    """
    reward = next((reward for reward in rewards if reward in CODE_REWARDS), "")
    if data.format == "rows" and not reward:
        return rows, []
    kept: list[Row] = []
    problem = ""
    for row in rows:
        try:
            kept.append(_benchmark_row(row, data, reward))
        except TestsError as error:
            problem = f"{row.where}: {error}"
            if data.unanswered == "error":
                raise UserError(f"{problem}. {_remedy(data, reward)}") from error
    if not kept and problem:
        raise UserError(f"{problem}. {_remedy(data, reward)}")
    if len(kept) == len(rows):
        return kept, []
    return kept, [
        f"split '{name}': {len(rows) - len(kept)} of {len(rows)} rows have no usable tests and are"
        f" left out (data.unanswered = 'drop'); the last one: {problem}"
    ]


def _remedy(data: DataConfig, reward: str) -> str:
    drop = "leave such rows out by data.unanswered = 'drop'"
    if reward:
        return (
            f"Reward '{reward}' needs a column 'tests', or rows of a code benchmark (data.format ="
            f" '{data.format}'); docs/verifiers.md has the forms. Correct the row, or {drop}"
        )
    return f"The rows are read as data.format = '{data.format}': use another, or {drop}"


def _benchmark_row(row: Row, data: DataConfig, reward: str) -> Row:
    """The row with a prompt and tests, if it comes from a code benchmark.

    Raises:
        TestsError: if it is malformed, or if there is a reward that needs other tests.
    """
    name = data.format if data.format in FORMATS else recognise_format(row.fields)
    has_prompt = lookup(row.fields, data.prompt_field) is not MISSING
    plain = data.format == "auto" and ((has_prompt and not reward) or "tests" in row.fields)
    if name and not plain and data.format != "rows":
        row = _convert(row, read_row(name, row.fields), data)
    if reward:
        tests = task_tests(row.fields.get("tests"))
        if isinstance(tests, Tests) and (missing := LANGUAGES[tests.language].missing):
            raise UserError(f"{row.where}: {missing}")
    return row


def _convert(row: Row, found: CodeRow, data: DataConfig) -> Row:
    fields = {key: value for key, value in row.fields.items() if key not in found.replaced}
    fields[data.prompt_field] = found.prompt
    fields["tests"] = found.tests
    if data.id_field and found.identity:
        fields[data.id_field] = found.identity
    if found.solution is not None:
        fields[data.answer_field] = found.solution
    return replace(row, fields=fields)
