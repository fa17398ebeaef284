"""Formulas of labs: published numbers, every branch and the default row."""

from __future__ import annotations

import itertools
import math
import random
from pathlib import Path

import pytest
from tests.planning.course_values import STEP_SECONDS

from sixfold.pages.lab import Value
from sixfold_labs.catalogue import find
from sixfold_labs.memory_envelope import typical_shape
from sixfold_labs.run_design import TEXTS
from sixfold_labs.straggler import percentile
from sixfold_labs.transformer_shapes import small_gpt_parameters
from sixfold_labs.wall_clock import modelled_phases
from sixfold_planning.step_time import step_time, trainer_utilisation, useful_tokens_per_second
from sixfold_planning.stragglers import lognormal_sigma

ROOT = Path(__file__).parents[2]
REWARDS, BASELINES = TEXTS["source"], TEXTS["baseline"]


def paper_family(*, reward: str, policy: str, baseline: str, turns: str) -> dict[str, Value]:
    lab = find("paper-family")
    return lab(reward=reward, policy=policy, baseline=baseline, turns=turns).values


def pages(reward: str, policy: str, baseline: str, turns: str) -> list[str]:
    found = paper_family(reward=reward, policy=policy, baseline=baseline, turns=turns)["pages"]
    assert isinstance(found, list)
    return [str(page) for page in found]


def three_forces(*, signal: float, bias_tolerance: float, devices: int) -> dict[str, Value]:
    lab = find("three-forces")
    return lab(signal=signal, bias_tolerance=bias_tolerance, gpus=devices).values


def test_parameters_of_the_small_gpt() -> None:
    """G01: 796,416 parameters, about 197.8k per block."""
    count = small_gpt_parameters(vocabulary=29, positions=11, layers=4, hidden=128)
    assert count.total == 796_416
    assert count.block == 197_760


def test_parameter_formula_equals_the_sum_of_tensor_sizes() -> None:
    d, layers, vocabulary, positions = 24, 3, 50, 17
    attention = [3 * d * d, d * d]
    mlp = [d * 4 * d, 4 * d, 4 * d * d, d]
    norms = [d, d, d, d]
    tensors = [vocabulary * d, positions * d, *layers * (attention + mlp + norms), d, d]
    count = small_gpt_parameters(
        vocabulary=vocabulary, positions=positions, layers=layers, hidden=d
    )
    assert count.total == sum(tensors)


@pytest.mark.parametrize(
    ("billions", "hidden", "layers"),
    [
        (1, 2048, 22),
        (3, 3200, 26),
        (7, 4096, 32),
        (13, 5120, 40),
        (34, 8192, 48),
        (70, 8192, 80),
        (180, 12288, 96),
        (405, 16384, 126),
        (700, 20480, 140),
    ],
)
def test_shapes_of_published_models(billions: float, hidden: int, layers: int) -> None:
    """L22's table."""
    assert typical_shape(billions) == (hidden, layers)


def test_shapes_are_interpolated() -> None:
    assert typical_shape(10) == (4608, 36)


@pytest.mark.parametrize(
    ("billions", "samples", "length", "topology", "published", "longest"), STEP_SECONDS
)
def test_step_model_as_published(
    billions: int, samples: int, length: int, topology: str, published: float, longest: str
) -> None:
    """L22a, oracle of the wall-clock widget, which divides by four devices twice (E3)."""
    phases = modelled_phases(billions, prompts=64, samples=samples, length=length, devices=16)
    step = step_time(phases, topology=topology, sync_hidden=False)
    assert step.seconds == pytest.approx(published, abs=0.05)
    assert phases.dominant == longest


def test_dominant_phases_as_published() -> None:
    """L22a: rollout is 83 % of all phases at 8,192 tokens; sync is the longest for 70B, K=4."""
    long = modelled_phases(7, prompts=64, samples=16, length=8192, devices=16)
    assert long.dominant == "rollout"
    assert long.rollout / long.total == pytest.approx(0.83, abs=0.005)
    step = step_time(long, topology="disaggregated", sync_hidden=False)
    assert long.rollout / step.seconds == pytest.approx(0.98, abs=0.005)
    assert modelled_phases(70, prompts=64, samples=4, length=1024, devices=16).dominant == "sync"
    big = modelled_phases(70, prompts=64, samples=16, length=1024, devices=16)
    assert (big.rollout, big.sync) == pytest.approx((100.8, 35), abs=0.05)


def test_useful_tokens_as_published() -> None:
    """L22a: 84.7k and 69.1k tokens per second, a loss of 18 % if colocated."""
    phases = modelled_phases(7, prompts=64, samples=16, length=1024, devices=16)
    rates = []
    for topology in ("disaggregated", "colocated"):
        step = step_time(phases, topology=topology, sync_hidden=False)
        rates.append(
            useful_tokens_per_second(
                prompts=64, samples=16, mean_length=1024, keep_rate=1, seconds=step.seconds
            )
        )
    assert rates == pytest.approx([84.7e3, 69.1e3], abs=60)
    assert rates[1] / rates[0] - 1 == pytest.approx(-0.18, abs=0.005)


def test_corrected_step_model() -> None:
    """Erratum E3: with one division, max(41.3, 11.2) + 1.3 = 42.6 s."""
    phases = modelled_phases(7, prompts=64, samples=16, length=1024, devices=4)
    step = step_time(phases, topology="disaggregated", sync_hidden=False)
    assert step.sampling == pytest.approx(41.3, abs=0.05)
    assert step.training == pytest.approx(11.2, abs=0.05)
    assert step.seconds == pytest.approx(42.6, abs=0.05)
    assert trainer_utilisation(phases, step) == pytest.approx(11.2 / 41.3, abs=0.005)


def test_percentile_interpolates() -> None:
    assert percentile([3, 1, 2, 4], 0.5) == 2.5
    assert percentile([10], 0.95) == 10
    assert percentile(range(1, 102), 0.95) == 96
    assert percentile([1, 2], 1) == 2


def test_percentile_of_16_is_below_the_maximum() -> None:
    """Erratum E4b: index floor(0.95 * 16) is the maximum, which caps nothing."""
    lengths = list(range(16))
    assert lengths[math.floor(0.95 * 16)] == max(lengths)
    assert percentile(lengths, 0.95) == 14.25


def test_cap_lowers_the_longest_of_a_lognormal_rollout() -> None:
    """L22b: a cap at p95 to p98 cuts the rollout time by 30 to 50 %."""
    sigma = lognormal_sigma(1)
    generator = random.Random(3)
    pool = [math.exp(generator.gauss(6, sigma)) for _ in range(2000)]
    limit = percentile(pool, 0.95)
    longest = [max(pool[i : i + 64]) for i in range(0, 1920, 64)]
    saved = [1 - min(limit, length) / length for length in longest]
    assert 0.3 <= sum(saved) / len(saved) <= 0.5


def test_default_of_the_three_forces() -> None:
    """L26: signal 60, bias tolerance 50, 8 GPUs."""
    found = three_forces(signal=60, bias_tolerance=50, devices=8)
    assert (found["reward"], found["algorithm"]) == ("mixed", "grpo-mixed")
    assert (found["topology"], found["recipe"]) == ("colocated", "custom")


@pytest.mark.parametrize(
    ("signal", "reward"),
    [(0, "reward-model"), (29.9, "reward-model"), (30, "mixed"), (69.9, "mixed"), (70, "verifier")],
)
def test_reward_branches(signal: float, reward: str) -> None:
    assert three_forces(signal=signal, bias_tolerance=50, devices=8)["reward"] == reward


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
    assert found["algorithm"] == algorithm


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
    assert three_forces(signal=60, bias_tolerance=50, devices=devices)["topology"] == topology


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
    assert found["recipe"] == recipe
    assert found["recipe"] in TEXTS["recipe"]


def test_every_recipe_and_a_reason_for_every_choice() -> None:
    grid = itertools.product(range(0, 101, 5), (0, 50, 100), (1, 8, 16, 32, 64, 128))
    found = [three_forces(signal=s, bias_tolerance=b, devices=d) for s, b, d in grid]
    assert {choice["recipe"] for choice in found} == set(TEXTS["recipe"])
    for part in ("reward", "algorithm", "topology"):
        assert {choice[part] for choice in found} == set(TEXTS[part])


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
    assert found["algorithm"] == " / ".join(algorithms)
    assert found["warning"] is None
    assert found["reward"] == REWARDS[reward]


@pytest.mark.parametrize("baseline", BASELINES)
def test_on_policy_preferences_give_a_warning(baseline: str) -> None:
    found = paper_family(reward="preference", policy="on", baseline=baseline, turns="single")
    assert str(found["algorithm"]).startswith("DPO /")
    assert "on-policy" in str(found["warning"])


def test_pages_exist_and_several_turns_add_one() -> None:
    turns = ("single", "multi")
    for answers in itertools.product(REWARDS, ("on", "off"), BASELINES, turns):
        assert all((ROOT / page).is_file() for page in pages(*answers)), answers
    one, many = (pages("verifier", "on", "group", count) for count in turns)
    assert len(many) == len(one) + 1


def test_engine_is_split_over_at_most_one_device_per_key_value_head() -> None:
    found = find("memory-envelope")(billions=70.0, length=8192, batch=4, gpus=16)
    assert found.number("infer_gb_per_gpu") * 1e9 == pytest.approx((140e9 + 327_680 * 8192 * 4) / 8)
