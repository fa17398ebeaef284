"""Any trajectory comes back from JSON as it was."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sixfold.types import Reward, Trajectory

_finite = st.floats(allow_nan=False, allow_infinity=False)
_rewards = st.builds(
    Reward,
    st.none() | _finite,
    st.dictionaries(st.text(), _finite, max_size=3),
    st.none() | st.text(),
    _finite,
)


@st.composite
def _trajectories(draw: st.DrawFn) -> Trajectory:
    prompt, rest = draw(st.integers(1, 4)), draw(st.integers(0, 6))
    n = prompt + rest
    return Trajectory(
        task_id=draw(st.text()),
        sample=draw(st.integers(0, 2**31)),
        tokens=draw(st.lists(st.integers(0, 2**31), min_size=n, max_size=n)),
        prompt_length=prompt,
        mask=[False] * prompt + draw(st.lists(st.booleans(), min_size=rest, max_size=rest)),
        logp=draw(st.lists(_finite, min_size=n, max_size=n)),
        version=draw(st.lists(st.integers(-1, 2**40), min_size=n, max_size=n)),
        finish_reason=draw(st.sampled_from(["stop", "length", "aborted", "error"])),
        text=draw(st.text()),
        turns=draw(st.lists(st.integers(0, n), max_size=3)),
        seconds=draw(_finite),
        reward=draw(st.none() | _rewards),
    )


@pytest.mark.slow
@given(_trajectories())
def test_json_keeps_every_bit(trajectory: Trajectory) -> None:
    assert Trajectory.from_record(json.loads(json.dumps(trajectory.to_record()))) == trajectory
