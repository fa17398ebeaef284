"""The ledger: every group is trained once, none waits for its length, and none gets too old."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sixfold.controller.ledger import Ledger
from sixfold.staleness import largest_age, window_groups


class Run:
    """A run over a ledger in which groups finish in an order drawn at random.

    Attributes:
        ages: age of every trained group, by number.
        trained: numbers of the trained groups, by step.
    """

    def __init__(self, ledger: Ledger, rng: random.Random) -> None:
        self.ledger, self.rng = ledger, rng
        self.begun: dict[int, int] = {}
        self.finished: set[int] = set()
        self.ages: dict[int, int] = {}
        self.trained: list[list[int]] = []
        self.most_open = 0

    def step(self) -> None:
        """Make one step: groups finish one by one until the ledger has enough."""
        ledger = self.ledger
        ended = ledger.trained // ledger.per_step
        for number in ledger.admit():
            assert number not in self.begun, "started twice"
            self.begun[number] = ended
        self.most_open = max(self.most_open, len(ledger.admitted))
        while (chosen := ledger.choose(self.finished)) is None:
            running = [n for n in ledger.admitted if n not in self.finished]
            self.finished.add(self.rng.choice(running))
        self.trained.append(chosen)
        for number in chosen:
            assert number not in self.ages, "trained twice"
            self.ages[number] = ended - self.begun[number]
        ledger.train(chosen)
        self.finished -= set(chosen)


@given(
    per_step=st.integers(1, 6),
    staleness=st.integers(0, 5),
    share=st.floats(0, 1),
    seed=st.integers(0, 10**6),
)
def test_every_group_is_trained_once_and_none_gets_too_old(
    per_step: int, staleness: int, share: float, seed: int
) -> None:
    steps, window = 12, window_groups(per_step, staleness, share)
    run = Run(Ledger(per_step, staleness, window, steps), random.Random(seed))
    for _ in range(steps):
        run.step()
    # All groups of the run, the slowest ones too: nothing is dropped for its age or its length.
    assert sorted(run.ages) == list(range(steps * per_step))
    assert max(run.ages.values()) <= largest_age(per_step, staleness, window)
    assert run.most_open <= (staleness + 1) * per_step
    assert not run.ledger.admit(), "a group starts that no step trains"
    if not staleness:
        assert run.trained == [list(range(s * per_step, (s + 1) * per_step)) for s in range(steps)]


@pytest.mark.parametrize("staleness", [1, 2, 4])
def test_the_bound_is_reached(staleness: int) -> None:
    """It is not larger than it must be: one slow group among quick ones gets that old."""
    per_step, steps = 2, 20
    for share in (0.0, 0.5, 1.0):
        window = window_groups(per_step, staleness, share)
        ages = []
        for slow in range(10, 20):
            run = Run(Ledger(per_step, staleness, window, steps), random.Random(0))
            run.rng.choice = lambda running, slow=slow: min(  # type: ignore[method-assign, misc]
                running, key=lambda n: (n == slow, n)
            )
            for _ in range(steps):
                run.step()
            ages.append(run.ages[slow])
        assert max(ages) == largest_age(per_step, staleness, window), share


def test_a_group_is_taken_only_out_of_the_window() -> None:
    ledger = Ledger(2, 1, 2, 10)
    assert ledger.admit() == [0, 1, 2, 3]
    assert ledger.choose({2, 3}) is None  # 2 is beyond the window of 0 and 1
    assert ledger.choose({1, 3}) is None
    assert ledger.choose({0, 2}) == [0, 2]  # the window moves with its oldest group
    assert ledger.choose({0, 1, 2, 3}) == [0, 1]


@given(seed=st.integers(0, 10**6), killed_after=st.integers(0, 11))
def test_a_resume_trains_what_is_missing(seed: int, killed_after: int) -> None:
    """The open groups of the killed process start again, with no burst of new ones."""

    def ledger() -> Ledger:
        return Ledger(3, 2, 4, 12)

    first = Run(ledger(), random.Random(seed))
    for _ in range(killed_after):
        first.step()
    state = json.loads(json.dumps(first.ledger.state()))
    if killed_after < 12:
        first.ledger.admit()
    second = Run(ledger(), random.Random(seed + 1))
    second.ledger.load(state)
    assert second.ledger.admit() == first.ledger.admitted
    second.ledger.load(state)
    for _ in range(12 - killed_after):
        second.step()
    both = sorted([*first.ages, *second.ages])
    assert both == list(range(36))


def test_a_group_that_is_not_open_cannot_be_trained() -> None:
    ledger = Ledger(2, 0, 1, 3)
    ledger.admit()
    ledger.train([0, 1])
    for numbers in ([0], [2]):
        with pytest.raises(ValueError, match=f"group {numbers[0]} is not open"):
            ledger.train(numbers)
