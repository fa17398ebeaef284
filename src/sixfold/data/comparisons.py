"""Comparisons of completions, from the forms of public preference datasets.

Each row becomes one Comparison: a prompt, and completions with grades. Rows of form `scored` have
one completion each, and those of one prompt make a comparison. `comparison_forms` reads the
completions of each form.

A prompt stands in `data.prompt_field`, or before the last reply of whole conversations, which are
lists of messages, or texts as in Anthropic's HH ("Human:", "Assistant:"). The completions of a
comparison answer one prompt, so its tokens are the same for all of them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import Any

from ..errors import UserError
from ..recipe.schema import ComparisonsConfig, DataConfig
from ..types import Message, Task
from .columns import MISSING, lookup
from .comparison_forms import Columns, Kind, NoPair, completions, recognise
from .dialogue import asks_again, is_dialogue, own_reply, split_dialogue, turns
from .files import Row
from .json_text import json_type
from .messages import chat_messages, has_empty_turn, stored_messages
from .prompts import (
    SYSTEM,
    column_value,
    has_value,
    shown_tools,
    task_form,
    task_prompt,
    template_arguments,
    with_own_system,
)
from .rows import check_ids, check_value, require, row_id, tool_notes
from .sources import load_rows
from .task_set import TaskSet

_DEFAULT = DataConfig.model_fields["prompt_field"].default
_PROMPTS = ("prompt", "context", "prompt_conversation", "messages", "conversations", "instruction")
"""Columns with the prompt that are tried if the recipe names none."""

SUBSET = "subset"
"""Column with the part of a benchmark to which a comparison belongs."""

_LEFT_OUT: dict[Kind, tuple[str, str]] = {
    "empty": ("rows", "a completion or a turn is empty. Write it"),
    "prompt": (
        "rows",
        "their completions answer different prompts, or end with the user. Only the last reply may"
        " differ",
    ),
    "unscored": ("rows", "a completion has no score or verdict, or a pair no margin. Add it"),
    "equal": ("comparisons", "their completions are equal. Write different ones"),
    "tie": (
        "comparisons",
        "no completion is better than another. Grade them apart, or sample more",
    ),
}
"""What is counted, the reason and the remedy. All but ties are errors unless data.unanswered is
'drop'.
"""

Reply = str | Message
Prompt = str | list[Message]


@dataclass(frozen=True)
class Comparison(Task):
    """A prompt with completions, of which some are preferred to others.

    Attributes:
        completions: texts, or messages of the assistant. One, if its grade only says whether it is
            liked.
        grades: grade of each completion. It is preferred to those with smaller ones.
        model: hash of the weights that sampled all completions, as a stage of kind sample writes
            it. Empty: they have no such weights.
    """

    completions: tuple[Reply, ...] = ()
    grades: tuple[float, ...] = ()
    model: str = ""


def load_comparisons(
    data: DataConfig, config: ComparisonsConfig, *, seed: int, chat: bool, margins: bool = False
) -> TaskSet:
    """The comparisons of a recipe.

    A comparison is not trained on if one with the same prompt is held out.

    Args:
        data: the recipe's [data] section.
        config: the recipe's [comparisons] section.
        seed: draws the held-out comparisons and, with a limit, the rows.
        chat: whether the model has a chat template. With one, dialogues written as text become
            messages.
        margins: whether grades have to say by how much a completion is better. If not, those of a
            pair are 1 and 0.

    Raises:
        UserError: a source is missing or empty, or a row is no comparison. Names file and line.
    """
    alone = len(data.names) == 1
    convert = partial(_convert, config=config, chat=chat, alone=alone, margins=margins)
    return load_rows(data, seed, convert)


def _convert(
    rows: Sequence[Row],
    data: DataConfig,
    name: str,
    *,
    config: ComparisonsConfig,
    chat: bool,
    alone: bool,
    margins: bool,
) -> tuple[list[Task], list[str]]:
    """Comparisons and notes from the rows of one split."""
    columns = recognise(rows[0], config, alone)
    for column in columns.names:
        require(rows, "comparisons.form", column)
    read: list[tuple[Row, Comparison]] = []
    counts: Counter[Kind] = Counter()
    beside: Counter[str] = Counter()
    begun = aside = unused = 0
    for row in rows:
        for column, value in row.fields.items():
            check_value(row.where, column, value)
        try:
            made = row_comparison(row, data, columns, config, chat)
            if margins:
                _check_margin(row, columns.form, config.margin_field)
            if columns.form == "pair" and not margins:
                unused += not set(made.grades) <= {0.0, 1.0}
                made = replace(made, grades=tuple(float(grade > 0) for grade in made.grades))
            begun += _leaves_reply(row, data, made)
            aside += _leaves_prompt(row, data, made)
            beside.update(_unread_columns(row, data, made))
            read.append(
                (row, replace(made, id=row_id(row, data.id_field) or f"{name}-{row.number}"))
            )
        except NoPair as reason:
            counts[_refused(row, reason, data)] += 1
    if columns.form == "scored":
        read = _grouped(read)
    kept: list[tuple[Row, Comparison]] = []
    for row, comparison in read:
        try:
            kept.append((row, _compared(comparison, config, columns.form == "unpaired")))
            counts["duplicate"] += len(comparison.grades) - len(_distinct(comparison).grades)
        except NoPair as reason:
            counts[_refused(row, reason, data)] += 1
    notes = [
        f"split '{name}': {note}"
        for note in (
            *_left_out(+counts),
            *_labels([one for _, one in kept] if columns.form == "unpaired" else ()),
            *_unread(len(rows), begun, aside, beside),
            *([f"{unused} margins are not read, see reward_model.margin"] if unused else ()),
            *(_repeated(kept) if columns.form != "scored" else ()),  # tasks may share a prompt
        )
    ]
    if not kept:
        raise UserError(f"split '{name}' has 0 usable comparisons of {len(rows)} rows: {notes[0]}")
    tasks: list[Task] = [comparison for _, comparison in kept]
    kept_rows = [row for row, _ in kept]
    check_ids(tasks, kept_rows, data.id_field)
    return tasks, notes + tool_notes(kept_rows, name)


def _check_margin(row: Row, form: str, column: str) -> None:
    """Refuse a row that does not say by how much a completion is better."""
    if form in ("labelled", "best_of", "unpaired"):
        raise UserError(
            f"{row.where}: reward_model.margin = true, but rows of the form '{form}' do not say by"
            " how much a completion is better. Set margin = false"
        )
    if form == "pair" and not has_value(row, column):
        raise NoPair(
            "unscored",
            f"{column!r} says by how much 'chosen' is better, and has no number. Name another by"
            " comparisons.margin_field, or set reward_model.margin = false",
        )


def _left_out(counts: Mapping[Kind, int]) -> Iterator[str]:
    """Notes on what is left out, and why."""
    for kind, (unit, why) in _LEFT_OUT.items():
        if kind in counts:
            yield f"{counts[kind]} {unit} are left out: {why}"
    if "duplicate" in counts:
        yield (
            f"{counts['duplicate']} completions are left out: they are equal to an earlier one of"
            " their prompt"
        )


def _labels(single: Sequence[Comparison]) -> Iterator[str]:
    """A note if all single completions have the same label."""
    grades = {one.grades[0] for one in single}
    if len(grades) == 1:
        yield f"all {len(single)} completions have the label {str(grades == {1.0}).lower()}"


def _repeated(kept: Sequence[tuple[Row, Comparison]]) -> Iterator[str]:
    """Notes that count repeated and contradictory comparisons, and name the first of each."""
    seen: dict[int, int] = {}  # hashes: the texts take memory
    repeats, contradictions = list[Row](), list[Row]()
    for row, one in kept:
        texts = [_text(reply) for reply in one.completions]
        ranked = sorted(zip(one.grades, texts, strict=True))
        order = hash((one.grades if len(texts) == 1 else (), tuple(text for _, text in ranked)))
        key = hash((one.prompt_key, frozenset(texts)))
        if key in seen and seen[key] == order:
            repeats.append(row)
        elif key in seen and len(texts) < 3:  # longer rankings may differ in ties
            contradictions.append(row)
        seen.setdefault(key, order)
    if repeats:
        yield f"{len(repeats)} comparisons repeat an earlier one (the first: {repeats[0].where})"
    if contradictions:
        yield (
            f"{len(contradictions)} comparisons contradict an earlier one of the same completions"
            f" (the first: {contradictions[0].where}). Leave out one of them"
        )


def _unread(rows: int, begun: int, aside: int, beside: Mapping[str, int]) -> Iterator[str]:
    """Notes on prompt columns, or the ends of prompts, that are not read.

    Args:
        begun: rows that `_leaves_reply` counts.
        aside: rows that `_leaves_prompt` counts.
        beside: rows by column that `_unread_columns` finds.
    """
    if aside:
        yield (
            f"{aside} of {rows} rows have whole conversations, and beside them a prompt that is not"
            " in them. It is not read"
        )
    for name, count in beside.items():
        yield (
            f"{count} of {rows} rows have a text in {name!r} that is not in the prompt column. It"
            " is not read"
        )
    if begun:
        remedy = " (data.prompt_form = 'continued': the completions continue it)"
        yield (
            f"{begun} of {rows} prompts end with a reply of the assistant that is none of the"
            " completions. It is left out of the prompt"
            + (remedy if begun == rows else "")  # it refuses prompts that end otherwise
        )


def _refused(row: Row, reason: NoPair, data: DataConfig) -> Kind:
    """The kind of a row that is left out."""
    if data.unanswered == "error" and reason.kind != "tie":
        raise UserError(
            f"{row.where}: {reason}. Correct the row, or leave such rows out by data.unanswered ="
            " 'drop'"
        ) from reason
    return reason.kind


def row_comparison(
    row: Row, data: DataConfig, columns: Columns, config: ComparisonsConfig, chat: bool
) -> Comparison:
    """The comparison of a row, without its id.

    Raises:
        UserError: a value has the wrong type, or there is no prompt.
        NoPair: a text is empty, or the completions answer different prompts.
    """
    data = with_own_system(row, data)
    given, in_dialogue = _given_prompt(row, data, chat)
    model = _named(row, "provenance.model") or ""
    in_dialogue = in_dialogue and not model  # what a policy has sampled stays as it is
    prompts: list[Prompt | None] = []
    replies, grades = [], []
    for column, value, grade in completions(row, columns, config):
        own: Prompt | None
        own, reply = _completion(row, column, value)
        if own is None and isinstance(reply, str):
            text, (own, reply) = reply, _dialogue(row, reply, chat)
            if not _belongs(given, own):  # a reply that reads like a dialogue
                own, reply = None, text
            if own is None and in_dialogue:
                reply = own_reply(text, stripped=isinstance(given, list))
                if not reply.strip():
                    raise NoPair("empty", f"{column!r} is empty")
            if (own is not None or in_dialogue) and asks_again(reply):
                raise NoPair("prompt", f"{column!r} ends with a turn of Human, not with a reply")
        prompts.append(given if own is None else own)
        replies.append(reply)
        grades.append(grade)
    if isinstance(given, list):  # a text may be a part of the conversation
        prompts.append(given)
    prompt = prompts[0] if prompts else given
    if prompt is None or None in prompts:
        if name := _prompt_column(row, data):
            raise NoPair("empty", f"the prompt {name!r} is empty")
        raise UserError(
            f"{row.where}: there is no prompt. Name its column by data.prompt_field, or give whole"
            " conversations (lists of messages, or texts with 'Human:' and 'Assistant:'); row keys:"
            f" {list(row.fields)}"
        )
    if any(other != prompt for other in prompts):
        if isinstance(given, list) and all(other == prompt for other in prompts[:-1]):
            raise NoPair(
                "prompt",
                f"the prompt {_prompt_column(row, data)!r} differs from what comes before the last"
                " reply of the completions",
            )
        raise NoPair(
            "prompt",
            "the completions answer different prompts; only the last reply of a conversation may"
            " differ",
        )
    form = task_form(data)
    if form != "messages":
        replies = [_as_text(row, reply, form) for reply in replies]
    system = {name: value for name, value in row.fields.items() if name == SYSTEM}
    told = task_prompt(replace(row, fields={**system, data.prompt_field: prompt}), data)
    if isinstance(told, str) and not all(isinstance(reply, str) for reply in replies):
        told = (Message(role="user", content=told),)
    return Comparison(
        "",
        told,
        columns={SUBSET: row.fields[SUBSET]} if SUBSET in row.fields else {},
        source=data.source,
        tools=() if form == "rendered" else shown_tools(row) or (),
        template_args={} if form == "rendered" else template_arguments(row),
        form=form,
        completions=tuple(replies),
        grades=tuple(grades),
        model=model,
    )


def _belongs(given: Prompt | None, own: Prompt | None) -> bool:
    """True if the prompt of a dialogue has the prompt of the row's own column in it."""
    if given is None or own is None or given == own:
        return True
    said = own if isinstance(own, str) else "\n".join(message["content"] for message in own)
    return isinstance(given, str) and given.strip() in said


def _given_prompt(row: Row, data: DataConfig, chat: bool) -> tuple[Prompt | None, bool]:
    """The prompt of a row in a column of its own, and whether it is a dialogue written as text.

    No prompt if the row has no such column.
    """
    name = _prompt_column(row, data)
    if name is None:
        if data.prompt_field != _DEFAULT:
            require([row], "data.prompt_field", data.prompt_field)
        return None, False
    value = stored_messages(row.where, column_value(row, name))
    if name == "instruction" and not _is_blank(row.fields.get("input")):
        raise UserError(
            f"{row.where}: the column 'input' beside 'instruction' is not read. Join the two in one"
            " column, and name it by data.prompt_field"
        )
    if value is None:
        return None, False
    if _is_blank(value) or (isinstance(value, list) and has_empty_turn(value)):
        raise NoPair("empty", f"the prompt {name!r} is empty, or has an empty turn")
    if isinstance(value, list):
        messages = list(chat_messages(row.where, value))
        ended = data.prompt_form == "messages" and messages[-1]["role"] == "assistant"
        # Some sets repeat the chosen conversation.
        return (messages[:-1] if ended else messages), False
    if not isinstance(value, str):
        raise UserError(
            f"{row.where}: {name!r} must be text or a list of messages, got {json_type(value)}"
        )
    value = _lines(row, value)
    dialogue = is_dialogue(value)
    turned = chat and data.prompt_form == "messages" and dialogue
    return (_turns(value) if turned else value), dialogue


def _prompt_column(row: Row, data: DataConfig) -> str | None:
    """Name of the column that has the prompt of a row, or None. Columns with a value come first."""
    names = (data.prompt_field, *(_PROMPTS if data.prompt_field == _DEFAULT else ()))
    there = [one for one in names if lookup(row.fields, one) is not MISSING]
    return next((one for one in there if has_value(row, one)), there[0] if there else None)


def _leaves_reply(row: Row, data: DataConfig, made: Comparison) -> bool:
    """True if `_given_prompt` leaves out a reply that is none of the completions."""
    name = _prompt_column(row, data)
    value = stored_messages(row.where, column_value(row, name)) if name else None
    if data.prompt_form != "messages" or not isinstance(value, list):
        return False
    last = chat_messages(row.where, value)[-1]
    texts = [one if isinstance(one, str) else one["content"] for one in made.completions]
    return last["role"] == "assistant" and last["content"].strip() not in map(str.strip, texts)


def _leaves_prompt(row: Row, data: DataConfig, made: Comparison) -> bool:
    """True if a text in the prompt column is no part of the conversations that are read."""
    name = _prompt_column(row, data)
    if name is None or isinstance(made.prompt, str):
        return False
    return _is_outside(made.prompt, column_value(row, name))


def _unread_columns(row: Row, data: DataConfig, made: Comparison) -> list[str]:
    """Columns beside the prompt column that often hold a part of the prompt, and whose text is not
    in the prompt.
    """
    read = _prompt_column(row, data)
    if read is None:
        return []
    names = dict.fromkeys((data.prompt_field, *_PROMPTS, "input"))
    return [
        name for name in names if name != read and _is_outside(made.prompt, column_value(row, name))
    ]


def _is_outside(prompt: str | Sequence[Message], value: Any) -> bool:
    """True for a text that is not in the prompt. White space is not compared."""
    if not isinstance(value, str) or is_dialogue(value) or value.lstrip()[:1] in ("[", "{"):
        return False
    whole = prompt if isinstance(prompt, str) else "\n".join(one["content"] for one in prompt)
    return " ".join(value.split()) not in " ".join(whole.split())


def _lines(row: Row, text: str) -> str:
    """A text with line ends of Windows made those of Unix, by which the turns of a dialogue are
    found. What a policy has sampled stays as it is.
    """
    return text if _named(row, "provenance.model") else text.replace("\r\n", "\n")


def _completion(row: Row, column: str, value: Any) -> tuple[list[Message] | None, Reply]:
    """The messages before a reply, or None if there are none, and the reply."""
    value = stored_messages(row.where, value)
    if _is_blank(value):
        raise NoPair("empty", f"{column!r} is empty")
    if isinstance(value, str):
        return None, _lines(row, value)
    if isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, list):
        raise UserError(
            f"{row.where}: {column!r} must be text or a list of messages, got {json_type(value)}"
        )
    if all(isinstance(one, str) for one in value):
        raise UserError(
            f"{row.where}: {column!r} has several texts, but a completion is one reply. Compare"
            " completions of one turn"
        )
    if has_empty_turn(value):
        raise NoPair("empty", f"{column!r} has an empty turn")
    *before, reply = chat_messages(row.where, value)
    if reply["role"] != "assistant":
        raise NoPair(
            "prompt",
            f"{column!r} must end with a reply of the assistant, not with a message of"
            f" {reply['role']}",
        )
    if before and before[0]["role"] == "assistant":
        raise UserError(
            f"{row.where}: {column!r} has {len(value)} messages after the prompt, but a completion"
            " is one reply. Move the earlier messages into the prompt"
        )
    reply.pop("weight", None)  # a completion is always trained
    return before or None, reply


def _is_blank(value: Any) -> bool:
    return value in (None, []) or (isinstance(value, str) and not value.strip())


def _dialogue(row: Row, text: str, chat: bool) -> tuple[Prompt | None, str]:
    """Prompt and reply of a dialogue written as text. Without a dialogue: None, and the text."""
    found = split_dialogue(text)
    if not found:
        return None, text
    prompt, reply = found[0], own_reply(found[1], stripped=chat)
    if not reply.strip():
        raise NoPair("empty", "the last reply is empty")
    return (_turns(prompt) if chat else prompt), reply


def _turns(dialogue: str) -> list[Message]:
    """The messages of a dialogue."""
    messages = turns(dialogue)
    if not all(message["content"] for message in messages):
        raise NoPair("empty", "a turn of the dialogue is empty")
    if any(m["role"] != ("user", "assistant")[at % 2] for at, m in enumerate(messages)):
        raise NoPair("prompt", "the turns of Human and Assistant do not alternate")
    return messages


def _as_text(row: Row, reply: Reply, form: str) -> str:
    """The text of a reply, for prompts that no chat template ends."""
    if isinstance(reply, str):
        return reply
    if reply.get("tool_calls"):
        raise UserError(
            f"{row.where}: a completion with tool calls needs data.prompt_form = 'messages', not"
            f" '{form}'"
        )
    return reply["content"]


def _grouped(read: Sequence[tuple[Row, Comparison]]) -> list[tuple[Row, Comparison]]:
    """Comparisons of scored completions: those of one prompt, and of one task if the rows name it.

    A comparison has the place of its first row, and the id of its task, if no other has it, or of
    that row.
    """
    groups: dict[tuple[Any, str], list[tuple[Row, Comparison]]] = {}
    for row, one in read:
        task = _named(row, "provenance.task")
        groups.setdefault((task, one.prompt_key), []).append((row, one))
    times = Counter(task for task, _ in groups)
    return [
        (
            members[0][0],
            replace(
                members[0][1],
                id=task if task is not None and times[task] == 1 else members[0][1].id,
                completions=tuple(one.completions[0] for _, one in members),
                grades=tuple(one.grades[0] for _, one in members),
                model=members[0][1].model if len({one.model for _, one in members}) == 1 else "",
            ),
        )
        for (task, _), members in groups.items()
    ]


def _named(row: Row, path: str) -> str | None:
    """A name in the origin of a sampled row, or None."""
    value = lookup(row.fields, path)
    return value if isinstance(value, str) else None


def _distinct(comparison: Comparison) -> Comparison:
    """The comparison with the first of equal completions, in order. It has their mean grade."""
    equal: dict[str, list[int]] = {}
    for at, reply in enumerate(comparison.completions):
        equal.setdefault(_text(reply), []).append(at)
    grades = [fmean(comparison.grades[at] for at in same) for same in equal.values()]
    return replace(_only(comparison, [at for at, *_ in equal.values()]), grades=tuple(grades))


def _text(reply: Reply) -> str:
    """The text by which replies are compared."""
    return reply.strip() if isinstance(reply, str) else json.dumps(reply, sort_keys=True)


def _compared(whole: Comparison, config: ComparisonsConfig, unpaired: bool) -> Comparison:
    """The completions of a comparison that are trained on."""
    if unpaired:
        return whole
    if len(set(whole.grades)) < 2:
        raise NoPair("tie", "no completion is better than another")
    distinct = _distinct(whole)
    grades = distinct.grades
    if len(set(grades)) < 2:
        raise NoPair("equal", "the completions are equal")
    if config.pairs == "all":
        return distinct
    return _only(distinct, sorted((grades.index(max(grades)), grades.index(min(grades)))))


def _only(comparison: Comparison, indices: Sequence[int]) -> Comparison:
    return replace(
        comparison,
        completions=tuple(comparison.completions[at] for at in indices),
        grades=tuple(comparison.grades[at] for at in indices),
    )
