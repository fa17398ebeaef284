"""Forms of public data sets: which columns hold the prompt and the answer.

`READERS` has one row per form. A form is recognised by its columns.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from functools import partial
from typing import Any, Literal
from uuid import UUID

from sixfold import plugins
from sixfold.data.columns import MISSING, lookup
from sixfold.data.comparison_forms import NoPair, recognise
from sixfold.data.comparisons import row_comparison
from sixfold.data.conversations import NoReply, conversation, recognise_conversation
from sixfold.data.files import Row
from sixfold.data.messages import chat_messages, stored_messages
from sixfold.data.prompts import SYSTEM, column_value, reply_answer
from sixfold.data.rows import ROW_FORMATS
from sixfold.errors import UserError, nearest
from sixfold.recipe.schema import ComparisonsConfig, DataConfig

from .settings import SourceSettings

Kind = Literal[
    "unreadable",
    "missing_column",
    "no_prompt",
    "no_answer",
    "bad_value",
    "too_long",
    "malformed",
    "no_comparison",
    "no_reply",
]
"""Why a row is not read.

- unreadable: no text, JSON, CSV or row of Parquet.
- missing_column: without a column of its form.
- no_prompt: the prompt is empty. no_answer: the answer is.
- bad_value: a value that JSON, or a tokenizer, cannot represent.
- too_long: larger than `longest_row`.
- malformed: another mistake, such as an unknown role of a message.
- no_comparison: no completion is better. no_reply: there is no reply to imitate.
"""


class BadRow(Exception):
    """A row that cannot be read.

    Args:
        kind: why.
        reason: what is wrong, in a sentence without the place.
    """

    def __init__(self, kind: Kind, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


@dataclass(frozen=True)
class Read:
    """What a row says.

    Attributes:
        prompt: text, or messages.
        answer: the reference answer or the reply. None if there is none.
        used: columns that the prompt and the answer replace.
        added: further columns.
        id: the row's own id, or "".
    """

    prompt: Any
    answer: Any = None
    used: tuple[str, ...] = ()
    added: Mapping[str, Any] = field(default_factory=dict)
    id: str = ""


@dataclass(frozen=True)
class Reader:
    """A form of rows.

    Attributes:
        about: data sets that have it, for people.
        columns: columns by which it is recognised. Nested ones are dotted paths.
        read: reads a row. Raises BadRow or UserError.
        fits: further condition on the columns.
        specific: the form of one data set, which is preferred to general ones.
    """

    about: str
    columns: tuple[str, ...]
    read: Callable[[Row, SourceSettings], Read]
    fits: Callable[[Mapping[str, Any]], bool] = lambda fields: True
    specific: bool = True


TASKS = "tasks"
"""Form of the rows of a generator."""

PROMPTS = (
    ("prompt", "question", "problem", "problem_statement", "instruction", "query"),
    ("input", "text"),
)
ANSWERS = (
    ("answer", "ground_truth", "reference_answer", "expected_answer", "final_answer", "target"),
    ("solution", "response", "output", "completion", "label"),
)
"""Columns that are taken for the prompt and the answer, in rows of no known form. The second ones
only if the row has none of the first.
"""

_GSM8K = "####"
_PROOF, _NOT_FOUND = "proof", "notfound"
"""What NuminaMath 1.5 has in place of an answer."""
_IDS = ("id", "uuid", "unique_id", "problem_id", "task_id", "index", "extra_info.index")


def _columns(
    row: Row,
    source: SourceSettings,
    *,
    prompt: str,
    answer: str = "",
    solution: str = "",
    after: str = "",
    identity: str = "",
) -> Read:
    """Read a prompt and an answer from a column each. Settings of the source come first.

    Args:
        row: the row.
        source: settings of its source.
        prompt: column with the prompt.
        answer: column with the answer, or "".
        solution: column with a worked solution, whose last box is the answer if there is no other.
        after: marker in the answer column.
        identity: column with the id.
    """
    prompt = source.prompt_field or prompt
    answer = source.answer_field or answer
    after = source.answer_after or after
    asked, reply = _prompt(row, prompt)
    value = column_value(row, answer) if answer else MISSING
    if value is MISSING and source.answer_field:
        raise BadRow("missing_column", f"no column {answer!r}")
    used, added = [prompt], {}
    if solution and value == _PROOF:
        raise BadRow("no_answer", f"a proof has no answer in {answer!r}")
    if solution and (_blank(value) or value == _NOT_FOUND):
        value = last_box(_text_column(row, solution))
    elif after and not _blank(value):
        whole = value
        value = _after(value, answer, after)
        used, added = [prompt, answer], {"solution": whole}
    elif answer and "." not in answer:
        used = [prompt, answer]
    if _blank(value):
        value = reply
    if _blank(value) and (answer or solution):
        raise BadRow("no_answer", f"no answer in {answer or solution!r}")
    # Otherwise recipes would read them in place of the prompt.
    used += ["messages", "conversations"]
    return Read(
        asked, None if value is MISSING else value, tuple(used), added, _id(row, source, identity)
    )


def _prompt(row: Row, column: str) -> tuple[Any, Any]:
    """The prompt in a column, and the reply that ends it, or None."""
    value = stored_messages(row.where, column_value(row, column))
    if value is MISSING:
        raise BadRow("missing_column", f"no column {column!r}")
    if _blank(value):
        raise BadRow("no_prompt", f"the prompt {column!r} is empty")
    if isinstance(value, str):
        return value, None
    if not isinstance(value, list):
        raise BadRow("malformed", f"{column!r} is neither text nor a list of messages")
    messages: list[Any] = list(chat_messages(row.where, value))
    reply = reply_answer(messages.pop()) if messages[-1]["role"] == "assistant" else None
    if not messages:
        raise BadRow("no_prompt", f"{column!r} has no message before the reply")
    return messages, reply


def _blank(value: Any) -> bool:
    empty = value is MISSING or value is None or value == []
    return empty or (isinstance(value, str) and not value.strip())


def _no_value(value: Any) -> bool:
    return _blank(value) or (isinstance(value, float) and math.isnan(value))


def _text_column(row: Row, column: str) -> str:
    value = column_value(row, column)
    if not isinstance(value, str):
        raise BadRow("no_answer", f"{column!r} is no text")
    return value


def _after(value: Any, column: str, marker: str) -> str:
    if not isinstance(value, str):
        raise BadRow("malformed", f"{column!r} is no text")
    _, found, rest = value.rpartition(marker)
    if not found or not rest.strip():
        raise BadRow("no_answer", f"nothing follows {marker!r} in {column!r}")
    return rest.strip()


def last_box(text: str) -> str | None:
    r"""What stands in the last \boxed{...} of a text. None if there is none that is closed."""
    start = max(text.rfind("\\boxed{"), text.rfind("\\fbox{"))
    if start < 0:
        return None
    first, depth = text.index("{", start) + 1, 1
    for at in range(first, len(text)):
        escaped = text[at - 1] == "\\"
        depth += (text[at] == "{" and not escaped) - (text[at] == "}" and not escaped)
        if not depth:
            return text[first:at].strip()
    return None


def _id(row: Row, source: SourceSettings, column: str = "") -> str:
    """The row's own id, or "". A float such as 3.0, as tables with missing ids have them, is 3.

    Raises:
        BadRow: the column that the user names has no text or number.
    """
    named = source.id_field or column
    names = (named,) if named else _IDS
    value = next((v for name in names if (v := lookup(row.fields, name)) is not MISSING), None)
    if isinstance(value, float):
        value = None if math.isnan(value) else int(value) if value.is_integer() else value
    known = isinstance(value, str | int | float | Decimal | UUID) and not isinstance(value, bool)
    text = str(value) if known else ""
    if not text.strip() and source.id_field:
        raise BadRow("missing_column", f"no id in {source.id_field!r}")
    return text if text.strip() else ""


def _guess(row: Row, source: SourceSettings) -> tuple[str, str]:
    """Columns of the prompt and of the answer ("" if there is none).

    Raises:
        UserError: none, or several, may be the prompt, or several the answer.
    """
    keys = list(row.fields)
    prompts = [source.prompt_field] if source.prompt_field else _among(PROMPTS, keys)
    answers = [source.answer_field] if source.answer_field else _among(ANSWERS, keys)
    for found, setting, least in ((prompts, "prompt_field", 1), (answers, "answer_field", 0)):
        if len(found) > 1:
            raise UserError(
                f"source {source.label!r}: {setting} may be {' or '.join(found)}. Name one"
                f" ({row.where})"
            )
        if len(found) < least:
            raise UserError(
                f"source {source.label!r}: no column is known as the prompt. Set {setting}, or"
                f" reader, one of {', '.join(READERS)}; columns: {', '.join(keys)} ({row.where})"
            )
    return prompts[0], answers[0] if answers else ""


def _among(known: Sequence[Sequence[str]], keys: Sequence[str]) -> list[str]:
    return next((found for names in known if (found := [n for n in names if n in keys])), [])


_SETTINGS, _PAIRS = DataConfig(), ComparisonsConfig()
_RATED = ComparisonsConfig(completion_field="response", score_field="overall_score")
"""Settings by which recipes read UltraFeedback as it was published."""


def _conversation(row: Row, source: SourceSettings) -> Read:
    """Read messages, a prompt with its completion, or an instruction. Their columns stay."""
    settings = _SETTINGS
    if source.prompt_field:
        settings = DataConfig(
            prompt_field=source.prompt_field, answer_field=source.answer_field or "answer"
        )
    form, columns = recognise_conversation(row, settings, "auto")
    try:
        task = conversation(_without_system(row), settings, form, columns, True)
    except NoReply as reason:
        raise BadRow("no_reply", str(reason)) from reason
    identity, system = _id(row, source), _system(row)
    if isinstance(task.prompt, str):
        return Read(task.prompt, task.trace, added=system, id=identity)
    *asked, reply = task.prompt
    whole = len(asked) + (form != "prompt_completion")
    if form != "alpaca" and len(_messages(row, columns[0])) != whole:
        # The prompt has a part of the completion, or messages come after the last reply.
        used, added = (columns[-1], "messages"), {"messages": [*asked, reply], **system}
        return Read(asked, reply_answer(reply), used, added, identity)
    return Read(asked, reply_answer(reply), added=system, id=identity)


def _messages(row: Row, column: str) -> list[Any]:
    value: list[Any] = stored_messages(row.where, column_value(row, column))
    return value


def _last_text(row: Row, column: str) -> str | None:
    """Text of the last message in a column. None if the column has no messages."""
    messages = stored_messages(row.where, column_value(row, column))
    if not (messages and isinstance(messages, list)):
        return None
    return chat_messages(row.where, messages[-1:])[0]["content"].strip()


def _system(row: Row) -> dict[str, Any]:
    """The column `system`, which is a part of the prompt also if `columns` does not name it."""
    value = column_value(row, SYSTEM)
    return {} if value is MISSING else {SYSTEM: value}


def _without_system(row: Row) -> Row:
    """The row without its column `system`, which recipes read beside the prompt."""
    return replace(row, fields={k: v for k, v in row.fields.items() if k != SYSTEM})


def _comparison(row: Row, source: SourceSettings) -> Read:
    """Read completions of which some are better. Two become `chosen` and `rejected`."""
    settings = _SETTINGS
    if source.prompt_field:
        settings = DataConfig(prompt_field=source.prompt_field)
    config = _RATED if lookup(row.fields, "completions.0.overall_score") is not MISSING else _PAIRS
    columns = recognise(row, config, alone=False)
    try:
        made = row_comparison(_without_system(row), settings, columns, config, False)
    except NoPair as reason:
        raise BadRow("no_comparison", str(reason)) from reason
    asked = made.prompt if isinstance(made.prompt, str) else list(made.prompt)
    identity, system = _id(row, source), _system(row)
    if len(made.grades) == 1:
        return Read(asked, _said(made.completions[0]), added=system, id=identity)
    same = all(one == made.completions[0] for one in made.completions)
    if same or min(made.grades) == max(made.grades):
        raise BadRow("no_comparison", "no completion is better than another")
    if len(made.grades) > 2:
        best = made.completions[made.grades.index(max(made.grades))]
        return Read(asked, _said(best), added=system, id=identity)
    better, worse = sorted(range(2), key=lambda at: -made.grades[at])
    pair = {"chosen": _stored(made.completions[better])}
    pair["rejected"] = _stored(made.completions[worse])
    return Read(asked, None, tuple(pair), {**pair, **system}, identity)


def _stored(reply: Any) -> Any:
    """A completion as a column has it. The JSON text of a list is read as messages again."""
    return reply if isinstance(reply, str) else [reply]


def _said(reply: Any) -> Any:
    return reply if isinstance(reply, str) else reply_answer(reply)


def _verl(row: Row, source: SourceSettings) -> Read:
    """Read a task of verl. The ground truth may be JSON: one answer in a list, or tests of code."""
    column = "reward_model.ground_truth"
    read = _columns(row, source, prompt="prompt", answer=column, identity="extra_info.index")
    truth = read.answer
    if source.answer_field or not isinstance(truth, str) or truth.lstrip()[:1] not in ("[", "{"):
        return read
    try:
        value = json.loads(truth)
    except (ValueError, RecursionError):
        return read
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str):
        return replace(read, answer=value[0])
    pairs = value if isinstance(value, list) else [value]
    if pairs and all(isinstance(one, dict) and one.keys() == {"input", "output"} for one in pairs):
        value = {f"{name}s": [one[name] for one in pairs] for name in ("input", "output")}
    if isinstance(value, dict) and value.keys() >= {"inputs", "outputs"}:
        columns = {**row.fields, "question": "", "input_output": json.dumps(value)}
        tests = _benchmark(replace(row, fields=columns), source, form="apps").added
        return replace(read, answer=None, added=tests)
    if any(isinstance(one, dict) for one in pairs):
        raise BadRow("malformed", f"{column!r} is JSON of an unknown form: name answer_field")
    return read


def _benchmark(row: Row, source: SourceSettings, *, form: Any) -> Read:
    """Read a row of a code benchmark: a prompt, tests, perhaps a solution."""
    settings = DataConfig(format=form, prompt_field="prompt")
    (read,), _ = plugins.load(ROW_FORMATS, "code")([row], settings, (), source.label)
    found = read.fields
    gone = (name for name in row.fields if name not in found)
    used = (*gone, "prompt", "question", "question_content", "answer", "tests")
    answer = found.get("answer") if found.get("answer") is not row.fields.get("answer") else None
    return Read(found["prompt"], answer, used, {"tests": found["tests"]}, str(found.get("id", "")))


def _repository(row: Row, source: SourceSettings) -> Read:
    """Read a row of SWE-bench. Its columns stay: tests need them."""
    asked, _ = _prompt(row, "problem_statement")
    return Read(asked, column_value(row, "patch"), id=_id(row, source, "instance_id"))


def _math(
    prompt: str, answer: str, *, solution: str = "", after: str = ""
) -> Callable[[Row, SourceSettings], Read]:
    return partial(_columns, prompt=prompt, answer=answer, solution=solution, after=after)


def _task(row: Row, source: SourceSettings) -> Read:
    """Read a task of a generator, which may have no answer."""
    asked, _ = _prompt(row, "prompt")
    return Read(asked, row.fields["answer"], ("prompt", "answer"), id=_id(row, source))


def _has_marker(fields: Mapping[str, Any]) -> bool:
    return _GSM8K in str(fields["answer"])


READERS: dict[str, Reader] = {
    "dapo": Reader(
        "DAPO-Math, verl",
        ("prompt", "reward_model.ground_truth"),
        _verl,
    ),
    "big_math": Reader(
        "Big-Math", ("problem", "answer", "llama8b_solve_rate"), _math("problem", "answer")
    ),
    "openr1": Reader(
        "OpenR1-Math",
        ("problem", "solution", "answer", "generations"),
        _math("problem", "answer", solution="solution"),
    ),
    "numina": Reader(
        "NuminaMath",
        ("problem", "solution", "source"),
        _math("problem", "answer", solution="solution"),
    ),
    "math": Reader(
        "MATH, MATH-500",
        ("problem", "solution", "level"),
        _math("problem", "answer", solution="solution"),
    ),
    "gsm8k": Reader(
        "GSM8K", ("question", "answer"), _math("question", "answer", after=_GSM8K), _has_marker
    ),
    "reasoning_gym": Reader(
        "reasoning-gym", ("question", "answer", "metadata"), _math("question", "answer")
    ),
    "hh": Reader(
        "HH",
        ("chosen", "rejected"),
        _comparison,
        lambda fields: str(fields["chosen"]).lstrip().startswith("Human:"),
    ),
    "ultrafeedback": Reader("UltraFeedback", ("instruction", "completions"), _comparison),
    "ultrafeedback_binarized": Reader(
        "UltraFeedback, binarized", ("prompt", "chosen", "rejected", "score_chosen"), _comparison
    ),
    "tulu": Reader("Tulu 3", ("id", "messages", "source"), _conversation),
    "sharegpt": Reader("ShareGPT", ("conversations",), _conversation, specific=False),
    "apps": Reader("APPS", ("question", "input_output"), partial(_benchmark, form="apps")),
    "livecodebench": Reader(
        "LiveCodeBench",
        ("question_content", "public_test_cases", "private_test_cases", "question_id"),
        partial(_benchmark, form="livecodebench"),
    ),
    "humaneval": Reader(
        "HumanEval",
        ("prompt", "test", "entry_point", "task_id"),
        partial(_benchmark, form="humaneval"),
    ),
    "mbpp": Reader("MBPP", ("test_list", "code", "task_id"), partial(_benchmark, form="mbpp")),
    "swe": Reader("SWE-bench, SWE-Gym", ("instance_id", "problem_statement", "patch"), _repository),
    "messages": Reader("chats", ("messages",), _conversation, specific=False),
    "completion": Reader("TRL", ("prompt", "completion"), _conversation, specific=False),
    "alpaca": Reader("Alpaca", ("instruction", "output"), _conversation, specific=False),
    "pairs": Reader("comparisons", ("chosen", "rejected"), _comparison, specific=False),
    TASKS: Reader("a generator's", (), _task, specific=False),
    "columns": Reader("any other", (), partial(_columns, prompt=""), specific=False),
}
"""Forms by name."""


def recognised(row: Row, source: SourceSettings) -> SourceSettings:
    """The settings of a source with the form of its rows, judged by one of them.

    Columns that the form does not name are guessed, and set too.

    Raises:
        UserError: the named form is unknown, or has other columns; several forms fit; or a column
            is ambiguous.
    """
    name = source.reader
    if name != "auto":
        if name not in READERS:
            raise UserError(
                f"source {source.label!r}: unknown reader {name!r}.{nearest(name, list(READERS))}"
                f" Use auto or one of {', '.join(READERS)}"
            )
        missing = [c for c in READERS[name].columns if lookup(row.fields, c) is MISSING]
        if missing and not source.prompt_field:
            raise UserError(
                f"source {source.label!r}: reader {name!r} needs the column {missing[0]!r}, and the"
                f" row has {', '.join(row.fields)} ({row.where})"
            )
    elif source.prompt_field:
        name = "columns"
    else:
        name = _form_of(row, source)
    _refuse_unused(name, source)
    found = {"reader": name}
    if name == "columns":
        found["prompt_field"], found["answer_field"] = _guess(row, source)
    return source.model_copy(update=found)


def _refuse_unused(name: str, source: SourceSettings) -> None:
    """Refuse settings of columns that the form does not read."""
    read = READERS[name].read
    used: tuple[str, ...] = ()
    if read is _verl or (isinstance(read, partial) and read.func is _columns):
        used = ("prompt_field", "answer_field", "answer_after")
    elif read is _conversation:
        used = ("prompt_field", "answer_field")
    elif read is _comparison:
        used = ("prompt_field",)
    for setting in ("prompt_field", "answer_field", "answer_after"):
        if getattr(source, setting) and setting not in used:
            raise UserError(
                f"source {source.label!r}: the reader {name!r} does not use {setting}. Remove it,"
                " or set reader = 'columns'"
            )


def _form_of(row: Row, source: SourceSettings) -> str:
    fitting = {
        name: one
        for name, one in READERS.items()
        if one.columns
        and all(lookup(row.fields, column) is not MISSING for column in one.columns)
        and one.fits(row.fields)
    }
    special = {name: one for name, one in fitting.items() if one.specific}
    if special:
        return max(special, key=lambda name: len(special[name].columns))
    if len(fitting) > 1:
        raise UserError(
            f"source {source.label!r}: its rows may be of the form {' or '.join(fitting)}. Set"
            f" reader to one of them ({row.where})"
        )
    return next(iter(fitting), "columns")


def refuse_second_answer(row: Row, source: SourceSettings) -> None:
    """Refuse a row of messages that has another answer in a column.

    Args:
        row: the row.
        source: settings of its source, with the form that is recognised.

    Raises:
        UserError: the answer may be that column, or the last reply.
    """
    columns = READERS[source.reader].columns
    column = next((one for one in ("messages", "conversations") if one in columns), "")
    answer = next((one for one in ANSWERS[0] if not _no_value(row.fields.get(one))), "")
    if not (column and answer):
        return
    try:
        reply = _last_text(row, column)
    except UserError:  # a bad row, which is counted when it is read
        return
    if str(row.fields[answer]).strip() != reply:
        raise UserError(
            f"source {source.label!r}: its rows have {column!r} and {answer!r}. If the latter is"
            f" the answer, set prompt_field = '{column}' and answer_field = '{answer}'; if the last"
            f" reply is, set reader = '{source.reader}' ({row.where})"
        )
