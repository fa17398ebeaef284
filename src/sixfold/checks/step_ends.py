"""Rewards of steps: from the characters where the steps end to the tokens."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import cache

from ..types import Trajectory

Decode = Callable[[Sequence[int]], str]
"""Text of sampled token ids."""


def token_steps(
    steps: Sequence[tuple[int, float]],
    text: str,
    trajectory: Trajectory,
    decode: Decode,
    opened: str,
) -> tuple[tuple[int, float], ...]:
    """Rewards of steps as (index in `trajectory.tokens`, reward).

    The index is that of the token with the last character of the step. Steps whose last characters
    are in one token have the same index; their rewards add up in training.

    Args:
        steps: (number of characters of `text` up to the end of the step, reward).
        text: the completion, as the reward read it.
        trajectory: the completion. It must have one reply.
        decode: text of sampled tokens.
        opened: start of `text` that was not sampled.

    Raises:
        ValueError: if there is no such token, or if the trajectory has several replies.
    """
    if len(trajectory.turns) != 1 or trajectory.graded is not None:
        raise ValueError(
            "Grade.steps needs a completion of one reply. With several, the environment rewards"
            " each by Observation.reward"
        )
    (turn,) = trajectory.turns
    tokens = trajectory.tokens[turn.start : turn.stop]

    @cache
    def before(count: int) -> str:
        return opened + decode(tokens[:count])

    found = []
    for end, reward in steps:
        if not len(opened) < end <= len(text):
            least = f" after the {len(opened)} that the prompt left open" if opened else ""
            raise ValueError(
                f"Grade.steps: a step ends at character {end}, but the completion has"
                f" {len(text)}. Use 1 to {len(text)}{least}"
            )
        whole = text[:end]
        counts = range(1, len(tokens) + 1)
        at = bisect_left(counts, True, key=lambda count: before(count).startswith(whole))
        if at == len(tokens):
            raise ValueError(
                f"Grade.steps: no token ends at or after character {end}: the text differs from"
                " that of the sampled tokens"
            )
        found.append((turn.start + at, reward))
    return tuple(found)
