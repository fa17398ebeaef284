"""Predictions for a measured machine, from its costs in closed form."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sixfold_planning.architectures import Architecture
from sixfold_planning.constants import CONSTANTS
from sixfold_planning.decode_time import Sampler, step_seconds
from sixfold_planning.hardware import Accelerator, Cluster
from sixfold_planning.measured_rates import (
    DECODE_STEP,
    CallSize,
    CostTable,
    MeasuredRates,
    call_counts,
)
from sixfold_planning.planner import compare_topologies, learning_seconds
from sixfold_planning.samplers import sampling_seconds
from sixfold_planning.train_time import FORWARD, training_pass
from sixfold_planning.workload import Workload

# Two layers: attention 4 x 8 x 8 with as many key heads, MLP 3 x 8 x 16; embedding 10 x 8.
ARCH = Architecture("tiny", 1360e-9, 1360e-9, 2, 8, 2, 2, 4, 10, tied=True)
CALLS = CostTable((10, 20), (1.0, 2.0), (0, 0), (0, 0), (0, 0))
FREE = CostTable((1,), (0,), (0,), (0,), (0,))
WORK = Workload(4, 2, 5, 10, 10, 30, "none", False, True, True, False, True)


def rates(**changed: object) -> MeasuredRates:
    nothing = MeasuredRates("fp32", FREE, FREE, FREE, FREE, 0, 1, 0, 0, 0, 0, 1, 1, 2)
    return replace(nothing, **changed)  # type: ignore[arg-type]


def machine(**changed: object) -> Accelerator:
    return Accelerator("here", 8, 20, {"bf16": 0.05, "fp32": 0.1}, 10, 1, measured=rates(**changed))


def test_counts_of_a_forward_pass_by_hand() -> None:
    """Seven tokens of which two are predicted, each sees three positions.

    Products: 2 FLOPs for each of 1280 weights per token and 80 of the head per prediction. Causal
    attention: scores and values, 2 x 2 FLOPs for each of 8 query numbers, position and layer.
    Numbers: 2 layers of 4 x 8 (residual) + 2 x 24 (queries, keys, values) + 3 x 16 (MLP).
    """
    found = call_counts(ARCH, CallSize(7, 2, 3), FORWARD)
    flops = 2 * (1280 * 7 + 80 * 2) + 7 * 3 * 2 * 2 * 2 * 8
    assert found == pytest.approx((1, 2, flops, 2 * (32 + 48 + 48) * 7 + 10 * 2))


def test_a_training_pass_counts_three_forward_passes() -> None:
    """Attention counts 3.5: its backward pass is 2.5 forward passes (arXiv:2307.08691)."""
    forward = call_counts(ARCH, CallSize(7, 2, 0), FORWARD)
    train = call_counts(ARCH, CallSize(7, 2, 0), training_pass("none", adapters=False))
    assert train == pytest.approx((1, *(3 * count for count in forward[1:])))
    attending = call_counts(ARCH, CallSize(7, 2, 3), training_pass("none", adapters=False))
    assert attending[2] - train[2] == pytest.approx(3.5 * 7 * 3 * 2 * 2 * 2 * 8)


@pytest.mark.parametrize(("tokens", "seconds"), [(3, 1), (10, 1), (15, 1.5), (20, 2), (40, 4)])
def test_calls_between_and_beyond_the_measured_ones(tokens: float, seconds: float) -> None:
    assert CALLS.seconds(tokens, lambda n: (1, 0, 0, 0)) == pytest.approx(seconds)


def test_a_decode_step_reads_the_cache() -> None:
    """Keys and values: 2 x 2 layers x 2 heads x 4 numbers of 4 bytes per token."""
    device = machine(decode=CALLS, kv_byte_s=1e-3)
    found = step_seconds(ARCH, Sampler(device, 1, 1, 2.0), 15, 100, CONSTANTS)
    assert found == pytest.approx(1.5 + 1e-3 * 15 * 100 * 2 * 2 * 2 * 4 * 4)


def test_decode_costs_per_layer_flop_and_number() -> None:
    costs = CostTable((4,), (0.5,), (0.25,), (1e-3,), (1e-2,))
    numbers = 2 * (32 + 48 + 48) * 4 + 10 * 4
    expected = 0.5 + 0.25 * 2 + 1e-3 * 2 * 1360 * 4 + 1e-2 * numbers
    assert rates(decode=costs).decode_seconds(ARCH, 4, 100) == pytest.approx(expected)
    assert call_counts(ARCH, CallSize(4, 4, 9), DECODE_STEP)[2] == 2 * 1360 * 4


def test_learning_takes_whole_micro_batches_and_an_update() -> None:
    """4 prompts of 5 tokens and 8 samples of 10 are 100 tokens: 4 micro-batches of 25."""
    device = machine(score=CALLS, train=CALLS, update_s=1e-3)
    reference, train = learning_seconds(ARCH, device, WORK, 1, CONSTANTS)
    assert reference == pytest.approx(4 * 2.5)
    assert train == pytest.approx(4 * 2.5 + 1.36)
    alone = replace(WORK, shared_prompt=False, adapters=True)  # 120 tokens: 4 of 30, no update
    assert learning_seconds(ARCH, device, alone, 1, CONSTANTS)[1] == pytest.approx(4 * 3)


def test_the_planned_step_is_the_sum_of_measured_phases() -> None:
    """Prompts are computed once per group: 4 prompts of 5 of the 4,096 tokens that fit in a call.

    All samples have 10 tokens. The distribution of lengths allows at most 98 % of the bound as the
    mean, so 2 % of the tokens are missing.
    """
    prefill = CostTable((4096,), (4096.0,), (0,), (0,), (0,))
    step = CostTable((1, 1000), (0.0, 999.0), (0,) * 2, (0,) * 2, (0,) * 2)
    work = replace(WORK, shared_weights=False, reference=False)
    device = machine(prefill=prefill, decode=step, train=CALLS, sync_byte_s=1e-4)
    plan = compare_topologies(ARCH, Cluster(device, 1), work, CONSTANTS).topologies["colocated"]
    assert plan.phases.rollout == pytest.approx(4 * 5 + 10 * 7, rel=0.03)
    assert plan.phases.trainer == pytest.approx(4 * 2.5)
    assert plan.phases.reference == 0
    assert plan.phases.sync == pytest.approx(1e-4 * 4 * 1360)


def test_a_prompt_in_the_cache_is_read_faster_for_its_other_samples() -> None:
    """Of 2 samples one reads 80 tokens at the full cost, one at a tenth of it: 44 on average."""
    work = replace(WORK, prompt_tokens=80)
    free = CostTable((1,), (0,), (0,), (0,), (0,))
    device = machine(decode=free, prefill=free, kv_byte_s=1e-3, shared_read=0.1)
    found = sampling_seconds(ARCH, Sampler(device, 1, 1, 4.0), work, "async", CONSTANTS)
    expected = 8 * 10 * (44 + 5) * 1e-3 * 2 * 2 * 2 * 4 * 4
    assert found == pytest.approx(expected)


def test_episodes_take_time_outside_the_engine() -> None:
    """8 episodes of the step, each rank plays half of them."""
    device = machine(decode=CALLS, episode_s=0.5)
    free = sampling_seconds(
        ARCH, Sampler(machine(decode=CALLS), 2, 1, 4.0), WORK, "async", CONSTANTS
    )
    found = sampling_seconds(ARCH, Sampler(device, 2, 1, 4.0), WORK, "async", CONSTANTS)
    assert found - free == pytest.approx(0.5 * WORK.sequences / 2)


def test_the_peak_is_that_of_the_measured_dtype() -> None:
    assert machine().peak("bf16") == 0.1e12
    assert machine(dtype="bf16").peak("bf16") == 0.05e12
