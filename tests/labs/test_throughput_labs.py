"""Decode scheduling, wall-clock time and time budget against L21, L22a and L28."""

from __future__ import annotations

import pytest
from tests.planning.course_values import STEP_SECONDS

from sixfold.errors import UserError
from sixfold.pages.lab import Setting
from sixfold_labs.catalogue import find
from sixfold_labs.decode_scheduling import speculative_gain

OFF: dict[str, Setting] = {
    "continuous": False,
    "prefix": False,
    "chunked": False,
    "speculative": False,
}
ON: dict[str, Setting] = dict.fromkeys(OFF, True)


@pytest.mark.parametrize(
    ("controls", "tokens", "speedup"),
    [
        ({}, 4803, 1.57),
        (OFF, 3064, 1.0),
        (ON | {"temperature": 0.7}, 8923, 2.91),
        (ON | {"temperature": 0.0}, 12639, 4.12),
        ({"batch": 256, "length": 32768, "chunked": True}, 837, None),
    ],
)
def test_decode_throughput(
    controls: dict[str, Setting], tokens: float, speedup: float | None
) -> None:
    outcome = find("decode-scheduling")(**controls)
    assert outcome.number("tokens_per_second") == pytest.approx(tokens, abs=0.6)
    if speedup is not None:
        assert outcome.number("speedup") == pytest.approx(speedup, abs=0.006)


def test_bottleneck_of_decoding_moves_with_batch_and_length() -> None:
    lab = find("decode-scheduling")
    assert lab(batch=1).values["bottleneck"] == "weights"
    assert lab(batch=256, length=32768).values["bottleneck"] == "kv cache"
    assert lab(batch=256, length=128).values["bottleneck"] == "compute"


def test_speculation_gains_most_at_temperature_0() -> None:
    assert speculative_gain(0) == pytest.approx(2.5)
    assert speculative_gain(1) == pytest.approx(1.45)


@pytest.mark.parametrize(
    ("billions", "k", "length", "topology", "seconds", "dominant"), STEP_SECONDS
)
def test_published_seconds_per_step(
    billions: float, k: int, length: int, topology: str, seconds: float, dominant: str
) -> None:
    outcome = find("wall-clock")(
        billions=billions, k=k, length=length, topology=topology, calibration="published"
    )
    assert outcome.number("step_seconds") == pytest.approx(seconds, abs=0.05)
    assert outcome.values["dominant_term"] == dominant


def test_published_tokens_per_second_and_shares() -> None:
    lab = find("wall-clock")
    short = lab(topology="disaggregated", calibration="published")
    assert short.number("tokens_per_second") == pytest.approx(84_700, abs=50)
    assert short.number("dominant_share_of_step") == pytest.approx(0.81, abs=0.005)
    assert short.number("dominant_share_of_sum") == pytest.approx(0.66, abs=0.005)
    colocated = lab(topology="colocated", calibration="published").number("tokens_per_second")
    assert colocated == pytest.approx(69_100, abs=50)
    assert colocated / short.number("tokens_per_second") - 1 == pytest.approx(-0.18, abs=0.005)
    long = lab(length=8192, topology="disaggregated", calibration="published")
    assert long.number("dominant_share_of_step") == pytest.approx(0.98, abs=0.005)
    assert long.number("dominant_share_of_sum") == pytest.approx(0.83, abs=0.005)


def seconds(**controls: Setting) -> dict[str, float]:
    table = find("wall-clock")(**controls).tables[0]
    return {str(name): float(str(value)) for name, value, _ in table.rows}


def test_published_terms_of_a_large_model() -> None:
    terms = seconds(billions=70, calibration="published")
    assert terms["rollout"] == pytest.approx(100.8, abs=0.05)
    assert terms["sync"] == pytest.approx(35)


def test_corrected_calibration_does_not_divide_twice() -> None:
    terms = seconds()
    assert terms["rollout"] + terms["verifier"] == pytest.approx(41.3, abs=0.05)
    assert terms["reference"] + terms["trainer"] == pytest.approx(11.2, abs=0.05)
    outcome = find("wall-clock")(topology="disaggregated")
    assert outcome.number("step_seconds") == pytest.approx(42.6, abs=0.05)


OPTIMISATIONS = (
    "prefix",
    "continuous",
    "speculative",
    "fp8",
    "chunked_ce",
    "packing",
    "fsdp",
    "overlap",
    "sync_every_5",
    "ref_pool",
)


@pytest.mark.parametrize(
    ("on", "total", "speedup", "largest", "share"),
    [
        (("prefix", "continuous", "chunked_ce", "packing", "fsdp"), 43.92, 2.28, "rollout", 33),
        (("prefix",), 64.0, 1.56, "rollout", None),
        (OPTIMISATIONS, 21.58, 4.63, "train", 44),
        ((), 100.0, 1.0, "rollout", 60),
    ],
)
def test_optimised_time_budget(
    on: tuple[str, ...], total: float, speedup: float, largest: str, share: float | None
) -> None:
    switches: dict[str, Setting] = {name: name in on for name in OPTIMISATIONS}
    outcome = find("time-budget")(**switches)
    assert outcome.number("optimised") == pytest.approx(total, abs=0.005)
    assert outcome.number("speedup") == pytest.approx(speedup, abs=0.006)
    assert outcome.values["largest_slice"] == largest
    if share is not None:
        assert 100 * outcome.number("largest_share") == pytest.approx(share, abs=0.5)


def test_defaults_of_the_time_budget_are_the_usual_optimisations() -> None:
    assert find("time-budget")().number("optimised") == pytest.approx(43.92)


def test_time_budget_above_100_percent_is_refused() -> None:
    with pytest.raises(UserError, match=r"--rollout.*115 %.*at most 100"):
        find("time-budget")(rollout=90, train=10)
    exact = find("time-budget")(rollout=65.0)
    assert exact.tables[0].rows[-1][:2] == ["algo", 0.0]


def test_the_reference_moves_and_dropped_tokens_are_not_useful() -> None:
    """R-229, R-230: a third of T from one pool to the other; 4 of 5 tokens train."""
    lab = find("wall-clock")
    here, there = lab(), lab(reference="sampler")
    terms = {row[0]: row[1] for row in here.tables[0].rows}
    sampling, training = terms["rollout"] + terms["verifier"], terms["trainer"]
    reference, sync = terms["reference"], terms["sync"]
    assert here.number("step_seconds") == pytest.approx(max(sampling, training + reference) + sync)
    assert there.number("step_seconds") == pytest.approx(max(sampling + reference, training) + sync)
    assert lab(kept=0.8).number("tokens_per_second") == pytest.approx(
        0.8 * here.number("tokens_per_second")
    )
