"""Forms of preference rows: which columns hold the completions, and how they are graded.

A completion is preferred to another of its prompt exactly if its grade is larger.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from decimal import Decimal
from typing import Any, Literal, NamedTuple

from ..errors import UserError
from ..recipe.preference_plan import READ_BY
from ..recipe.schema import ComparisonsConfig
from .columns import MISSING, lookup
from .files import Row
from .json_text import json_type, parse_json
from .prompts import column_value

Kind = Literal[
    "empty", "prompt", "unscored", "equal", "tie", "duplicate", "overlong", "equal_after_cut"
]
"""Why a comparison, or a completion, is left out.

- empty: a completion, or a turn before it, has no text.
- prompt: the completions do not answer one prompt.
- unscored: a completion has no score or verdict, or a pair no margin.
- equal: all completions are equal.
- tie: no completion is better than another.
- duplicate: a completion is equal to an earlier one of its prompt. Only the completion is left out.
- overlong: a completion does not fit, with its prompt.
- equal_after_cut: completions differ only in the part that `comparisons.truncate` cuts.
"""


class NoPair(Exception):
    """A row is no comparison.

    Args:
        kind: why it is left out.
        reason: what is wrong, for error messages.
    """

    def __init__(self, kind: Kind, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


class Graded(NamedTuple):
    """A completion as it is stored.

    Attributes:
        column: where it stands, for error messages.
        value: text, a message, or a list of messages.
        grade: larger for better completions.
    """

    column: str
    value: Any
    grade: float


class Columns(NamedTuple):
    """Form of the rows of a split, and the columns that it reads."""

    form: str
    names: tuple[str, ...]


_LABELLED = (
    ("completion_A", "completion_B", "label"),
    ("response_a", "response_b", "winner"),
    ("conversation_a", "conversation_b", "winner"),
)
_A, _B, _TIE = (1.0, 0.0), (0.0, 1.0), (0.0, 0.0)
_VERDICTS = {
    **{"a": _A, "model_a": _A, "b": _B, "model_b": _B},
    **dict.fromkeys(("tie", "both_bad", "bothbad", "tie (bothbad)"), _TIE),
}
_LIKED = {"true": 1.0, "1": 1.0, "1.0": 1.0, "false": 0.0, "0": 0.0, "0.0": 0.0}
_SCORES = ("reward", "score", "rank")
_SMALLER_IS_BETTER = ("rank", "ranks", "ranking", "rankings")
_NULL = (None, "")  # JSON, CSV
_MARGIN = ComparisonsConfig.model_fields["margin_field"].default


def recognise(row: Row, config: ComparisonsConfig, alone: bool = True) -> Columns:
    """Form of a split, judged by its first row.

    Args:
        row: the first row.
        config: the recipe's [comparisons] section.
        alone: False if the recipe has other sources, which may have another form.

    Raises:
        UserError: the row has no columns of the form, or of any form, or the form does not read a
            column that the recipe names.
    """
    one, many = config.completion_field, config.completions_field
    sides = (config.chosen_field, config.rejected_field)
    scores = (config.score_field,) if config.score_field else _SCORES[:2]
    known = [
        ("scored", (one, "reward", "provenance")),  # by a stage of kind `sample`
        ("pair", sides),
        *(("labelled", names) for names in (*_LABELLED, (*sides, config.label_field))),
        ("best_of", (many, "num_correct")),
        ("ranked", (many,)),
        ("unpaired", (one, config.label_field)),
        *(("scored", (one, name)) for name in scores),
    ]
    choices = [Columns(*choice) for choice in known if config.form in ("auto", choice[0])]
    # A table of several forms has every column in every row, and null in those of other forms.
    for absent in ((MISSING, None), (MISSING,)):
        for choice in choices:
            if all(lookup(row.fields, name) not in absent for name in choice.names):
                if alone:
                    _check_read(row, choice.form, config)
                return choice
    wanted = dict.fromkeys(" and ".join(choice.names) for choice in choices)
    raise UserError(
        f"{row.where}: no columns of a comparison (comparisons.form = {config.form!r}): expected"
        f" {', or '.join(wanted)}; row keys: {list(row.fields)}. comparisons.chosen_field,"
        " .rejected_field, .completion_field, .completions_field, .label_field and .score_field"
        " name others"
    )


def _check_read(row: Row, form: str, config: ComparisonsConfig) -> None:
    """Refuse settings that rows of a form do not read."""
    for name, field in ComparisonsConfig.model_fields.items():
        value = getattr(config, name)
        if value == field.default or name not in READ_BY or form in READ_BY[name]:
            continue
        raise UserError(
            f"comparisons.{name} = '{value}' has no effect: {row.where} has the form '{form}', by"
            f" its columns {list(row.fields)}. Remove it, or set comparisons.form to one of"
            f" {', '.join(READ_BY[name])}"
        )


def completions(row: Row, columns: Columns, config: ComparisonsConfig) -> list[Graded]:
    """The completions of a row with their grades.

    Raises:
        UserError: a value has another type or range.
        NoPair: the row is no comparison, but one that may be left out.
    """
    values = [column_value(row, name) for name in columns.names]
    if columns.form == "pair":
        return _pair(row, columns.names, values, config)
    if columns.form in ("best_of", "ranked"):
        return _listed(row, columns, values, config)
    if columns.form == "labelled":
        grades: tuple[float, ...] = _verdict(row, columns.names[2], values[2])
    elif columns.form == "unpaired":
        name, label = columns.names[1], str(values[1]).lower()
        if values[1] in _NULL:
            raise NoPair("unscored", f"{name!r} is null or empty")
        if label not in _LIKED:
            raise UserError(f"{row.where}: {name!r} must be true or false, got {values[1]!r:.60}")
        grades = (_LIKED[label],)
    else:
        grades = (_score(row, columns.names[1], values[1]),)
    return [Graded(*one) for one in zip(columns.names, values, grades, strict=False)]


def _pair(
    row: Row, names: Sequence[str], values: Sequence[Any], config: ComparisonsConfig
) -> list[Graded]:
    """Chosen and rejected completions. Each side may be a list of several texts."""
    margin = column_value(row, config.margin_field)
    if margin is MISSING and config.margin_field != _MARGIN:
        raise UserError(
            f"{row.where}: missing field {config.margin_field!r} (comparisons.margin_field); row"
            f" keys: {list(row.fields)}"
        )
    unsaid = (MISSING, None, "")
    better = 1.0 if margin in unsaid else _number(row, config.margin_field, margin)
    if better < 0:
        raise UserError(
            f"{row.where}: {config.margin_field!r} is {better:g}, but a margin says by how much the"
            " chosen completion is better. Swap the completions, or name another column by"
            " comparisons.margin_field"
        )
    sides = [
        (value if isinstance(value, list) and value and _are_texts(value) else [value])
        for value in values
    ]
    return [
        Graded(name, value, grade)
        for name, side, grade in zip(names, sides, (better, 0.0), strict=True)
        for value in side
    ]


def _listed(
    row: Row, columns: Columns, values: Sequence[Any], config: ComparisonsConfig
) -> list[Graded]:
    """Completions of a list. Each is text, messages, or an object that has them in a field."""
    name = columns.names[0]
    items = _items(row, name, values[0])
    if not isinstance(items, list):
        raise UserError(
            f"{row.where}: {name!r} must be a list of completions, got {json_type(items)}"
        )
    if columns.form == "best_of":
        if values[1] in _NULL:
            raise NoPair("unscored", f"{columns.names[1]!r} is empty")
        right = _number(row, columns.names[1], values[1])  # "1" in CSV, 1.0 of pandas
        if not 0 <= right <= len(items) or right % 1:
            raise UserError(
                f"{row.where}: 'num_correct' must be a number from 0 to {len(items)}, the number"
                f" of completions, got {values[1]!r:.60}"
            )
        grades = [float(at < right) for at in range(len(items))]
    else:
        grades = _scores(row, items, config)
    found = []
    for at, (item, grade) in enumerate(zip(items, grades, strict=True)):
        path = f"{name}.{at}"
        if isinstance(item, Mapping) and not item.keys() & {"role", "from"}:
            path, item = f"{path}.{config.completion_field}", lookup(item, config.completion_field)
            if item is MISSING:
                raise UserError(
                    f"{row.where}: missing field {path!r} (comparisons.completion_field names"
                    f" another); the completion has {list(items[at])}"
                )
        found.append(Graded(path, item, grade))
    return found


def _scores(row: Row, items: Sequence[Any], config: ComparisonsConfig) -> list[float]:
    """Grades of listed completions, from a field of each or from a column with a list of them."""
    for name in (config.score_field,) if config.score_field else _SCORES:
        values = [lookup(one, name) if isinstance(one, Mapping) else MISSING for one in items]
        where = f"{config.completions_field}.*.{name}"
        if all(value is MISSING for value in values):
            columns = [column for column in (name, f"{name}s") if column in row.fields]
            if not columns:
                continue
            where = columns[0]
            listed = _items(row, where, column_value(row, where))
            if not isinstance(listed, list) or len(listed) != len(items):
                raise UserError(
                    f"{row.where}: {where!r} must be a list of {len(items)} numbers, one for each"
                    f" completion, got {str(listed)[:60]}"
                )
            values = listed
        return [_score(row, where, value) for value in values]
    wanted = config.score_field or ", ".join(_SCORES)
    raise UserError(
        f"{row.where}: the completions in {config.completions_field!r} have no {wanted}: neither a"
        " field of each, nor a list beside them. comparisons.score_field names another"
    )


def _items(row: Row, name: str, value: Any) -> Any:
    """The list that a column holds. CSV files hold lists as JSON text."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        return parse_json(f"{row.where}: {name!r}", value)
    return value


def _score(row: Row, name: str, value: Any) -> float:
    """The grade that a score or a rank is."""
    if value is None or value is MISSING:
        raise NoPair("unscored", f"a completion has no number in {name!r}")
    sign = -1 if name.rpartition(".")[2] in _SMALLER_IS_BETTER else 1
    try:
        return sign * _number(row, name, value)
    except UserError:
        if not isinstance(value, str):
            raise
        raise NoPair("unscored", f"{name!r} must be a finite number, got {value!r:.60}") from None


def _verdict(row: Row, name: str, value: Any) -> tuple[float, float]:
    """Grades of A and B."""
    if value in _NULL:
        raise NoPair("unscored", f"{name!r} is null or empty")
    verdict = _VERDICTS.get(str(value).strip().lower())
    if verdict is None:
        raise UserError(
            f"{row.where}: {name!r} must be A, B or Tie (or model_a, model_b, tie), got"
            f" {value!r:.60}"
        )
    return verdict


def _number(row: Row, name: str, value: Any) -> float:
    number = math.nan
    if isinstance(value, int | float | Decimal | str) and not isinstance(value, bool):
        with suppress(ValueError, OverflowError):
            number = float(value)
    if not math.isfinite(number):
        raise UserError(f"{row.where}: {name!r} must be a finite number, got {value!r:.60}")
    return number


def _are_texts(values: Sequence[Any]) -> bool:
    return all(isinstance(value, str) for value in values)
