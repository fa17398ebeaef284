"""When the reference is reset: on schedule, or on stagnation, by a slow count; and the same after a
resume at any step.
"""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sixfold.reference.reset import ResetPolicy


def _looks(policy: ResetPolicy, means: list[float | None], first: int = 1) -> list[str]:
    return [policy.observe(step, mean) for step, mean in enumerate(means, start=first)]


def test_on_schedule() -> None:
    assert [step for step, why in enumerate(_looks(ResetPolicy(4, 0), [None] * 13), 1) if why] == [
        4,
        8,
        12,
    ]
    assert set(_looks(ResetPolicy(4, 0), [0.5] * 8)) == {
        "",
        "schedule",
    }  # stagnation is not asked for
    assert not any(_looks(ResetPolicy(0, 0), [0.5] * 20))


def test_on_stagnation_by_hand() -> None:
    """Patience 2: .5 (best), .4, .5 equals and does not beat it -> reset; counting anew .3, .6
    beats it, .6, .1 -> reset.
    """
    assert _looks(ResetPolicy(0, 2), [0.5, 0.4, 0.5, 0.3, 0.6, 0.6, 0.1]) == [
        "",
        "",
        "stagnation",
        "",
        "",
        "",
        "stagnation",
    ]


def test_steps_without_an_evaluation_count_nothing() -> None:
    means = [0.5, None, None, None, 0.4, None, math.nan, 0.4, None]
    assert _looks(ResetPolicy(0, 2), means) == ["", "", "", "", "", "", "", "stagnation", ""]
    assert _looks(ResetPolicy(0, 1), [math.nan, 0.5, 0.6]) == [
        "",
        "",
        "",
    ]  # NaN is never the best: nothing would beat it


def test_both_at_once_is_stagnation_and_a_schedule_restarts_no_count() -> None:
    assert _looks(ResetPolicy(2, 2), [0.5, 0.4, 0.4, 0.4]) == [
        "",
        "schedule",
        "stagnation",
        "schedule",
    ]
    assert _looks(ResetPolicy(3, 2), [0.5, 0.4, 0.4]) == ["", "", "stagnation"]


def test_negative_settings_are_refused() -> None:
    for wrong in [(-1, 0), (0, -1)]:
        with pytest.raises(ValueError, match="must not be negative"):
            ResetPolicy(*wrong)


MEANS = st.lists(st.one_of(st.none(), st.sampled_from([0.0, 0.1, 0.2, 0.3])), max_size=30)


@pytest.mark.slow
@given(MEANS, st.integers(0, 5), st.integers(1, 4))
def test_matches_a_slow_count(means: list[float | None], every: int, patience: int) -> None:
    """Since the last improvement or reset on stagnation, whichever is later, `patience` evaluations
    have passed.
    """
    known: list[float] = []
    since, expected = 0, []
    for step, mean in enumerate(means, start=1):
        if mean is not None:
            known.append(mean)
            since = len(known) if mean > max(known[:-1], default=-1.0) else since
        stagnant = mean is not None and len(known) - since == patience
        since = len(known) if stagnant else since
        expected.append(
            "stagnation" if stagnant else "schedule" if every and step % every == 0 else ""
        )
    assert _looks(ResetPolicy(every, patience), means) == expected


@pytest.mark.slow
@given(MEANS, st.integers(0, 5), st.integers(0, 4), st.integers(0, 30))
@example([0.3, 0.1, 0.1], 0, 2, 2)
def test_a_resume_decides_as_the_uninterrupted_run(
    means: list[float | None], every: int, patience: int, cut: int
) -> None:
    whole, before, after = (ResetPolicy(every, patience) for _ in range(3))
    first = _looks(before, means[:cut])
    after.load(json.loads(json.dumps(before.state(), allow_nan=False)))
    assert first + _looks(after, means[cut:], first=len(means[:cut]) + 1) == _looks(whole, means)
