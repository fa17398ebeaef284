"""Read the action of a Gymnasium environment from a reply. Does not import Gymnasium.

The kind of an action space is the name of its class, so spaces of the older `gym` work as well.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...environment.answer_part import answer_part
from ...environment.episode import Observation
from ...errors import UserError
from ...types import Message

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
class Actions:
    """Reads the actions of one action space.

    Attributes:
        kind: "Text", "Discrete", "Box", "MultiBinary" or "MultiDiscrete".
        space: the action space.
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
        tagged = _TAGGED.findall(text)
        text = (tagged[-1][1] if tagged else text).strip()
        return self._array(text) if self.kind in ARRAYS else self._discrete(text)

    @property
    def expected(self) -> Any:
        """Description of an action for the policy: a sentence, or names by number."""
        if self.kind != "Discrete":
            return f"a JSON list of shape {list(self.space.shape)}"
        if 0 < len(self.names) <= MOST_LISTED:
            return {str(number): name for number, name in sorted(self.names.items())}
        first, count = int(self.space.start), int(self.space.n)
        return f"one integer from {first} to {first + count - 1}"

    def _discrete(self, text: str) -> Any:
        found = set()
        # Long names first: "up left" is not also "up".
        for number, name in sorted(self.names.items(), key=lambda item: -len(item[1])):
            text, times = re.subn(rf"(?<!\w){re.escape(name)}(?!\w)", " ", text, flags=re.I)
            found |= {number} if times else set()
        found |= {int(number) for number in _WHOLE_NUMBER.findall(text)}
        if not found:
            raise MalformedAction("the reply names no action")
        if len(found) > 1:
            raise MalformedAction("the reply names several actions")
        (number,) = found
        first = int(self.space.start)
        if not first <= number < first + int(self.space.n):
            raise MalformedAction(f"there is no action {number}")
        return self.space.dtype.type(number)

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

    Args:
        env: the environment.
        where: name of the environment in messages.

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
