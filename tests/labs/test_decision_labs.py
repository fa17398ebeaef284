"""Decisions and cluster models against L23, L26, L27 and 09a to 09d."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

import sixfold
from sixfold.labs.catalogue import find
from sixfold.labs.concept_gaps import CHAPTERS, CONCEPTS
from sixfold.labs.lab import Setting


@pytest.mark.parametrize(
    ("signal", "bias", "gpus", "expected"),
    [
        (60, 50, 8, ("mixed", "grpo-mixed", "colocated", "custom")),
        (20, 50, 4, ("reward-model", "dpo", "colocated", "dpo-ablation")),
        (90, 20, 64, ("verifier", "dr_grpo", "disaggregated", "r1")),
        (20, 50, 16, ("reward-model", "ppo", "disaggregated", "instructgpt")),
        (20, 50, 64, ("reward-model", "ppo", "disaggregated", "tulu-early")),
        (60, 50, 65, ("mixed", "grpo-mixed", "async", "mixed")),
        (75, 80, 8, ("verifier", "dapo", "colocated", "small-rlvr")),
        (85, 50, 512, ("verifier", "grpo", "async", "custom")),
    ],
)
def test_three_forces(signal: float, bias: float, gpus: int, expected: tuple[str, ...]) -> None:
    values = find("three-forces")(signal=signal, bias_tolerance=bias, gpus=gpus).values
    assert tuple(values[key] for key in ("reward", "algorithm", "topology", "recipe")) == expected


@pytest.mark.parametrize(
    ("reward", "policy", "baseline", "algorithm"),
    [
        ("verifier", "on", "critic", "PPO"),
        ("verifier", "on", "group", "GRPO / DAPO / Dr.GRPO"),
        ("process", "on", "leave-one-out", "RLOO"),
        ("reward-model", "on", "none", "REINFORCE"),
        ("reward-model", "off", "group", "RAFT / ReST"),
        ("verifier", "off", "group", "RS-SFT / DPO"),
    ],
)
def test_paper_family(reward: str, policy: str, baseline: str, algorithm: str) -> None:
    outcome = find("paper-family")(reward=reward, policy=policy, baseline=baseline)
    assert outcome.values["algorithm"] == algorithm
    assert outcome.values["warning"] is None


def test_on_policy_preferences_get_a_warning() -> None:
    lab = find("paper-family")
    assert "DPO" in str(lab(reward="preference", policy="off").values["algorithm"])
    assert lab(reward="preference", policy="off").values["warning"] is None
    assert lab(reward="preference", policy="on").lines


FORCES = {"signal": 6, "estimator": 5, "cost": 6}
EFFORTS = {
    # 14 efforts of the course, in the order of its list without 5, 6 and 15
    "process-reward-training": ("17", "medium"),
    "reward-model-internals": ("15", "small"),
    "curriculum": ("18a", "medium"),
    "ai-feedback": ("15", "medium"),
    "gae": ("10", "small"),
    "kl-estimators": ("03", "small"),
    "entropy-bonus": ("13", "small"),
    "off-policy-correction": ("19", "medium"),
    "reward-whitening": ("14", "small"),
    "fp8": ("22", "medium"),
    "mixture-of-experts": ("22", "large"),
    "kv-offload": ("20", "small"),
    "checkpointing": ("23", "medium"),
    "multi-lora": ("20", "medium"),
}


def test_concepts_have_the_forces_chapters_and_efforts_of_the_course() -> None:
    assert Counter(concept.force for concept in CONCEPTS.values()) == FORCES
    rated = {
        name: (concept.after, concept.effort)
        for name, concept in CONCEPTS.items()
        if not concept.rated_by_us
    }
    assert rated == EFFORTS
    ours = {name: concept.after for name, concept in CONCEPTS.items() if concept.rated_by_us}
    assert ours == {"verifier-robustness": "18", "sandbox": "18", "interconnect": "25"}


@pytest.mark.parametrize(
    ("concept", "prerequisites"),
    [
        ("process-reward-training", ("03", "17")),
        ("gae", ("04", "10")),
        ("off-policy-correction", ("02", "10")),
        ("mixture-of-experts", ("22", "25")),
        ("checkpointing", ("19", "22")),
        ("multi-lora", ("06", "20")),
    ],
)
def test_prerequisites_of_a_concept(concept: str, prerequisites: tuple[str, ...]) -> None:
    titles = find("concept-gaps")(concept=concept).values["prerequisites"]
    assert titles == [f"{key} {CHAPTERS[key]}" for key in prerequisites]


@pytest.mark.parametrize("concept", CONCEPTS)
def test_module_of_a_concept_exists(concept: str) -> None:
    module = find("concept-gaps")(concept=concept).values["module"]
    package = Path(str(sixfold.__file__)).parent.parent
    assert module is None or (package / str(module)).is_file()


def test_missing_chapters_depend_on_what_has_been_read() -> None:
    lab = find("concept-gaps")
    assert lab(concept="gae", read=10).values["missing_chapters"] == []
    assert lab(concept="gae", read=4).values["missing_chapters"] == ["10 PPO"]


def test_triage_by_hand() -> None:
    outcome = find("step-triage")(rollout=100, verifier=50, train=200, sync=40, overlap=50)
    assert outcome.values["synchronous_seconds"] == 390
    assert outcome.values["async_seconds"] == 220
    assert outcome.values["wall"] == "trainer"
    assert str(outcome.values["first_fix"]).startswith("trainer")


@pytest.mark.parametrize(
    ("rollout", "verifier", "train", "sync", "wall"),
    [(240, 40, 120, 20, "rollout"), (40, 300, 120, 20, "verifier"), (20, 0, 20, 200, "sync")],
)
def test_wall_of_a_step(
    rollout: float, verifier: float, train: float, sync: float, wall: str
) -> None:
    outcome = find("step-triage")(rollout=rollout, verifier=verifier, train=train, sync=sync)
    assert outcome.values["wall"] == wall


@pytest.mark.parametrize(("billions", "gb"), [(70, 140), (405, 810)])
def test_size_of_one_copy(billions: float, gb: float) -> None:
    assert find("sync-size")(billions=billions, copies=1).number("sent_gb") == pytest.approx(gb)


@pytest.mark.parametrize(
    ("copies", "tax", "verdict"),
    [(1, 0.25, "broadcast"), (2, 0.5, "bucket"), (4, 1.0, "bucket"), (5, 1.25, "relay")],
)
def test_verdict_on_a_sync(copies: int, tax: float, verdict: str) -> None:
    # 140 GB at 25 GB/s are 5.6 s per copy; the step takes 22.4 s.
    outcome = find("sync-size")(billions=70, copies=copies, bandwidth=25, step=22.4)
    assert outcome.number("tax") == pytest.approx(tax)
    assert outcome.values["verdict"] == verdict


@pytest.mark.parametrize(
    ("lag", "seconds"), [(0, 103.4), (4, 103.4), (6, 103.4 * 1.12), (12, 103.4 * 1.48)]
)
def test_async_planner_by_hand(lag: int, seconds: float) -> None:
    # gen 60, tail 3, env 20, train 60: max(60 * 1.44 + 9, 60) + 8 = 103.4
    outcome = find("async-planner")(lag=lag)
    assert outcome.number("async_seconds") == pytest.approx(seconds)
    assert outcome.values["synchronous_seconds"] == 60 * 3 + 20 + 60 + 30
    assert outcome.values["call"] == "asynchronous"


def test_long_training_leaves_nothing_to_hide() -> None:
    outcome = find("async-planner")(gen=5.0, tail=1.0, env=0.0, train=300.0, lag=6)
    assert outcome.number("async_seconds") == pytest.approx(308 * 1.12)
    assert outcome.values["call"] == "synchronous"


@pytest.mark.parametrize(
    ("controls", "architecture", "framework"),
    [
        ({"billions": 7}, "colocated", "TRL"),
        ({"billions": 13}, "disaggregated", "OpenRLHF"),
        ({"billions": 405}, "disaggregated", "verl"),
        ({"billions": 13, "backend": "megatron"}, "disaggregated", "NeMo-RL"),
        ({"output": "agentic"}, "async", "AReaL"),
        ({"environment": "slow", "backend": "sglang"}, "async", "slime"),
        ({"environment": "slow", "staleness": "on-policy"}, "colocated", "TRL"),
    ],
)
def test_framework_selector(
    controls: dict[str, Setting], architecture: str, framework: str
) -> None:
    values = find("framework-selector")(**controls).values
    assert values["architecture"] == architecture
    assert values["framework"] == framework


def test_framework_selector_names_the_risk_of_the_architecture() -> None:
    lab = find("framework-selector")
    assert "sync" in str(lab(billions=70).values["risk"])
    assert "stale" in str(lab(output="agentic").values["risk"])
    assert "checks" in str(lab(environment="slow", staleness="on-policy").values["risk"])
