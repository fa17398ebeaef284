"""Discrete-event simulation: against the planner's closed forms, sums by hand and statistics."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from random import Random

import pytest
from tests.planning.workloads import EQUAL_LENGTHS

from sixfold.environment.pass_rate import degenerate_probability, resampling_factor
from sixfold.errors import UserError
from sixfold_planning.architectures import Architecture, find
from sixfold_planning.constants import CONSTANTS
from sixfold_planning.decode_time import decay_rate
from sixfold_planning.hardware import Cluster, find_accelerator
from sixfold_planning.planner import TopologyPlan, compare_topologies
from sixfold_planning.simulate.groups import Drawn, Groups, LogNormalGroups
from sixfold_planning.simulate.outcome import Outcome
from sixfold_planning.simulate.settings import Failures, Settings
from sixfold_planning.simulate.simulation import Simulation
from sixfold_planning.simulate.timing import Timing, planned_timing
from sixfold_planning.step_time import TOPOLOGIES
from sixfold_planning.stragglers import compare_longest, exact_longest
from sixfold_planning.workload import Workload

H100 = find_accelerator("H100")
SETTINGS = Settings(
    topology="async",
    prompts=8,
    samples=4,
    steps=30,
    staleness=2,
    attempts=1,
    failures=None,
    seed=0,
)
TIMING = Timing(
    sampling_devices=6,
    training_devices=2,
    replicas=3,
    slots=8,
    stride=10.0,
    decode=lambda count, sampled: 0.01 + 0.001 * count + 1e-6 * sampled,
    prefill=0.01,
    learn=lambda mean: 0.03 * mean,
    sync=0.5,
)
HEAVY = LogNormalGroups(mean=60, variation=1.5, longest=2000, pass_rate=0.5)


def simulate(groups: Groups = HEAVY, timing: Timing = TIMING, **changed: object) -> Outcome:
    return Simulation(timing, groups, replace(SETTINGS, **changed)).run()  # type: ignore[arg-type]


def planned(arch: Architecture, devices: int, work: Workload, name: str) -> TopologyPlan:
    found = compare_topologies(arch, Cluster(H100, devices), work, CONSTANTS)
    return found.topologies[name]


def as_planned(arch: Architecture, plan: TopologyPlan, work: Workload, groups: Groups) -> Outcome:
    timing = planned_timing(arch, H100, plan, work, CONSTANTS)
    return simulate(
        groups,
        timing,
        topology=plan.name,
        prompts=work.prompts,
        samples=work.samples,
        steps=8,
        staleness=3,
    )


@dataclass
class Fixed:
    """Groups of the same lengths, with mixed rewards."""

    lengths: tuple[int, ...]

    def draw(self, random: Random, samples: int) -> Drawn:
        return Drawn(self.lengths, True)


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize(("name", "error"), [("Qwen2.5-0.5B", 1e-9), ("Qwen2.5-7B", 0.01)])
def test_equal_lengths_give_the_step_of_the_planner(topology: str, name: str, error: float) -> None:
    """256 sequences per engine are the batch of the closed form.

    Kernel launches limit the small model, so decoding steps are equal. The closed form spreads
    lengths by at least 2 %, which matters for the large one.
    """
    arch = find(name)
    assert arch is not None
    plan = planned(arch, 2, EQUAL_LENGTHS, topology)
    found = as_planned(arch, plan, EQUAL_LENGTHS, Fixed((1024,) * 8))
    assert found.step_seconds == pytest.approx(plan.step.seconds, rel=error)
    tokens = 256 * 1024 / plan.step.seconds
    assert found.tokens_per_second == pytest.approx(tokens, rel=error)
    busy = plan.phases.reference + plan.phases.trainer
    assert found.shares.training == pytest.approx(busy / plan.step.seconds, rel=error)


@dataclass
class LargestEntropy:
    """Lengths with the distribution of the time model: density exp(-r x / longest)."""

    mean: float
    longest: float

    def draw(self, random: Random, samples: int) -> Drawn:
        rate = decay_rate(self.mean, self.longest)
        shares = (-math.log1p(random.random() * math.expm1(-rate)) / rate for _ in range(samples))
        return Drawn(tuple(max(1, round(self.longest * share)) for share in shares), True)


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("name", ["Qwen2.5-0.5B", "Qwen2.5-7B"])
def test_lengths_of_the_time_model_give_its_step(topology: str, name: str) -> None:
    arch = find(name)
    assert arch is not None
    work = replace(EQUAL_LENGTHS, prompts=128, mean_tokens=300)
    plan = planned(arch, 2, work, topology)
    found = as_planned(arch, plan, work, LargestEntropy(300, 1024))
    assert found.step_seconds == pytest.approx(plan.step.seconds, rel=0.015)


@pytest.mark.parametrize(
    ("replicas", "slots", "seconds"),
    [
        # One after the other: 30 tokens of 0.1 s.
        (1, 1, 30 * 0.1),
        # 10 steps of both and 10 of the longer one.
        (1, 2, 10 * 0.2 + 10 * 0.1),
        (2, 1, 20 * 0.1),
    ],
)
def test_a_colocated_step_by_hand(replicas: int, slots: int, seconds: float) -> None:
    timing = replace(
        TIMING,
        sampling_devices=2,
        replicas=replicas,
        slots=slots,
        decode=lambda count, sampled: 0.1 * count,
        prefill=0.25,
        learn=lambda mean: mean / 15,
    )
    found = simulate(Fixed((10, 20)), timing, topology="colocated", prompts=1, samples=2)
    step = seconds + 0.25 * 2 / replicas + 1.0 + 0.5
    assert found.step_seconds == pytest.approx(step)
    assert found.tokens_per_second == pytest.approx(30 / step)
    assert found.longest == pytest.approx(20 / 15)
    if replicas == 2:
        assert found.shares.sampling == pytest.approx((1.25 + 2.25) / 2 / step)
        assert found.shares.idle == pytest.approx(1.0 / 2 / step)


def test_two_pools_by_hand() -> None:
    """Sampling takes 2 s, training 3 s and a sync 0.5 s. The 6 sampling devices wait for 1 s."""
    timing = replace(TIMING, decode=lambda count, sampled: 0.1, prefill=0.0, learn=lambda mean: 3.0)
    for topology, step in (("disaggregated", 3.5), ("async", 3.0)):
        found = simulate(Fixed((20, 20, 20)), timing, topology=topology, prompts=1, samples=3)
        assert found.step_seconds == pytest.approx(step)
    found = simulate(Fixed((20, 20, 20)), timing, topology="disaggregated", prompts=1, samples=3)
    assert found.shares.sampling == pytest.approx(2 / 3.5)
    assert found.shares.training == pytest.approx(3 / 3.5)
    assert found.shares.idle == pytest.approx(6 / 8 * 1 / 3.5)
    assert found.shares.running == pytest.approx(1)


def test_a_sync_that_takes_longest_limits_an_async_step() -> None:
    timing = replace(TIMING, decode=lambda count, sampled: 0.01, learn=lambda mean: 1.0, sync=4.0)
    found = simulate(Fixed((20, 20)), timing, prompts=1, samples=2, staleness=0)
    assert found.step_seconds == pytest.approx(0.01 * 20 + 0.01 + 1.0 + 4.0)
    found = simulate(Fixed((20, 20)), timing, prompts=1, samples=2, staleness=1)
    assert found.step_seconds >= 2.0


@pytest.mark.parametrize("bound", [0, 1, 2, 4])
def test_staleness_never_exceeds_its_bound(bound: int) -> None:
    slow = replace(TIMING, learn=lambda mean: 0.001 * mean)
    for timing in (TIMING, slow):
        found = simulate(timing=timing, staleness=bound, steps=60)
        assert max(found.staleness) <= bound
        assert sum(found.staleness.values()) == pytest.approx(1)
    # If training is the limit, the engines run as far ahead as they may.
    found = simulate(timing=replace(TIMING, learn=lambda mean: 100.0), staleness=bound)
    assert max(found.staleness, key=lambda age: found.staleness[age]) == bound


def test_synchronous_topologies_have_one_staleness() -> None:
    assert simulate(topology="colocated").staleness == {0: 1}
    assert simulate(topology="disaggregated").staleness == {1: 1}


def test_a_looser_bound_on_staleness_saves_waiting() -> None:
    steps = [simulate(staleness=bound, steps=60).step_seconds for bound in (0, 1, 4)]
    assert steps[0] > 1.1 * steps[1] and steps[1] > 1.02 * steps[2]


def test_the_longest_of_a_group_is_the_expected_one() -> None:
    """A step of one group takes as long as its longest sample: E[max] by the integral."""
    timing = replace(
        TIMING, stride=1e9, decode=lambda count, sampled: 1.0, prefill=0.0, learn=lambda mean: 1e-9
    )
    groups = LogNormalGroups(mean=200, variation=0.8, longest=1e6, pass_rate=0.5)
    steps = 1500
    found = simulate(
        groups, replace(timing, sync=0.0), topology="colocated", prompts=1, samples=8, steps=steps
    )
    trials = compare_longest(variation=0.8, samples=8, trials=4000, seed=1)
    error = 200 * trials.standard_error * math.sqrt(4000 / steps)
    assert abs(found.step_seconds - exact_longest(200, variation=0.8, samples=8)) < 4 * error
    assert error < 0.02 * found.step_seconds


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("attempts", [1, 3])
def test_every_sampled_token_is_accounted_for(topology: str, attempts: int) -> None:
    failures = Failures(device_seconds=100, restart_seconds=5, checkpoint_steps=4)
    groups = replace(HEAVY, pass_rate=0.8)
    found = simulate(groups, topology=topology, attempts=attempts, failures=failures)
    tokens = found.tokens
    gone = tokens.trained + tokens.discarded + tokens.lost + tokens.unfinished
    assert tokens.sampled == pytest.approx(gone, rel=1e-9)
    assert found.failures > 2 and tokens.lost > 0
    assert (tokens.discarded > 0) == (attempts > 1)
    assert tokens.trained >= sum(record.tokens for record in found.records) > 0
    assert max(found.staleness) <= 2


@pytest.mark.parametrize(("rate", "samples"), [(0.9, 4), (0.5, 2), (0.3, 8)])
def test_groups_with_equal_rewards_follow_the_formula(rate: float, samples: int) -> None:
    groups = replace(HEAVY, pass_rate=rate)
    expected = degenerate_probability(rate, samples)
    found = simulate(groups, samples=samples, steps=120)
    error = math.sqrt(expected * (1 - expected) / found.groups)
    assert abs(found.equal - expected) < 4 * error
    useful = found.useful_per_second / found.tokens_per_second
    assert abs(useful - (1 - expected)) < 6 * error
    # Dynamic sampling replaces them, at the expected cost.
    found = simulate(groups, samples=samples, steps=120, attempts=200, topology="colocated")
    assert found.useful_per_second == found.tokens_per_second
    per_group = found.groups / (8 * 121)
    # A number of attempts is geometric.
    error = math.sqrt(expected) / (1 - expected) / math.sqrt(8 * 121)
    assert abs(per_group - resampling_factor([rate], samples)) < 4 * error


def test_discarded_groups_are_replaced_at_most_so_often() -> None:
    """A pass rate of 1 never gives mixed rewards: each place is sampled three times, then kept."""
    found = simulate(replace(HEAVY, pass_rate=1), topology="colocated", attempts=3, steps=4)
    assert found.groups == 3 * 8 * 5
    assert found.useful_per_second == 0 and found.equal == 1


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_a_seed_repeats_a_simulation(topology: str) -> None:
    failures = Failures(device_seconds=400, restart_seconds=5, checkpoint_steps=4)
    runs = [simulate(topology=topology, failures=failures, seed=seed) for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


def test_a_step_of_no_time_is_refused() -> None:
    with pytest.raises(UserError, match="decode_seconds = 0: must be"):
        replace(TIMING, decode=lambda count, sampled: 0.0)
