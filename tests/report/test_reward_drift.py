"""R-206: the alarm for a learned reward that drifts, on planted series."""

from __future__ import annotations

import random

import numpy as np
import pytest

from sixfold.report.reward_drift import SPAN, RewardDrift, fitted_slope


def series(
    learned: float,
    verified: float | None = 0.0,
    steps: int = 150,
    noise: float = 0.01,
    seed: int = 0,
) -> list[dict[str, float]]:
    """Means of a reward model of std 2 and of a verifier, with slopes per 1,000 steps."""
    rng = random.Random(seed)
    found = []
    for step in range(steps):
        record = {
            "reward/part/reward_model": 5 + learned * step / 1000 + rng.gauss(0, noise),
            "reward/part_std/reward_model": 2.0,
        }
        if verified is not None:
            record["reward/part/math"] = 0.4 + verified * step / 1000 + rng.gauss(0, noise)
            record["reward/part_std/math"] = 0.49
        found.append(record)
    return found


def alarms(records: list[dict[str, float]]) -> list[str]:
    drift = RewardDrift()
    return [line for record in records for line in drift.observe(record)]


@pytest.mark.parametrize(
    "learned, verified, said",
    [
        (0.8, 0.0, "'reward_model' drifts by +0.4"),  # 0.8 / 2 per 1,000 steps
        (-0.8, 0.0, "'reward_model' drifts by -0.4"),
        (-0.8, None, "'reward_model' drifts by -0.4"),  # alone, and yet it falls
        (0.8, -2.0, "drifts by +"),
    ],
)
def test_a_reward_model_that_drifts_raises_one_alarm(
    learned: float, verified: float | None, said: str
) -> None:
    (line,) = alarms(series(learned, verified))
    assert said[:28] in line and "algorithm.whiten = 'source'" in line


@pytest.mark.parametrize(
    "learned, verified",
    [
        (0.0, 0.0),
        (0.1, 0.0),  # 0.05 standard deviations
        (0.8, 2.0),  # the policy learns: the verifier rises too
        (0.8, None),  # nothing else says what a rise is
    ],
)
def test_a_healthy_reward_raises_none(learned: float, verified: float | None) -> None:
    assert alarms(series(learned, verified)) == []


@pytest.mark.parametrize("learned", ["reward_model", "judge_pairwise", "prm"])
def test_figures_beside_a_reward_are_no_rewards(learned: str) -> None:
    """A figure that drifts raises no alarm, and one that rises is no verifier that rises."""
    still, falling = series(0.0), series(-0.8)
    for record in still:
        record[f"reward/part/{learned}.std"] = -record["reward/part/reward_model"]
    drifting = []
    for before, record in zip(falling, series(0.8), strict=True):
        up = before["reward/part/reward_model"]
        figures = {f"reward/part/{n}.steps": 9 - up for n in ("math", "reward_model")}
        drifting.append(
            {key.replace("reward_model", learned): value for key, value in record.items()} | figures
        )
    assert alarms([{**r, f"reward/part/{learned}": 1.0} for r in still]) == []
    (line,) = alarms(drifting)
    assert f"'{learned}' drifts by +" in line


def test_a_mean_that_is_not_finite_is_left_out() -> None:
    """Records of metrics.jsonl have None there, so a resume judges the same values."""
    records = series(0.0, steps=300)
    records[50]["reward/part/reward_model"] = float("nan")
    assert alarms(records) == []


def test_noise_is_no_drift() -> None:
    runs = [alarms(series(0.0, 0.0, steps=600, noise=1.0, seed=seed)) for seed in range(10)]
    assert runs == [[]] * 10


def test_a_resume_does_not_repeat_the_alarm() -> None:
    drift, records = RewardDrift(), series(0.8)
    drift.replay(records[: SPAN + 20])
    assert [line for record in records[SPAN + 20 :] for line in drift.observe(record)] == []


def test_the_slope_is_that_of_least_squares() -> None:
    rng = random.Random(1)
    values = [0.3 * i + rng.gauss(0, 1) for i in range(40)]
    fit, covariance = np.polyfit(range(40), values, 1, cov="unscaled")
    rest = np.array(values) - np.polyval(fit, range(40))
    error = float(np.sqrt(rest @ rest / 38 * covariance[0][0]))
    assert fitted_slope(values) == pytest.approx((fit[0], error))
