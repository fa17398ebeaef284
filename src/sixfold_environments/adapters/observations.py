"""Observations of other libraries' environments, as text and as answers of an episode."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from sixfold.environment.episode import End, Observation
from sixfold.environment.grade import Array
from sixfold.types import Message, Outcome

LONGEST = 256
"""Maximum number of entries of an array that is converted to JSON."""


def observation_text(given: Any) -> str:
    """An observation as text.

    Text is unchanged. A dictionary with a text and nothing else becomes that text. Other values
    become JSON with all of their parts. Beside a text, the type of a long array is enough.

    Raises:
        TypeError: for other types, and for long arrays such as images.
    """
    if isinstance(given, str):
        return str(given)
    if isinstance(given, Mapping) and any(isinstance(value, str) for value in given.values()):
        if len(given) == 1:
            return str(*given.values())
        given = {key: _describe(value) for key, value in given.items()}
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


def _describe(given: Any) -> Any:
    """The value, or a description of it if it has no text form."""
    try:
        json.dumps(_plain(given))
    except (TypeError, ValueError):
        return f"not shown: a value of type {type(given).__name__}"
    return given


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
