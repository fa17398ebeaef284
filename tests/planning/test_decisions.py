"""Decision functions: every branch and the default row."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from sixfold.errors import UserError
from sixfold.planning.async_benefit import async_benefit
from sixfold.planning.paper_mapper import BASELINES, POLICIES, REWARDS, TURNS, paper_family
from sixfold.planning.three_forces import RECIPES, three_forces

ROOT = Path(__file__).parents[2]


def test_default_of_the_three_forces() -> None:
    """L26: signal 60, bias tolerance 50, 8 GPUs."""
    found = three_forces(signal=60, bias_tolerance=50, devices=8)
    assert (found.reward, found.algorithm) == ("mixed", "grpo-mixed")
    assert (found.topology, found.recipe) == ("colocated", "custom")


@pytest.mark.parametrize(
    ("signal", "reward"),
    [(0, "reward-model"), (29.9, "reward-model"), (30, "mixed"), (69.9, "mixed"), (70, "verifier")],
)
def test_reward_branches(signal: float, reward: str) -> None:
    assert three_forces(signal=signal, bias_tolerance=50, devices=8).reward == reward


@pytest.mark.parametrize(
    ("signal", "bias", "devices", "algorithm"),
    [
        (39, 50, 7, "dpo"),
        (39, 50, 8, "ppo"),
        (40, 50, 7, "grpo-mixed"),
        (69, 0, 512, "grpo-mixed"),
        (70, 29, 1, "dr_grpo"),
        (70, 30, 1, "grpo"),
        (70, 69, 1, "grpo"),
        (70, 70, 1, "dapo"),
    ],
)
def test_algorithm_branches(signal: float, bias: float, devices: int, algorithm: str) -> None:
    found = three_forces(signal=signal, bias_tolerance=bias, devices=devices)
    assert found.algorithm == algorithm


@pytest.mark.parametrize(
    ("devices", "topology"),
    [
        (1, "colocated"),
        (8, "colocated"),
        (9, "disaggregated"),
        (64, "disaggregated"),
        (65, "async"),
    ],
)
def test_topology_branches(devices: int, topology: str) -> None:
    assert three_forces(signal=60, bias_tolerance=50, devices=devices).topology == topology


@pytest.mark.parametrize(
    ("signal", "bias", "devices", "recipe"),
    [
        (10, 50, 4, "dpo-ablation"),  # before instructgpt, which also applies
        (80, 29, 32, "r1"),
        (80, 30, 32, "custom"),
        (80, 29, 31, "custom"),
        (29, 50, 16, "instructgpt"),
        (29, 50, 17, "tulu-early"),
        (29, 50, 64, "tulu-early"),
        (29, 50, 65, "custom"),
        (30, 50, 16, "custom"),
        (40, 50, 32, "mixed"),
        (79.9, 0, 32, "mixed"),
        (40, 50, 31, "custom"),
        (39, 50, 32, "custom"),
        (70, 50, 8, "small-rlvr"),
        (70, 50, 9, "custom"),
    ],
)
def test_recipe_branches(signal: float, bias: float, devices: int, recipe: str) -> None:
    found = three_forces(signal=signal, bias_tolerance=bias, devices=devices)
    assert found.recipe == recipe
    assert found.recipe in RECIPES


def test_every_recipe_and_a_reason_for_every_choice() -> None:
    grid = itertools.product(range(0, 101, 5), (0, 50, 100), (1, 8, 16, 32, 64, 128))
    found = [three_forces(signal=s, bias_tolerance=b, devices=d) for s, b, d in grid]
    assert {choice.recipe for choice in found} == set(RECIPES)
    assert all(all(choice.reasons) for choice in found)


@pytest.mark.parametrize(
    ("signal", "bias", "devices"), [(101, 50, 8), (50, -1, 8), (50, 50, 0), (float("nan"), 50, 8)]
)
def test_forces_out_of_range_are_refused(signal: float, bias: float, devices: int) -> None:
    with pytest.raises(UserError):
        three_forces(signal=signal, bias_tolerance=bias, devices=devices)


@pytest.mark.parametrize(
    ("reward", "policy", "baseline", "algorithms"),
    [
        ("preference", "off", "critic", ("DPO", "IPO", "KTO", "ORPO", "SimPO")),
        ("reward-model", "off", "group", ("RAFT", "ReST")),
        ("verifier", "off", "group", ("RS-SFT", "DPO")),
        ("process", "off", "critic", ("RS-SFT", "DPO")),
        ("verifier", "on", "critic", ("PPO",)),
        ("verifier", "on", "group", ("GRPO", "DAPO", "Dr.GRPO")),
        ("reward-model", "on", "leave-one-out", ("RLOO",)),
        ("process", "on", "none", ("REINFORCE",)),
    ],
)
def test_paper_families(
    reward: str, policy: str, baseline: str, algorithms: tuple[str, ...]
) -> None:
    """L23's rules."""
    found = paper_family(reward=reward, policy=policy, baseline=baseline, turns="single")
    assert found.algorithms == algorithms
    assert found.warning == ""
    assert found.reward == REWARDS[reward]


@pytest.mark.parametrize("baseline", BASELINES)
def test_on_policy_preferences_give_a_warning(baseline: str) -> None:
    found = paper_family(reward="preference", policy="on", baseline=baseline, turns="single")
    assert found.algorithms[0] == "DPO"
    assert "on-policy" in found.warning


def test_pages_exist_and_several_turns_add_one() -> None:
    for reward, policy, baseline, turns in itertools.product(REWARDS, POLICIES, BASELINES, TURNS):
        found = paper_family(reward=reward, policy=policy, baseline=baseline, turns=turns)
        assert all((ROOT / page).is_file() for page in found.pages), found.pages
    one = paper_family(reward="verifier", policy="on", baseline="group", turns="single").pages
    many = paper_family(reward="verifier", policy="on", baseline="group", turns="multi").pages
    assert len(many) == len(one) + 1


def test_unknown_answer_lists_the_valid_ones() -> None:
    with pytest.raises(UserError, match=r"critic, group, leave-one-out, none.*'group'"):
        paper_family(reward="verifier", policy="on", baseline="groups", turns="single")


@pytest.mark.parametrize(
    ("rollout", "trainer", "nodes", "special", "verdict", "low", "high"),
    [
        (40, 10, 4, {}, "yes", 2.0, None),
        (20, 10, 4, {}, "yes", 2.0, None),
        (12, 10, 4, {}, "marginal", 1.2, 1.5),
        (19, 10, 4, {}, "marginal", 1.2, 1.5),
        (10, 19, 4, {}, "marginal", 1.2, 1.5),
        (10, 20, 4, {}, "no", 1.0, 1.1),
        (40, 10, 2, {}, "yes", 2.0, None),
        (10, 40, 4, {}, "no", 1.0, 1.1),
        (40, 10, 1, {}, "no", 1.0, 1.1),
        (40, 10, 4, {"step_rewards": True}, "hard", 1.0, None),
        (40, 10, 4, {"drifting_reward_model": True}, "hard", 1.0, None),
    ],
)
def test_async_table(
    rollout: float,
    trainer: float,
    nodes: int,
    special: dict[str, bool],
    verdict: str,
    low: float,
    high: float | None,
) -> None:
    """L22c: yes 2x and more, marginal 1.2 to 1.5, one node within 10 %, hard cases."""
    cases = {"step_rewards": False, "drifting_reward_model": False, **special}
    found = async_benefit(rollout_seconds=rollout, trainer_seconds=trainer, nodes=nodes, **cases)
    assert (found.verdict, found.low, found.high) == (verdict, low, high)
    assert found.reason


def test_async_needs_times() -> None:
    with pytest.raises(UserError, match="trainer_seconds"):
        async_benefit(
            rollout_seconds=1,
            trainer_seconds=0,
            nodes=1,
            step_rewards=False,
            drifting_reward_model=False,
        )
