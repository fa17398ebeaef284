"""An injected fault raises one alarm until it has passed. A healthy run raises none."""

from __future__ import annotations

import json

import pytest

from sixfold.algorithm.zoo import ZOO
from sixfold.report.alarms import BASELINE, WARM_UP, WINDOW, Alarms

HEALTHY = {
    "time/rollout_s": 1.0,
    "time/trainer_s": 1.0,
    "rollout/tok_s": 1000.0,
    "time/check_p99_s": 0.01,
    "group/degenerate_frac": 0.3,
    "mismatch/kl_k3": 0.005,
    "mismatch/temperature": 0.992,
    "reward/part/prm.steps": 4.0,
    "judge/position_bias": 0.05,
    "judge/length_corr": 0.1,
    "judge/refused_frac": 0.0,
    "judge/unreadable_frac": 0.0,
    "preference/displacement": 0.0,
    "preference/heldout_displacement": 0.0,
    "preference/length_corr": 0.1,
}


def after_baseline() -> Alarms:
    alarms = Alarms()
    for step in range(WARM_UP + BASELINE + WINDOW):
        slow_start = {**HEALTHY, "time/rollout_s": 9.0} if step < WARM_UP else HEALTHY
        assert alarms.observe(slow_start) == []
    return alarms


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ({"time/trainer_s": 1.5}, "duration of a step has grown from 2 to 2.5 s"),
        ({"rollout/tok_s": 790.0}, "sampling speed has fallen from 1000 to 790 tokens/s"),
        ({"time/check_p99_s": 0.02}, "checks has grown from 0.01 to 0.015 s"),
        ({"reward/part/prm.steps": 6.0}, "number per completion has grown from 4 to 5 steps"),
        ({"group/degenerate_frac": 0.8}, "of groups have equal rewards"),
        ({"mismatch/kl_k3": 0.02}, "KL divergence is 0.011 nats per token"),
        ({"mismatch/kl_k3": float("nan")}, "KL divergence is nan nats"),
        ({"mismatch/temperature": 0.985}, "fit a temperature of 0.985 times the trainer's"),
        ({"mismatch/temperature": 1.02}, "check that rollout.temperature reaches the engine"),
        ({"judge/position_bias": -0.9}, "position (judge/position_bias = -0.33)"),
        ({"judge/length_corr": 0.5}, "pairwise.length_control"),
        ({"judge/refused_frac": 0.4}, "read the samples"),
        ({"judge/unreadable_frac": 0.4}, "environment.judge.max_tokens"),
        ({"preference/displacement": 3.0}, "per token on the reference"),
        ({"preference/heldout_displacement": 3.0}, "held-out better completions have lost 3.00"),
        ({"preference/length_corr": -0.9}, "the margin goes with the length"),
    ],
)
def test_alarm_is_raised_once_and_again_after_recovery(fault: dict[str, float], said: str) -> None:
    alarms = after_baseline()
    for _ in range(2):
        rung = [line for _ in range(2 * WINDOW) for line in alarms.observe({**HEALTHY, **fault})]
        assert len(rung) == 1 and said in rung[0]
        assert [line for _ in range(2 * WINDOW) for line in alarms.observe(HEALTHY)] == []


def test_microseconds_are_not_a_fault() -> None:
    """Checks of 10 instead of 5 microseconds are twice as slow, but raise no alarm."""
    alarms = Alarms()
    for _ in range(WARM_UP + BASELINE + WINDOW):
        assert alarms.observe({**HEALTHY, "time/check_p99_s": 5e-6}) == []
    assert [
        line
        for _ in range(3 * WINDOW)
        for line in alarms.observe({**HEALTHY, "time/check_p99_s": 1e-5})
    ] == []


def test_less_than_a_fifth_is_not_a_fault() -> None:
    alarms = after_baseline()
    assert [
        line
        for _ in range(3 * WINDOW)
        for line in alarms.observe({**HEALTHY, "time/trainer_s": 1.35, "rollout/tok_s": 830.0})
    ] == []


@pytest.mark.parametrize(
    "cut",
    [
        0,
        WARM_UP,
        WARM_UP + BASELINE,
        WARM_UP + BASELINE + WINDOW + 2,
        WARM_UP + BASELINE + 2 * WINDOW,
    ],
)
def test_a_resumed_run_raises_the_same_alarms(cut: int) -> None:
    """Saving the state as JSON and loading it at any step does not change later alarms, even after
    a number that was not finite.
    """
    ill = {
        **HEALTHY,
        "time/trainer_s": 1.5,
        "mismatch/kl_k3": float("nan"),
        "group/degenerate_frac": 0.9,
    }
    steps = (
        [HEALTHY] * (WARM_UP + BASELINE + WINDOW)
        + [ill] * WINDOW
        + [HEALTHY] * WINDOW
        + [ill] * WINDOW
    )
    whole, first, second = Alarms(), Alarms(), Alarms()
    said = [whole.observe(metrics) for metrics in steps]
    before = [first.observe(metrics) for metrics in steps[:cut]]
    second.load(json.loads(json.dumps(first.state(), allow_nan=False)))
    assert before + [second.observe(metrics) for metrics in steps[cut:]] == said
    assert sum(map(bool, said)) >= 2


def test_groups_with_equal_rewards_raise_no_alarm_without_a_group_baseline() -> None:
    for group_baseline in (True, False):
        alarms = Alarms(group_baseline=group_baseline)
        said = [line for _ in range(12) for line in alarms.observe({"group/degenerate_frac": 1.0})]
        assert len(said) == group_baseline
    idle = {name: ZOO[name].equal_rewards_idle for name in ("grpo", "gdpo", "remax", "reinforce")}
    assert idle == {"grpo": True, "gdpo": False, "remax": False, "reinforce": False}


def test_what_dynamic_sampling_leaves_has_an_alarm_of_its_own() -> None:
    """The share of what was sampled raises none then: the filter has replaced those groups."""

    def said(alarms: Alarms, left: float) -> list[str]:
        metrics = {"group/degenerate_frac": 0.9, "dynamic/degenerate_frac": left}
        return [line for _ in range(2 * WINDOW) for line in alarms.observe(metrics)]

    alarms = Alarms()
    for _ in range(2):
        assert said(alarms, 0.09) == []
        (line,) = said(alarms, 0.12)
        assert "still have equal rewards after dynamic sampling" in line
