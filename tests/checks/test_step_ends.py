"""Rewards of steps of a completion, from the characters where they end to the tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from sixfold.checks.environment import Environment
from sixfold.checks.step_ends import token_steps
from sixfold.environment.episode import End, final_reward
from sixfold.environment.grade import Grade
from sixfold.types import Group, Reward, Task, Trajectory

PIECES = [b"ab", b"c\n", b"\xe2\x82", b"\xac", b"\n", b"", b"d", b"<end>"]
"""Bytes of the tokens. The third and the fourth are the two parts of a euro sign."""
TEXT = "abc\n\u20ac\nd"


def decode(ids: Sequence[int]) -> str:
    return b"".join(PIECES[i] for i in ids if i != 7).decode("utf-8", "replace")


def completion(**changed: Any) -> Trajectory:
    made = Trajectory.one_turn(
        "t", 0, [1, 1, 1], list(range(8)), [-1.0] * 8, [0] * 8, "stop", text=TEXT
    )
    return replace(made, **changed)


def test_every_end_of_a_step_is_in_the_token_that_completes_it() -> None:
    """The slow version: the first token after which the text has that many whole characters."""
    ends = range(1, len(TEXT) + 1)
    found = token_steps([(end, 0.5 * end) for end in ends], TEXT, completion(), decode, "")
    first = [
        next(k for k in range(8) if decode(range(k + 1)).rstrip("\ufffd").startswith(TEXT[:end]))
        for end in ends
    ]
    assert first == [0, 0, 1, 1, 3, 4, 6]
    assert found == tuple((3 + k, 0.5 * end) for k, end in zip(first, ends, strict=True))


def test_an_open_think_tag_counts_in_the_text_that_the_reward_read() -> None:
    opened = completion(opened="<think>")
    assert token_steps([(7 + 4, 1.0)], "<think>" + TEXT, opened, decode, "<think>") == ((4, 1.0),)
    with pytest.raises(ValueError, match=r"character 7.* after the 7 that the prompt left open"):
        token_steps([(7, 1.0)], "<think>" + TEXT, opened, decode, "<think>")


def test_ends_that_no_token_has() -> None:
    for end in (0, -1, len(TEXT) + 1):
        with pytest.raises(ValueError, match=rf"ends at character {end}, .* Use 1 to {len(TEXT)}"):
            token_steps([(end, 1.0)], TEXT, completion(), decode, "")
    with pytest.raises(ValueError, match="the text differs"):
        token_steps([(2, 1.0)], "xyz", completion(), decode, "")
    with pytest.raises(ValueError, match=r"one reply.*Observation\.reward"):
        token_steps([(2, 1.0)], TEXT, completion(graded="ab"), decode, "")


@pytest.mark.parametrize("steps", [[0.5], [(1,)], [(1.5, 1.0)], [(1, math.nan)], [(1, "x")], 3])
def test_steps_that_are_no_pairs_of_numbers(steps: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"Grade: steps .* pairs"):
        Grade(1.0, None, steps=steps)


def test_an_environment_does_not_give_steps_by_characters() -> None:
    with pytest.raises(ValueError, match=r"Observation\.reward"):
        final_reward(End(Grade(1.0, None, steps=[(1, 1.0)])))


def lines(text: str, task: Task) -> Grade:
    """1 for each line that ends."""
    return Grade(0.25, None, steps=[(i + 1, 1.0) for i, c in enumerate(text) if c == "\n"])


def last(text: str, task: Task) -> Grade:
    return Grade(2.0, None, steps=[(len(text), 3.0)])


def beyond(text: str, task: Task) -> Grade:
    return Grade(1.0, "passed", steps=[(99, 1.0)])


def of_group(group: Any, task: Task) -> list[Grade]:
    return [Grade(0.0, None, steps=[(1, float(k))]) for k, _ in enumerate(group, 1)]


def scored(rewards: Sequence[Any], weights: Sequence[float] = (), **options: Any) -> list[Reward]:
    group = Group(Task("t", "?"), [completion(), completion(sample=1)])
    with Environment(rewards, weights=weights, **options) as environment:
        environment.shown = lambda ids, special=True: decode(ids)
        environment.decode = decode
        environment.score([group])
    return [t.reward for t in group.trajectories if t.reward]


def test_steps_of_several_rewards_have_their_weights() -> None:
    first, second = scored([lines, last, of_group], [2.0, -0.5, 1.0])
    assert first.value == 2 * 0.25 - 0.5 * 2
    assert first.steps == ((4, 2.0), (7, 2.0), (9, -1.5), (3, 1.0))
    assert second.steps == ((4, 2.0), (7, 2.0), (9, -1.5), (3, 2.0))
    (ignored, _) = scored([lines, last], [0.0, 1.0])
    assert ignored.steps == ((9, 3.0),), "weight 0 only logs"


def test_a_step_beyond_the_completion_fails_the_check() -> None:
    for reward in scored([beyond, last], error_budget=1.0):
        assert reward.value is None and reward.steps == ()
        assert reward.verdict == "infrastructure_error"
        assert "beyond: Grade.steps" in (reward.error or "")
