"""Calls of reward functions that were written for TRL, verl or OpenRLHF.

Each function is called as its framework calls it: the same names, the same texts, the same form of
the result. The texts are those of `RewardFunction.scores`: decoded as the framework does it.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from ..types import Task
from .grade import Grade, number
from .sampled import EXTRA_ARGUMENTS, Sampled

Given = tuple[list[Any], dict[str, Any]]
"""Positional arguments and keyword arguments of a call."""


@dataclass(frozen=True)
class TrainerState:
    """The part of TRL's `trainer_state` that Sixfold knows.

    Attributes:
        global_step: number of updates of the weights that sampled the completions.
    """

    global_step: int


def trl_arguments(
    function: Callable[..., Any],
    completions: Sequence[str],
    task: Task,
    sampled: Sampled,
    logged: dict[str, list[Any]],
) -> dict[str, Any]:
    """Keyword arguments for a TRL function, as TRL 1.16 passes them.

    Every column is a list with one entry per completion. A chat prompt gives completions as message
    lists, a text prompt gives strings. `log_extra` drops its columns: they belong to TRL's table of
    completions.

    Args:
        function: the reward. Only arguments that it takes by name or by `**kwargs` are passed.
        sampled: token ids, finish reasons and the rendered prompt.
        logged: filled with the values that the function logs under each name by `log_metric`.

    Raises:
        ValueError: if the function needs an argument that the task does not have.
    """
    count = len(completions)
    chat = not isinstance(task.prompt, str)
    offered: dict[str, Any] = {
        name: [value] * count
        for name, value in task.columns.items()
        if name not in ("prompt", "completion")
    }
    if "answer" not in offered and task.answer is not None:
        offered["answer"] = [task.answer] * count
    offered["prompts"] = [list(task.prompt) if chat else task.prompt for _ in completions]
    offered["completions"] = [
        [{"role": "assistant", "content": text}] if chat else text for text in completions
    ]
    each = [sampled.of(i) for i in range(count)]
    offered |= {name: [one[name] for one in each] for name in EXTRA_ARGUMENTS}

    def log_metric(name: str, value: Any) -> None:
        logged.setdefault(name, []).append(value)

    offered |= {"trainer_state": TrainerState(sampled.version), "log_metric": log_metric}
    offered["log_extra"] = lambda column, values: None
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        given = offered
    else:
        given = {p.name: offered[p.name] for p in parameters if p.name in offered}
    needed = [p for p in parameters if p.default is p.empty and p.kind in _NAMED]
    if missing := [p.name for p in needed if p.name not in given]:
        raise ValueError(
            f"the task has no column {missing[0]!r}, which the reward names as a parameter. It has"
            f" {', '.join(sorted(task.columns)) or 'no columns'}"
        )
    return given


_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def form_hint(error: Exception, task: Task) -> str:
    """What to set if a TRL function has failed because it expects the other form of prompts."""
    if isinstance(task.prompt, str) and _TEXT_AS_MESSAGES.search(str(error)):
        return (
            ". Its completions are texts because the prompts are texts. For messages"
            " (completions[0][0]['content']), set data.system_prompt, or name a column with lists"
            " of messages in data.prompt_field"
        )
    if not isinstance(task.prompt, str) and _MESSAGES_AS_TEXT.search(str(error)):
        return (
            ". Its completions are lists of messages because the prompts are messages. Read"
            " completion[0]['content'], or use text prompts without data.system_prompt"
        )
    return ""


_TEXT_AS_MESSAGES = re.compile(r"string ind(?:ices|ex)|'str' object")
_MESSAGES_AS_TEXT = re.compile(r"expected string|list indices|'list' object|not (?:a )?list")


def verl_arguments(function: Callable[..., Any], text: str, task: Task) -> Given:
    """Arguments for verl's `compute_score`, as its reward managers pass them.

    A function without `solution_str` gets the completion as its first argument: verl's own scorers
    are called so.

    Raises:
        ValueError: if the task has no reference answer.
    """
    offered = {name.removesuffix("s"): v[0] for name, v in _verl_lists([text], task).items()}
    parameters = inspect.signature(function).parameters
    first = [] if "solution_str" in parameters else [offered.pop("solution_str")]
    return first, _taken(parameters, offered)


def verl_batch_arguments(function: Callable[..., Any], texts: Sequence[str], task: Task) -> Given:
    """Arguments for verl's batched `compute_score`: lists with one entry per completion."""
    return [], _taken(inspect.signature(function).parameters, _verl_lists(texts, task))


def _taken(
    parameters: Mapping[str, inspect.Parameter], offered: Mapping[str, Any]
) -> dict[str, Any]:
    every = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return {name: value for name, value in offered.items() if every or name in parameters}


def _verl_lists(texts: Sequence[str], task: Task) -> dict[str, list[Any]]:
    columns = task.columns
    held = columns.get("reward_model")
    truth = task.answer
    if truth is None and isinstance(held, Mapping):
        truth = held.get("ground_truth")
    if truth is None:
        raise ValueError(
            "the task has no reference answer for ground_truth. Set data.answer_field to its"
            " column; in rows of verl it is 'reward_model.ground_truth'"
        )
    return {
        "data_sources": [columns.get("data_source", task.source)] * len(texts),
        "solution_strs": list(texts),
        "ground_truths": [truth] * len(texts),
        "extra_infos": [dict(columns.get("extra_info") or {}) for _ in texts],
    }


def openrlhf_arguments(function: Callable[..., Any], text: str, task: Task, prompt: str) -> Given:
    """Arguments for OpenRLHF's `reward_func`, which gets one completion at a time.

    Args:
        text: the completion with its special tokens.
        task: the task. Its answer is the label, or "" if it has none.
    """
    label = "" if task.answer is None else task.answer
    positions = [
        p
        for p in inspect.signature(function).parameters.values()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    return [[prompt + text], [prompt], [label]][: max(2, len(positions))], {}


def verl_value(result: Any) -> Any:
    """The score of a result of verl: a number, a dictionary with `score`, or a tuple with it first.

    Raises:
        TypeError: if a dictionary has no score.
    """
    if isinstance(result, Mapping):
        return _measured(result, "score", result)
    return result[0] if isinstance(result, list | tuple) and result else result


def openrlhf_value(result: Any) -> Any:
    """The reward in a result of OpenRLHF: a dictionary with `rewards`, or a list of one reward.

    Raises:
        TypeError: if a dictionary has no rewards.
    """
    if isinstance(result, Mapping):
        logs = result.get("extra_logs") or {}
        return _measured(result, "rewards", {**logs, "scores": result.get("scores")})
    return _only(result)


def _measured(result: Mapping[Any, Any], key: str, others: Mapping[Any, Any]) -> Grade:
    """The value under `key`, with the other numbers as metrics. Texts and None are left out."""
    if key not in result:
        raise TypeError(f"returned a dictionary without {key!r}: {', '.join(map(str, result))}")
    named = {str(name): _finite(value) for name, value in others.items() if name != key}
    metrics = {name: value for name, value in named.items() if value is not None}
    return Grade(number(_only(result[key])), None, metrics=metrics)


def logged_means(logged: Mapping[str, Sequence[Any]]) -> dict[str, float]:
    """Mean of the values that a TRL function logged under each name."""
    known = {
        name: [v for v in map(_finite, values) if v is not None] for name, values in logged.items()
    }
    return {name: fmean(values) for name, values in known.items() if values}


def _finite(value: Any) -> float | None:
    """A value as a finite number. None if it is not a number, or not finite."""
    try:
        found = number(_only(value))
    except (TypeError, ValueError):
        return None
    return found if math.isfinite(found) else None


def _only(value: Any) -> Any:
    """The entry of a list with one entry. Other values unchanged."""
    return value[0] if isinstance(value, list | tuple) and len(value) == 1 else value
