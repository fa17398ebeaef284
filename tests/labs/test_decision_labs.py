"""Decisions and cluster models against L23, L26, L27 and 09a to 09d."""

from __future__ import annotations

from pathlib import Path

import pytest

import sixfold
from sixfold.pages.lab import Setting
from sixfold_labs.catalogue import find
from sixfold_labs.concept_gaps import CHAPTERS, CONCEPTS


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


COURSE = {
    # concept: force, chapter before, prerequisites, proposed section, effort (None: not given)
    "process-reward-training": ("signal", "17", "03 17", "27.1", "medium"),
    "reward-model-internals": ("signal", "15", "", "15.5", "small"),
    "curriculum": ("signal", "18a", "", "", "medium"),
    "ai-feedback": ("signal", "15", "", "15.7", "medium"),
    "verifier-robustness": ("signal", "18", "", "", None),
    "sandbox": ("signal", "18", "", "", None),
    "gae": ("estimator", "10", "04 10", "10.5", "small"),
    "kl-estimators": ("estimator", "03", "", "03.5", "small"),
    "entropy-bonus": ("estimator", "13", "", "13.5", "small"),
    "off-policy-correction": ("estimator", "19", "02 10", "19.5", "medium"),
    "reward-whitening": ("estimator", "14", "", "", "small"),
    "fp8": ("cost", "22", "", "", "medium"),
    "mixture-of-experts": ("cost", "22", "22 25", "", "large"),
    "kv-offload": ("cost", "20", "", "", "small"),
    "interconnect": ("cost", "25", "", "", None),
    "checkpointing": ("cost", "23", "19 22", "28.5", "medium"),
    "multi-lora": ("cost", "20", "06 20", "", "medium"),
}
"""L27, in its order."""

OUR_ESTIMATES = {"verifier-robustness": "medium", "sandbox": "medium", "interconnect": "small"}
"""Efforts that the course does not give."""


def test_the_seventeen_concepts_are_those_of_the_course_in_its_order() -> None:
    assert list(CONCEPTS) == list(COURSE) and len(COURSE) == 17
    ours = {name for name, concept in CONCEPTS.items() if "rated_by_us" in concept}
    assert ours == set(OUR_ESTIMATES)


@pytest.mark.parametrize("concept", COURSE)
def test_a_concept_has_every_value_of_the_course(concept: str) -> None:
    force, after, needed, section, effort = COURSE[concept]
    values = find("concept-gaps")(concept=concept).values
    assert values["force"] == force
    assert values["slots_after"] == f"{after} {CHAPTERS[after]}"
    assert values["prerequisites"] == [f"{key} {CHAPTERS[key]}" for key in needed.split()]
    assert values["section"] == (section or None)
    assert values["effort_is_our_estimate"] is (effort is None)
    assert values["effort"] == (effort or OUR_ESTIMATES[concept])


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
