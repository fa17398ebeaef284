"""Steps of the three topologies and memory of two pools, against sums by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.planning.workloads import WORK

from sixfold.errors import UserError
from sixfold.recipe.toml import parse_recipe
from sixfold_planning import planner
from sixfold_planning.architectures import dense_of_size, find
from sixfold_planning.constants import CONSTANTS
from sixfold_planning.hardware import Cluster, find_accelerator
from sixfold_planning.planned_work import planned_inputs
from sixfold_planning.planner import (
    Comparison,
    compare_topologies,
    planned_topology,
    training_utilisation,
    weight_sync,
)
from sixfold_planning.pools import pool_fit
from sixfold_planning.samplers import sampler_of
from sixfold_planning.step_time import PhaseSeconds
from sixfold_planning.workload import Workload

H100 = find_accelerator("H100")


def compare(billions: float, devices: int, work: Workload = WORK) -> Comparison:
    return compare_topologies(dense_of_size(billions), Cluster(H100, devices), work, CONSTANTS)


def test_steps_are_the_sums_and_maxima_of_their_phases() -> None:
    for name, plan in compare(7, 8).topologies.items():
        p = plan.phases
        learn = p.reference + p.trainer
        expected = {
            "colocated": p.rollout + learn + p.sync,
            "disaggregated": max(p.rollout, learn) + p.sync,
            "async": max(p.rollout, learn, p.sync),
        }[name]
        assert plan.step.seconds == pytest.approx(expected)
        together = plan.sampling_devices == plan.training_devices == 8
        assert together or plan.sampling_devices + plan.training_devices == 8


def test_millions_of_devices_need_few_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def planned(*args: Any, **given: Any) -> planner.TopologyPlan:
        tried.append(given)
        return planned_topology(*args, **given)

    monkeypatch.setattr(planner, "planned_topology", planned)
    found = compare(7, 9_999_999)
    assert set(found.topologies) == {"colocated", "disaggregated", "async"}
    assert len(tried) < 10_000


def test_one_device_has_one_topology_and_no_sync_of_shared_weights() -> None:
    found = compare(1, 1)
    assert list(found.topologies) == ["colocated"] and found.split is None
    assert found.topologies["colocated"].phases.sync == 0
    copied = compare(1, 1, replace(WORK, shared_weights=False))
    # Weights of 2 bytes are read and written once: 4 GB at 67 % of 3350 GB/s.
    assert copied.topologies["colocated"].phases.sync == pytest.approx(4 / (3350 * 0.67))


@pytest.mark.parametrize(("size", "count"), [(7, 8), (7, 64), (70, 64)])
@pytest.mark.parametrize("topology", ["disaggregated", "async"])
def test_no_other_split_of_the_devices_has_a_shorter_step(
    size: float, count: int, topology: str
) -> None:
    arch, found = dense_of_size(size), compare(size, count)
    least = sampler_of(arch, H100, count).tensor
    steps = [
        planned_topology(
            arch, H100, WORK, CONSTANTS, sampling=n, training=count - n, topology=topology
        ).step.seconds
        for n in range(least, count, least)
    ]
    assert found.topologies[topology].step.seconds == pytest.approx(min(steps))
    assert found.split is not None
    assert found.split.rollout == found.topologies["disaggregated"].sampling_devices


@pytest.mark.parametrize("size", [7, 32, 70])
def test_more_memory_and_bandwidth_never_make_a_step_slower(size: float) -> None:
    """H200 is H100 with 141 GB at 4.8 TB/s."""
    arch = dense_of_size(size)
    for count in (8, 64):
        slow, fast = (
            compare_topologies(arch, Cluster(find_accelerator(name), count), WORK, CONSTANTS)
            for name in ("H100", "H200")
        )
        for name, plan in fast.topologies.items():
            assert plan.step.seconds <= slow.topologies[name].step.seconds * (1 + 1e-9)


def colocated(**changed: Any) -> PhaseSeconds:
    """Phases of a 7B model on 8 devices."""
    return compare(7, 8, replace(WORK, **changed)).topologies["colocated"].phases


def test_scoring_is_one_forward_pass_for_each_of_reference_critic_and_proximal() -> None:
    one = colocated().reference
    assert colocated(reference=False).reference == 0
    assert colocated(critic=True).reference == pytest.approx(2 * one)
    assert colocated(critic=True, proximal=True).reference == pytest.approx(3 * one)
    assert colocated(reference=False, proximal=True).reference == pytest.approx(one)


def test_training_takes_every_epoch_of_policy_and_critic() -> None:
    one = colocated().trainer
    assert colocated(reference=False, proximal=True).trainer == one
    assert colocated(critic=True).trainer == pytest.approx(2 * one)
    assert colocated(epochs=4).trainer == pytest.approx(4 * one)
    assert colocated(epochs=4, critic=True).trainer == pytest.approx(8 * one)


def test_a_sampler_has_the_fewest_devices_that_hold_its_weights() -> None:
    """At most 60 % of memory: 140 GB need 4 x 48 GB, 14 GB one device."""
    assert sampler_of(dense_of_size(70), H100, 64).tensor == 4
    assert sampler_of(dense_of_size(7), H100, 64).tensor == 1
    with pytest.raises(UserError, match="140 GB in bf16, and 1 device has 80 GB"):
        sampler_of(dense_of_size(70), H100, 1)


def test_operations_of_a_weight_sync() -> None:
    arch, links = dense_of_size(70), {"trainer_ranks": 28, "devices": 64}
    found = weight_sync(arch, H100, **links, sent_width=2, k=CONSTANTS)
    assert found["gather"] == pytest.approx(140 * 27 / 28 / (50 * 0.67))
    assert found["broadcast"] == pytest.approx(140 / (50 * 0.452))
    assert found["reshard"] == pytest.approx(140 / (450 * 0.67))
    assert found["cast"] == 0
    # FP8: the weights are read twice and written once before they are sent.
    half = weight_sync(arch, H100, **links, sent_width=1, k=CONSTANTS)
    assert half["cast"] == pytest.approx(70 * (2 + 2 + 1) / (3350 * 0.67))
    assert half["broadcast"] == pytest.approx(found["broadcast"] / 2)
    assert half["gather"] == found["gather"]


def test_a_narrow_copy_of_the_weights_is_sent_in_less_time() -> None:
    """Two pools send half of the bytes. One device reads 4 bytes per weight and writes 1."""
    narrow = replace(WORK, sent_width=1.0, shared_weights=False)
    one = compare(1, 1, narrow).topologies["colocated"].phases.sync
    assert one == pytest.approx(5 / (3350 * 0.67))
    arch, work = dense_of_size(7), replace(WORK, shared_weights=False)
    for split in ("disaggregated", "async"):
        wide, less = (
            planned_topology(
                arch, H100, each, CONSTANTS, sampling=32, training=32, topology=split
            ).phases.sync
            for each in (work, narrow)
        )
        sent = 7 * (1 / (50 * 0.452) + 1 / (450 * 0.67))
        assert wide - less == pytest.approx(sent - 7 * 5 / (3350 * 0.67), rel=1e-6)


def test_useful_share_of_the_peak() -> None:
    """6 FLOPs per parameter and token, and 6 n h d for causal attention, per device."""
    arch = find("Qwen2.5-7B")
    assert arch is not None
    length = round(1024 + 128 / 16)
    flops = 6 * (7.616e9 - 152064 * 3584) + 6 * 28 * length * 28 * 128
    expected = flops * 64 * 16 * (1024 + 8) / 10 / (8 * 989.4e12)
    found = training_utilisation(arch, H100, WORK, seconds=10, devices=8)
    assert found == pytest.approx(expected, rel=1e-3)


def test_memory_of_the_pools_of_a_70b_run() -> None:
    """18 bytes per parameter: 1.26 TB, which 18 devices of 72 GB hold."""
    arch, plan = dense_of_size(70), compare(70, 64).topologies["disaggregated"]
    fit = pool_fit(arch, H100, plan, WORK, chunk=1024)
    assert fit.state == pytest.approx(1.26e12 / plan.training_devices)
    assert fit.reference == pytest.approx(140e9 / plan.training_devices)
    assert fit.engine_weights == 140e9 / 4
    assert fit.least_devices == 18
    assert fit.logits == 4 * 1024 * arch.vocab * 2
    assert fit.cached == 64 * (128 + 16 * 1024)
    assert fit.trainer_fits and fit.sampler_fits


def test_pools_that_are_too_small() -> None:
    arch, plan = dense_of_size(7), compare(7, 2).topologies["disaggregated"]
    fit = pool_fit(arch, H100, plan, WORK, chunk=0)
    assert fit.state == pytest.approx(126e9)
    assert not fit.trainer_fits and fit.zero_stage is None and fit.sampler_fits


def test_a_mean_above_the_bound_is_refused() -> None:
    with pytest.raises(UserError, match=r"3000 tokens\) is above their bound of 2048"):
        replace(WORK, mean_tokens=3000)


def test_samplers_with_weights_of_their_own_get_a_sync() -> None:
    """In processes, and beside a trainer that they run ahead of, too."""
    found = {}
    for flag in ("run.seed=1", "placement.kind=processes", "rollout.staleness=1", "sync.kind=copy"):
        recipe = parse_recipe('run.name = "run"', "test", [f"--{flag}"])
        found[flag] = planned_inputs("", recipe, mean_tokens=None).work.shared_weights
    assert [*found.values()] == [True, False, False, False], found
