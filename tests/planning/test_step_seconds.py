"""Duration of a step, useful tokens and idle time: published numbers."""

from __future__ import annotations

import pytest
from tests.planning.course_values import STEPS_PER_HOUR, TOPOLOGY_STEPS

from sixfold.errors import UserError
from sixfold_planning.step_time import (
    PhaseSeconds,
    StepTime,
    step_time,
    trainer_utilisation,
    useful_tokens_per_second,
)


def _step(phases: PhaseSeconds, topology: str, sync_hidden: bool = False) -> StepTime:
    return step_time(phases, topology=topology, sync_hidden=sync_hidden)


@pytest.mark.parametrize(("phases", "per_hour", "gain"), STEPS_PER_HOUR)
def test_steps_per_hour(
    phases: tuple[float, float, float], per_hour: tuple[int, int, int], gain: float
) -> None:
    """L19, oracle of the topology widget: async does not wait for sync."""
    rollout, trainer, sync = phases
    seconds = PhaseSeconds(rollout, 0, 0, trainer, sync)
    steps = [
        _step(seconds, name, sync_hidden=True) for name in ("colocated", "disaggregated", "async")
    ]
    assert [round(step.steps_per_hour) for step in steps] == list(per_hour)
    assert steps[0].seconds / steps[2].seconds == pytest.approx(gain, abs=0.005)


def test_worked_example() -> None:
    """L22a: 32 s per step, 33k useful tokens per second, the trainer idles 20 s."""
    phases = PhaseSeconds(rollout=30, verifier=1, reference=3, trainer=8, sync=1)
    step = _step(phases, "disaggregated")
    assert step.seconds == 32
    assert step.trainer_idle == 20
    assert step.sampler_idle == 0
    assert phases.dominant == "rollout"
    useful = useful_tokens_per_second(
        prompts=64, samples=16, mean_length=1024, keep_rate=1, seconds=step.seconds
    )
    assert useful / 1e3 == pytest.approx(33, abs=0.5)
    # The 30 s of sampling: four engines of 12k tokens per second, and a tail of 1.4.
    assert pytest.approx(21, abs=1) == 64 * 16 * 1024 / (4 * 12e3)
    assert pytest.approx(phases.rollout, abs=1) == 1.4 * 64 * 16 * 1024 / (4 * 12e3)


@pytest.mark.parametrize(
    ("topology", "beside_trainer", "beside_sampler"),
    [
        ("colocated", 51, 51),
        ("disaggregated", 29, 33),  # max(20 + 2, 6 + 18) + 5, max(20 + 2 + 6, 18) + 5
        ("async", 24, 28),
    ],
)
def test_the_reference_is_beside_the_trainer_or_the_sampler(
    topology: str, beside_trainer: float, beside_sampler: float
) -> None:
    """L22a: the trainer; 09a: the sampler (erratum E17). R-229."""
    phases = PhaseSeconds(rollout=20, verifier=2, reference=6, trainer=18, sync=5)
    assert _step(phases, topology).seconds == beside_trainer
    there = step_time(phases, topology=topology, sync_hidden=False, reference_on="sampler")
    assert there.seconds == beside_sampler


def test_async_waits_for_a_long_sync_unless_it_is_hidden() -> None:
    """E17: L22a includes sync in the maximum, L19 does not."""
    phases = PhaseSeconds(rollout=8, verifier=0, reference=0, trainer=6, sync=35)
    assert _step(phases, "async").seconds == 35
    assert _step(phases, "async", sync_hidden=True).seconds == 8


@pytest.mark.parametrize(("topology", "seconds", "gain", "idle"), TOPOLOGY_STEPS)
def test_gantt_oracle(topology: str, seconds: float, gain: float, idle: float) -> None:
    """L22c with rollout 20 s, trainer 8 s and sync 3 s."""
    step = _step(PhaseSeconds(20, 0, 0, 8, 3), topology)
    assert step.seconds == seconds
    assert 31 / step.seconds == pytest.approx(gain, abs=0.005)
    if topology != "colocated":
        assert step.trainer_idle / step.seconds == pytest.approx(idle, abs=0.005)


def test_utilisation_leaves_out_sync() -> None:
    """L22a: (ref + T) / (tau - S) if disaggregated."""
    phases = PhaseSeconds(rollout=30, verifier=1, reference=3, trainer=8, sync=1)
    step = _step(phases, "disaggregated")
    assert trainer_utilisation(phases, step) == pytest.approx(11 / 31)


def test_discarded_tokens_are_not_useful() -> None:
    """L22a: B * K * L * keep_rate / tau."""
    found = useful_tokens_per_second(
        prompts=10, samples=4, mean_length=500, keep_rate=0.8, seconds=20
    )
    assert found == pytest.approx(800)


def test_negative_time_names_the_phase() -> None:
    with pytest.raises(UserError, match="verifier seconds = -1"):
        PhaseSeconds(1, -1, 0, 0, 0)


def test_a_step_without_work_is_refused() -> None:
    with pytest.raises(UserError, match="seconds of all phases"):
        _step(PhaseSeconds(0, 0, 0, 0, 0), "colocated")
