"""Failures of devices: the simulation against the closed form, and the closed form by hand."""

from __future__ import annotations

import math
from random import Random

import pytest

from sixfold.errors import UserError
from sixfold_planning.simulate.groups import Drawn
from sixfold_planning.simulate.outcome import Outcome
from sixfold_planning.simulate.settings import Failures, Settings, expected_slowdown
from sixfold_planning.simulate.simulation import Simulation
from sixfold_planning.simulate.timing import Timing

RATE, RESTART, EVERY, STEP = 1 / 60, 7.0, 5, 4.0
STEPS = 100


class OneSample:
    """Groups of one sample of 100 tokens."""

    def draw(self, random: Random, samples: int) -> Drawn:
        return Drawn((100,), True)


def simulate(topology: str, failures: Failures, *, seed: int = 0, sampling: int = 4) -> Outcome:
    """Steps of 1 s of sampling, 3 s of training and no sync: 4 s colocated."""
    timing = Timing(
        sampling_devices=sampling,
        training_devices=4,
        replicas=4,
        slots=1,
        stride=1000.0,
        decode=lambda count, sampled: 0.01,
        prefill=0.0,
        learn=lambda mean: 3.0,
        sync=0.0,
    )
    settings = Settings(
        topology=topology,
        prompts=4,
        samples=1,
        steps=STEPS - 1,  # one more fills the pipeline
        staleness=0,
        attempts=1,
        failures=failures,
        seed=seed,
    )
    return Simulation(timing, OneSample(), settings).run()


def test_rare_failures_cost_half_an_interval_and_a_restart() -> None:
    segment, rate = EVERY * STEP, 1e-7
    lost = (expected_slowdown(segment, rate=rate, restart=RESTART) - 1) / rate
    assert lost == pytest.approx(segment / 2 + RESTART, rel=1e-3)


def test_the_expectation_by_its_recursion() -> None:
    """E = p s + (1 - p) (time until a failure within s + restart + E), with p = exp(-rate s)."""
    segment, steps = 50.0, 200_000
    width = segment / steps
    times = ((i + 0.5) * width for i in range(steps))
    failed = sum((t + RESTART) * RATE * math.exp(-RATE * t) * width for t in times)
    survives = math.exp(-RATE * segment)
    expected = (survives * segment + failed) / survives
    found = segment * expected_slowdown(segment, rate=RATE, restart=RESTART)
    assert found == pytest.approx(expected, rel=1e-6)


def test_simulated_failures_cost_what_is_expected() -> None:
    failures = Failures(4 / RATE, RESTART, EVERY)
    runs = [simulate("colocated", failures, seed=seed) for seed in range(30)]
    assert sum(run.failures for run in runs) > 150
    seconds = [run.total_seconds for run in runs]
    mean = sum(seconds) / len(runs)
    deviation = math.sqrt(sum((value - mean) ** 2 for value in seconds) / (len(runs) - 1))
    expected = STEPS * STEP * expected_slowdown(EVERY * STEP, rate=RATE, restart=RESTART)
    assert abs(mean - expected) < 4 * deviation / math.sqrt(len(runs))
    assert deviation / math.sqrt(len(runs)) < 0.04 * expected


def test_without_checkpoints_a_run_starts_from_its_beginning() -> None:
    often, none = (
        simulate("colocated", Failures(4 * 150, RESTART, every), seed=3) for every in (5, 0)
    )
    assert often.failures and none.failures
    # 400 s of work, of which each failure with checkpoints repeats at most 20 s.
    assert often.total_seconds <= 400 + often.failures * (20 + RESTART)
    assert none.tokens.lost > 5 * often.tokens.lost


def test_an_engine_that_fails_repeats_its_own_sequences_alone() -> None:
    """Without checkpoints, a restart of the run would lose all trained tokens.

    4000 of 4004 devices sample, and one fails every 40 s.
    """
    failures = Failures(4004 * 40, RESTART, 0)
    found = simulate("disaggregated", failures, sampling=4000, seed=1)
    assert found.failures >= 3
    # An engine holds at most one sequence of 100 tokens, and takes 1 s for it.
    assert 0 < found.tokens.lost <= 100 * found.failures
    assert found.total_seconds <= STEPS * STEP + found.failures * (RESTART + 1)


def test_failures_without_end_are_refused() -> None:
    with pytest.raises(UserError, match="restarts in a row") as refused:
        simulate("colocated", Failures(4 * 0.5, 1.0, 5))
    assert "\n" not in str(refused.value)
    assert expected_slowdown(1e6, rate=1.0, restart=0) == math.inf


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((-1.0, 1.0, 1), "mean time between failures = -1"),
        ((0.0, 1.0, 1), "mean time between failures = 0"),
        ((math.inf, 1.0, 1), "mean time between failures = inf"),
    ],
)
def test_bad_failures_are_refused(arguments: tuple[float, float, int], named: str) -> None:
    with pytest.raises(UserError, match=named):
        Failures(*arguments)
