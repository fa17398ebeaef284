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

    Args:
        drops: probability that a group is dropped as it finishes.

    Attributes:
        dropped: numbers of the dropped groups, by the step that they did not reach.
        ages: age of every trained group, by number.
        trained: numbers of the trained groups, by step.
    """

    def __init__(self, ledger: Ledger, rng: random.Random, drops: float = 0.0) -> None:
        self.ledger, self.rng, self.drops = ledger, rng, drops
        self.dropped: list[list[int]] = []
        self.begun: dict[int, int] = {}
        self.finished: set[int] = set()
        self.ages: dict[int, int] = {}
        self.trained: list[list[int]] = []
        self.most_open = 0

    def step(self) -> None:
        """Make one step: groups finish one by one until the ledger has enough."""
        ledger = self.ledger
        ended = ledger.trained // ledger.per_step
        self.dropped.append([])
        self._admit(ended)
        while (chosen := ledger.choose(self.finished)) is None:
            running = [n for n in ledger.admitted if n not in self.finished]
            number = self.rng.choice(running)
            if self.rng.random() < self.drops:
                ledger.drop(number)
                self.dropped[-1].append(number)
                self._admit(ended)
            else:
                self.finished.add(number)
        self.trained.append(chosen)
        for number in chosen:
            assert number not in self.ages, "trained twice"
            self.ages[number] = ended - self.begun[number]
        ledger.train(chosen)
        self.finished -= set(chosen)

    def _admit(self, ended: int) -> None:
        for number in self.ledger.admit():
            assert number not in self.begun, "started twice"
            self.begun[number] = ended
        self.most_open = max(self.most_open, len(self.ledger.admitted))


@given(
    per_step=st.integers(1, 6),
    staleness=st.integers(0, 5),
    share=st.floats(0, 1),
    seed=st.integers(0, 10**6),
    drops=st.sampled_from([0.0, 0.3, 0.8]),
)
def test_every_group_is_trained_once_and_none_gets_too_old(
    per_step: int, staleness: int, share: float, seed: int, drops: float
) -> None:
    steps, window = 12, window_groups(per_step, staleness, share)
    run = Run(Ledger(per_step, staleness, window, steps), random.Random(seed), drops)
    for _ in range(steps):
        run.step()
    # All groups of the run, the slowest ones too: nothing is dropped for its age or its length.
    dropped = [number for step in run.dropped for number in step]
    assert sorted([*run.ages, *dropped]) == list(range(steps * per_step + len(dropped)))
    assert len(run.ages) == steps * per_step
    assert max(run.ages.values()) <= largest_age(per_step, staleness, window)
    assert run.most_open <= (staleness + 1) * per_step
    assert not run.ledger.admit(), "a group starts that no step trains"
    if not staleness and not drops:
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


@given(
    seed=st.integers(0, 10**6), killed_after=st.integers(0, 11), drops=st.sampled_from([0.0, 0.5])
)
def test_a_resume_trains_what_is_missing(seed: int, killed_after: int, drops: float) -> None:
    """The open groups of the killed process start again, with no burst of new ones. So do those
    that were dropped after its last step: no log has them.
    """

    def ledger() -> Ledger:
        return Ledger(3, 2, 4, 12)

    first = Run(ledger(), random.Random(seed), drops)
    for _ in range(killed_after):
        first.step()
    first.ledger.admit()
    begun = [*first.ledger.admitted]
    if drops:
        first.ledger.drop(begun[0])
    state = json.loads(json.dumps(first.ledger.state()))
    second = Run(ledger(), random.Random(seed + 1), drops)
    second.ledger.load(state)
    assert second.ledger.admit() == begun
    second.ledger.load(state)
    for _ in range(12 - killed_after):
        second.step()
    dropped = [number for run in (first, second) for step in run.dropped for number in step]
    both = sorted([*first.ages, *second.ages, *dropped])
    assert both == list(range(36 + len(dropped)))
    assert len(first.ages) + len(second.ages) == 36


def test_a_group_that_is_not_open_cannot_be_trained() -> None:
    ledger = Ledger(2, 0, 1, 3)
    ledger.admit()
    ledger.train([0, 1])
    for numbers in ([0], [2]):
        with pytest.raises(ValueError, match=f"group {numbers[0]} is not open"):
            ledger.train(numbers)
