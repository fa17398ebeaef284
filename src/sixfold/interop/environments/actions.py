"""Actions of a Gymnasium environment, read from a reply. Does not import Gymnasium.

The kind of an action space is told by its name, so that a space may come from `gym` as well.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...environment.answer_part import answer_part
from ...errors import UserError

ARRAYS = ("Box", "MultiBinary", "MultiDiscrete")
MOST_LISTED = 20
"""Actions that a hint lists by name."""

_TAGGED = re.compile(r"<(action|answer)>(.*?)</\1>", re.DOTALL | re.IGNORECASE)
_WHOLE_NUMBER = re.compile(r"(?<![\w.])-?\d+(?!\w|\.\d)")


class MalformedAction(ValueError):
    """A reply from which no action can be read. The message says why."""


@dataclass(frozen=True)
class Actions:
    """Reads the actions of one action space.

    Attributes:
        kind: Text, Discrete, Box, MultiBinary or MultiDiscrete.
        space: the action space.
        names: names of discrete actions, by number. May be empty.
    """

    kind: str
    space: Any
    names: Mapping[int, str] = field(default_factory=dict)

    def read(self, reply: str) -> Any:
        """The action of a reply, as `step` takes it.

        A thought before the action is left out. So is what stands outside of the last `<action>`
        or `<answer>` tag, if there is one.

        Raises:
            MalformedAction: if the reply has no action, or several.
        """
        text = answer_part(reply)
        if self.kind == "Text":
            return text
        tagged = _TAGGED.findall(text)
        text = (tagged[-1][1] if tagged else text).strip()
        return self._array(text) if self.kind in ARRAYS else self._discrete(text)

    def hint(self, error: MalformedAction) -> str:
        """JSON text that tells the policy what an action looks like."""
        wanted: Any = f"a JSON list of shape {list(self.space.shape)}"
        if self.kind == "Discrete":
            first, count = int(self.space.start), int(self.space.n)
            named = {str(number): name for number, name in sorted(self.names.items())}
            wanted = f"one integer from {first} to {first + count - 1}"
            wanted = named if 0 < len(named) <= MOST_LISTED else wanted
        return json.dumps(
            {"error": {"kind": "malformed_action", "message": str(error), "actions": wanted}}
        )

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
            raise MalformedAction("the reply is no JSON list of numbers") from error
        if action.shape != self.space.shape or not self.space.contains(action):
            raise MalformedAction("the list is not in the action space")
        return action


def actions_of(env: Any, where: str) -> Actions:
    """How to read actions of an environment.

    Args:
        env: the environment.
        where: how the user named it, for messages.

    Raises:
        UserError: if its action space has no text form.
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
    """Names of discrete actions, which Gymnasium does not define.

    Looks at the attribute `action_names` of the environment, at `metadata["action_names"]`, and at
    the method `get_action_meanings` of Atari games.
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
