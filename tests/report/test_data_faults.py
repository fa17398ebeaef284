"""R-211, R-297: six symptoms of faulty data, each on its own planted fault and on no other."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest

from sixfold.report.data_faults import SYMPTOMS, WINDOW, diagnose

STEPS = 10 * WINDOW
Record = dict[str, Any]
Fault = Callable[[Record, float], Record]
"""Changes the record of a step of a healthy run. The number is the share of the run that is done.
"""


def healthy(step: int, rng: random.Random) -> Record:
    """A run that learns from 20 % to 85 %, with longer replies, lower entropy and some noise."""
    done = step / STEPS
    learned = 1 / (1 + math.exp(-8 * (done - 0.5)))
    record: Record = {
        "step": step,
        "reward/solved_frac": 0.2 + 0.65 * learned + rng.gauss(0, 0.02),
        "rollout/length_mean": 100 + 150 * learned + rng.gauss(0, 3),
        "train/entropy": 0.6 - 0.52 * learned + rng.gauss(0, 0.005),
        "group/degenerate_frac": 0.3 + 0.08 * learned + rng.gauss(0, 0.03),
    }
    if step % 10 == 0:
        record["heldout/accuracy"] = 0.25 + 0.67 * learned
        record["heldout/strict_gap"] = 0.01
        record["heldout/diverged"] = 0.0
    return record


def flat(record: Record, share: float = 0.4) -> Record:
    """No larger share is solved than at the start."""
    wobble = record["step"] * 7919 % 101 / 5000
    known = {"heldout/accuracy": 0.42} if "heldout/accuracy" in record else {}
    return {**record, **known, "reward/solved_frac": share + wobble, "rollout/length_mean": 100.0}


FAULTS: dict[str, Fault] = {
    "pool solved": lambda r, done: {
        **r, "reward/solved_frac": min(1.0, 0.5 + 2 * done), "group/degenerate_frac": 0.9,
        "rollout/length_mean": 100.0,
    },
    "length explosion": lambda r, done: {
        **flat(r), "train/entropy": 0.5, "rollout/length_mean": 100 * math.exp(done),
    },
    "mode collapse": lambda r, done: {**flat(r), "train/entropy": 0.6 * math.exp(-4 * done)},
    "contamination": lambda r, done: {
        **r, **({"heldout/accuracy": 0.99} if "heldout/accuracy" in r else {}),
        "reward/solved_frac": 0.2 + 0.4 * done,
    },
    "verifier exploit": lambda r, done: {
        **r, **({"heldout/strict_gap": 0.3 * done} if "heldout/strict_gap" in r else {}),
    },
    "degenerate groups": lambda r, done: {
        **flat(r), "train/entropy": 0.5, "group/degenerate_frac": 0.3 + 0.4 * done,
    },
}  # fmt: skip


def run(fault: Fault = lambda record, done: record, seed: int = 0) -> list[Record]:
    rng = random.Random(seed)
    return [fault(healthy(step, rng), step / STEPS) for step in range(1, STEPS + 1)]


def found(records: list[Record]) -> list[str]:
    return [one.symptom.name for one in diagnose(records) if one.evidence]


@pytest.mark.parametrize("name", FAULTS)
def test_each_detector_finds_its_own_fault_and_no_other(name: str) -> None:
    for seed in range(5):
        assert found(run(FAULTS[name], seed)) == [name]


def test_a_healthy_run_has_none_at_any_step() -> None:
    for seed in range(3):
        records = run(seed=seed)
        assert all(found(records[:steps]) == [] for steps in range(0, STEPS + 1, 7))


def test_growth_after_the_learning_has_ended_is_found() -> None:
    """The run has learned first, so the share solved is above that of its start."""
    rng = random.Random(0)
    late = [
        {
            **healthy(STEPS, rng),
            "step": STEPS + step,
            "rollout/length_mean": 250 * (1 + step / 50),
            "train/entropy": 0.08,
        }
        for step in range(1, 81)
    ]
    assert found(run() + late) == ["length explosion"]


def test_groups_that_dynamic_sampling_leaves_have_their_own_limit() -> None:
    def left(share: float) -> Fault:
        return lambda r, done: {
            **flat(r), "train/entropy": 0.5, "group/degenerate_frac": share,
            "dynamic/degenerate_frac": share,
        }  # fmt: skip

    assert found(run(left(0.2))) == ["degenerate groups"]
    assert found(run(left(0.05))) == []


def test_a_held_out_accuracy_that_fell_while_the_reward_rose_is_an_exploit() -> None:
    def diverged(record: Record, done: float) -> Record:
        return (
            {**record, "heldout/diverged": float(done > 0.8)}
            if "heldout/diverged" in record
            else record
        )

    assert found(run(diverged)) == ["verifier exploit"]


def test_with_a_curriculum_contamination_is_not_judged() -> None:
    """Solved tasks have left, so a held-out set may be far above the training samples."""
    fault = FAULTS["contamination"]
    assert found(run(lambda r, done: {**fault(r, done), "data/easy_frac": 0.6})) == []


def test_the_share_solved_is_that_of_all_samples_that_dynamic_sampling_has_drawn() -> None:
    """The groups that it keeps are about half right, whatever the pool is like."""
    solved = {"dynamic/solved_frac": 0.97, "rollout/length_mean": 100.0}
    assert found(run(lambda r, done: {**r, **solved})) == ["pool solved"]


def test_missing_figures_and_numbers_that_are_not_finite_are_no_fault() -> None:
    assert found([]) == found([{"step": 1}]) == []
    broken = [{**record, "train/entropy": None, "reward/solved_frac": None} for record in run()]
    assert "mode collapse" not in found(broken)


def test_every_symptom_names_its_stage_and_a_remedy() -> None:
    assert [symptom.name for symptom in SYMPTOMS] == list(FAULTS)
    assert [symptom.stage[0] for symptom in SYMPTOMS] == ["5", "6", "8", "4", "3", "7"]
    assert all(symptom.remedy and symptom.looks_like for symptom in SYMPTOMS)
