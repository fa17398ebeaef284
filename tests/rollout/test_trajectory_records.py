"""A trajectory that is written as JSON and read again is unchanged."""

from __future__ import annotations

import json
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.made_trajectories import turns_of

from sixfold.types import FinishReason, Outcome, Reward, Trajectory, Turn

_finite = st.floats(allow_nan=False, allow_infinity=False)
_counts = st.integers(0, 9)
_facts = st.recursive(
    st.none() | st.booleans() | _finite | st.text(),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(), inner, max_size=2),
    max_leaves=4,
)
_rewards = st.builds(
    Reward,
    st.none() | _finite,
    st.dictionaries(st.text(), _finite, max_size=3),
    st.none() | st.text(),
    _finite,
    st.lists(st.tuples(st.integers(0, 9), _finite), max_size=2).map(tuple),
)


@st.composite
def _trajectories(draw: st.DrawFn) -> Trajectory:
    after = draw(st.lists(st.sampled_from("sto"), max_size=9))
    provenance = "p" * draw(st.integers(1, 4)) + "".join(after)
    n = len(provenance)
    reasons = st.sampled_from(get_args(FinishReason))
    turns = [
        Turn(turn.start, turn.stop, draw(_finite), draw(reasons), draw(_finite), draw(_counts))
        for turn in turns_of(provenance)
    ]
    return Trajectory(
        task_id=draw(st.text()),
        sample=draw(st.integers(0, 2**31)),
        tokens=draw(st.lists(st.integers(0, 2**31), min_size=n, max_size=n)),
        provenance=provenance,
        logp=draw(st.lists(_finite, min_size=n, max_size=n)),
        version=draw(st.lists(st.integers(-1, 2**40), min_size=n, max_size=n)),
        turns=tuple(turns),
        outcome=draw(st.sampled_from(get_args(Outcome))),
        text=draw(st.text()),
        reward=draw(st.none() | _rewards),
        opened=draw(st.text(max_size=3)),
        environment=draw(st.text(max_size=3)),
        events=tuple(draw(st.lists(st.dictionaries(st.text(), _facts, max_size=3), max_size=3))),
        started=draw(_finite),
        ended=draw(_finite),
    )


@pytest.mark.slow
@given(_trajectories())
def test_json_keeps_every_bit(trajectory: Trajectory) -> None:
    assert Trajectory.from_record(json.loads(json.dumps(trajectory.to_record()))) == trajectory


@pytest.mark.slow
@given(_trajectories())
def test_the_mask_and_the_turns_mark_exactly_the_sampled_tokens(trajectory: Trajectory) -> None:
    """For trajectories with random turns, template tokens and observations."""
    sampled = [i for i, letter in enumerate(trajectory.provenance) if letter == "s"]
    assert [i for i, m in enumerate(trajectory.mask) if m] == sampled
    assert [i for turn in trajectory.turns for i in range(turn.start, turn.stop)] == sampled
    assert (
        trajectory.sampled_length
        == len(sampled)
        == len(trajectory.tokens) - sum(trajectory.provenance.count(letter) for letter in "pto")
    )
    assert trajectory.provenance[: trajectory.prompt_length] == "p" * trajectory.prompt_length
