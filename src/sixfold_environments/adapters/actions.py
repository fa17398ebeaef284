"""Read the action of a Gymnasium environment from a reply. Does not import Gymnasium.

The kind of an action space is the name of its class, so spaces of the older `gym` work as well.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sixfold.environment.answer_part import answer_part
from sixfold.environment.episode import Episode, MakeEpisode, Observation
from sixfold.errors import UserError
from sixfold.types import Message, Task

ARRAYS = ("Box", "MultiBinary", "MultiDiscrete")
MOST_LISTED = 20
"""Maximum number of named actions that a hint lists."""

_TAGGED = re.compile(r"<(action|answer)>(.*?)</\1>", re.DOTALL | re.IGNORECASE)
_WHOLE_NUMBER = re.compile(r"(?<![\w.])-?\d+(?!\w|\.\d)")


class MalformedAction(ValueError):
    """No action can be read from a reply. The message says why."""


def malformed_answer(error: MalformedAction, expected: Any) -> Observation:
    """Answer to a reply without a readable action: a hint as JSON, and one tool error.

    Args:
        error: why no action can be read.
        expected: description of an action, in a JSON form.
    """
    refused = {"kind": "malformed_action", "message": str(error)}
    hint = json.dumps({"error": {**refused, "actions": expected}})
    said = Message(role="user", content=hint)
    return Observation((said,), events=(refused,), tool_errors=1)


@dataclass(frozen=True)
class Adapted:
    """Maker of episodes that knows the hints which they give (`WritesErrors`)."""

    make: MakeEpisode
    own_errors: Sequence[str]

    def __call__(self, task: Task) -> Episode:
        return self.make(task)


def hints(read: Callable[[str], Any], expected: Any) -> list[str]:
    """Hints that some replies without a readable action get.

    Args:
        read: reads the action of a reply, or raises MalformedAction.
        expected: as in `malformed_answer`.
    """
    found = []
    for reply in ("", "[", "[]", "{}", '{"?": []}', "0 1", "9" * 9, str(expected)):
        try:
            read(reply)
        except MalformedAction as error:
            found += [m["content"] for m in malformed_answer(error, expected).messages]
    return found


def tagged_part(text: str) -> str:
    """The text inside the last `<action>` or `<answer>` tag, or all of it."""
    tagged = _TAGGED.findall(text)
    return str(tagged[-1][1] if tagged else text).strip()


def chosen(text: str, names: Mapping[Any, str], numbers: Sequence[int]) -> Any:
    """The one action that a text names.

    Args:
        text: the text. If it has a tag, only the last one is read.
        numbers: actions that are whole numbers. Empty: numbers in the text mean nothing.

    Raises:
        MalformedAction: the text names no action, several, or one that does not exist.
    """
    text, found = tagged_part(text), set()
    # Long names first: "up left" is not also "up".
    for action, name in sorted(names.items(), key=lambda item: -len(item[1])):
        text, times = re.subn(rf"(?<!\w){re.escape(name)}(?!\w)", " ", text, flags=re.I)
        found |= {action} if times else set()
    if numbers:
        found |= {int(number) for number in _WHOLE_NUMBER.findall(text)}
    if not found:
        raise MalformedAction("the reply names no action")
    if len(found) > 1:
        raise MalformedAction("the reply names several actions")
    (action,) = found
    if isinstance(action, int) and action not in numbers:
        raise MalformedAction(f"there is no action {action}")
    return action


@dataclass(frozen=True)
class Actions:
    """Reads the actions of one action space.

    Attributes:
        kind: "Text", "Discrete", "Box", "MultiBinary" or "MultiDiscrete".
        names: names of discrete actions, by number. May be empty.
    """

    kind: str
    space: Any
    names: Mapping[int, str] = field(default_factory=dict)

    def read(self, reply: str) -> Any:
        """The action of a reply, as the environment's `step` takes it.

        Thoughts are ignored. If the reply has an `<action>` or `<answer>` tag, only the text inside
        the last one is read.

        Raises:
            MalformedAction: the reply has no action, or several.
        """
        text = answer_part(reply)
        if self.kind == "Text":
            return text
        if self.kind in ARRAYS:
            return self._array(tagged_part(text))
        first = int(self.space.start)
        number = chosen(text, self.names, range(first, first + int(self.space.n)))
        return self.space.dtype.type(number)

    @property
    def expected(self) -> Any:
        """Description of an action for the policy: a sentence, or names by number."""
        if self.kind == "Text":
            return "any text"
        if self.kind != "Discrete":
            return f"a JSON list of shape {list(self.space.shape)}"
        if 0 < len(self.names) <= MOST_LISTED:
            return {str(number): name for number, name in sorted(self.names.items())}
        first, count = int(self.space.start), int(self.space.n)
        return f"one integer from {first} to {first + count - 1}"

    def _array(self, text: str) -> Any:
        import numpy

        try:
            action = numpy.asarray(json.loads(text), dtype=self.space.dtype)
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            raise MalformedAction("the reply is not a JSON list of numbers") from error
        if action.shape != self.space.shape or not self.space.contains(action):
            raise MalformedAction("the list is not in the action space")
        return action


def actions_of(env: Any, where: str) -> Actions:
    """Reader of an environment's actions.

    Raises:
        UserError: its action space has no text form.
    """
    space = env.action_space
    kind = next((base.__name__ for base in type(space).__mro__ if base.__name__ in _KINDS), "")
    if not kind:
        raise UserError(
            f"{where}: its action space {space} has no text form. Wrap it in a"
            " gymnasium.ActionWrapper with an action space of Text, Discrete,"
            f" {', '.join(ARRAYS)}"
        )
    return Actions(kind, space, _names(env) if kind == "Discrete" else {})


_KINDS = ("Text", "Discrete", *ARRAYS)


def _names(env: Any) -> dict[int, str]:
    """Names of discrete actions by number, or {}. Gymnasium has no standard for them.

    They are the attribute `action_names` of the environment, `metadata["action_names"]`, or the
    result of the method `get_action_meanings` of Atari games.
    """
    inner, first = env.unwrapped, int(env.action_space.start)
    given = getattr(inner, "action_names", None)
    given = (inner.metadata or {}).get("action_names") if given is None else given
    if given is None and callable(meanings := getattr(inner, "get_action_meanings", None)):
        given = meanings()
    if isinstance(given, Mapping):
        pairs = [(k, v) if isinstance(v, str) else (v, k) for k, v in given.items()]
        return {int(number): str(name) for number, name in pairs}
    if isinstance(given, Sequence) and not isinstance(given, str):
        return {first + number: str(name) for number, name in enumerate(given)}
    return {}
