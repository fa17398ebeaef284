"""Rewards of steps: from the characters where the steps end to the tokens."""

from __future__ import annotations

from collections.abc import Sequence

from ..steps import Decode, last_tokens
from ..types import Trajectory


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
    try:
        found = last_tokens([end for end, _ in steps], text, tokens, decode, opened)
    except ValueError as error:
        raise ValueError(f"Grade.steps: {error}") from error
    return tuple((turn.start + at, reward) for at, (_, reward) in zip(found, steps, strict=True))
