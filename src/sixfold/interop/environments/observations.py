"""Observations of other libraries' environments as text or messages."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...environment.values import Array
from ...types import Message, Task

TEXT_KEYS = ("text", "observation", "obs", "message", "prompt")
"""Keys of a dictionary under which its text is looked for, in this order."""

LONGEST = 256
"""Most entries of an array that is written as JSON."""


def observation_text(given: Any) -> str:
    """An observation as text.

    Text stays as it is. Of a dictionary with a text under `TEXT_KEYS`, only that is read. Numbers,
    and short arrays, lists and dictionaries of them, become JSON.

    Raises:
        TypeError: for other types, and for long arrays such as images.
    """
    if isinstance(given, str):
        return str(given)
    if isinstance(given, Mapping):
        for key in TEXT_KEYS:
            if isinstance(given.get(key), str):
                return str(given[key])
    plain = _plain(given)
    try:
        return json.dumps(plain)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"an observation of type {type(given).__name__} has no text form. Wrap the environment"
            " so that it observes text"
        ) from error


def _plain(given: Any) -> Any:
    if isinstance(given, Array):
        size = int(getattr(given, "size", 1))
        if size > LONGEST:
            raise TypeError(
                f"an observation of {size} numbers is no text. Wrap the environment so that"
                " it observes text"
            )
        return given.tolist()
    if isinstance(given, Mapping):
        return {str(key): _plain(value) for key, value in given.items()}
    if isinstance(given, Sequence) and not isinstance(given, str | bytes):
        return [_plain(value) for value in given]
    return given


def with_observation(task: Task, recorded: str, seen: str) -> Task:
    """The task with another first observation.

    Args:
        task: its last message, or its prompt, begins with the recorded observation.
        recorded: first observation when the task was made.
        seen: first observation now.
    """
    if recorded == seen:
        return task
    text = seen + task.prompt_text.removeprefix(recorded)
    if isinstance(task.prompt, str):
        return replace(task, prompt=text)
    last = Message(role=task.prompt[-1]["role"], content=text)
    return replace(task, prompt=(*task.prompt[:-1], last))
