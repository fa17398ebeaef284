"""Observations of other libraries' environments, as text and as answers of an episode."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ...environment.episode import End, Observation
from ...environment.values import Array
from ...types import Message, Outcome

TEXT_KEYS = ("text", "observation", "obs", "message", "prompt")
"""Keys of a dictionary whose value may be its text, in the order in which they are tried."""

LONGEST = 256
"""Maximum number of entries of an array that is converted to JSON."""


def observation_text(given: Any) -> str:
    """An observation as text.

    Text is unchanged. A dictionary with a text under one of `TEXT_KEYS` becomes that text. Numbers
    become JSON, as do short arrays, lists and dictionaries of them.

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
            f"an observation of type {type(given).__name__} cannot be converted to text. Wrap the"
            " environment so that its observations are text"
        ) from error


def step_answer(
    action: Any, seen: str, reward: float, outcome: Outcome | None = None
) -> Observation | End:
    """Answer of an episode to a reply that the environment has acted on, with an event about it.

    Args:
        action: the action, in a JSON form.
        seen: the observation after it.
        reward: the reward of the step. It becomes the reward of the turn.
        outcome: how the episode ended. None: it continues.
    """
    event = {"kind": "environment_step", "action": action, "reward": reward}
    if outcome is not None:
        return End(reward, outcome, events=({**event, "observation": seen},))
    return Observation((Message(role="user", content=seen),), reward=reward, events=(event,))


def _plain(given: Any) -> Any:
    if isinstance(given, Array):
        size = int(getattr(given, "size", 1))
        if size > LONGEST:
            raise TypeError(
                f"an observation has an array of {size} entries, more than {LONGEST}. Wrap the"
                " environment so that its observations are text"
            )
        return given.tolist()
    if isinstance(given, Mapping):
        return {str(key): _plain(value) for key, value in given.items()}
    if isinstance(given, Sequence) and not isinstance(given, str | bytes):
        return [_plain(value) for value in given]
    return given
