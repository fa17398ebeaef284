"""Several gloo ranks compute what one process computes."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from rank_cases import (
    AVERAGED,
    CASES,
    averaged,
    bfloat16_scores,
    bfloat16_step,
    eight_bit,
    everything,
    spoiled_step,
    step,
)
from tests.rank_processes import on_ranks
from tiny import relative

from sixfold.ranks import ALONE

torch.set_num_threads(1)

CHOSEN = [
    (name, size) for name, case in CASES.items() for size in (2, 4) if size == 2 or case.everywhere
]


@cache
def alone(name: str) -> dict[str, Any]:
    return step(ALONE, CASES[name])


@cache
def of_ranks(size: int) -> list[dict[str, Any]]:
    """Everything, by the ranks of one group of processes."""
    return on_ranks(size, everything)


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "size"), CHOSEN)
def test_gradients_equal_those_of_one_process(name: str, size: int) -> None:
    expected = alone(name)
    for found in of_ranks(size):
        assert found[name]["skipped"] == ""
        assert relative(found[name]["gradient"], expected["gradient"]) < 1e-5
        # AdamW turns the rounding error of a gradient that should be 0 into a step.
        assert relative(found[name]["weights"], expected["weights"]) < 1e-4


@pytest.mark.nightly
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("trained", AVERAGED)
def test_gradients_are_equal_under_every_aggregation(trained: str, size: int) -> None:
    expected = averaged(ALONE, AVERAGED[trained])
    for found in of_ranks(size):
        for name, gradient in expected.items():
            assert relative(found[f"averaged {trained}"][name], gradient) < 1e-5, name


@pytest.mark.parametrize(("name", "size"), CHOSEN)
def test_metrics_equal_those_of_one_process_on_every_rank(name: str, size: int) -> None:
    expected = alone(name)["metrics"]
    for found in of_ranks(size):
        metrics = dict(found[name]["metrics"])
        assert metrics.keys() == expected.keys()
        # A group in another micro-batch may need its prompt computed again.
        assert metrics.pop("train/microbatches") >= 1.0 and metrics.pop("train/tokens") > 0.0
        for key, value in metrics.items():
            assert value == pytest.approx(expected[key], rel=1e-4, abs=1e-6), key


def test_bfloat16_ranks_are_as_close_as_rounding_allows() -> None:
    expected = bfloat16_step(ALONE)
    for found in of_ranks(2):
        assert relative(found["bfloat16"]["gradient"], expected["gradient"]) < 2e-2


def test_reference_in_bfloat16_scores_as_in_one_process() -> None:
    expected = bfloat16_scores(ALONE)
    for found in of_ranks(2):
        assert relative(found["scores"], expected) < 2e-2


@pytest.mark.parametrize("size", [2, 4])
def test_all_ranks_skip_a_loss_that_is_not_finite_on_one(size: int) -> None:
    """With four ranks and three groups, one rank has nothing to do."""
    expected, ranks = spoiled_step(ALONE), [found["spoiled"] for found in of_ranks(size)]
    for found in ranks:
        assert found["skipped"] == 1.0 and found["kept"] and found["version"] == 1
        assert found["reason"].startswith("loss not finite in rows [")
        assert found["reason"] == ranks[0]["reason"]
        assert found["passes"] == ranks[0]["passes"]
        assert found["sound"] == pytest.approx(expected["sound"], rel=1e-5)


@pytest.mark.parametrize("size", [2, 4])
def test_8_bit_moments_do_not_depend_on_the_number_of_ranks(size: int) -> None:
    expected = eight_bit(ALONE)
    assert expected["refused"] == ""
    for found in (of_rank["8 bits"] for of_rank in of_ranks(size)):
        assert "'crossing'" in found["refused"] and "trainer.optimizer" in found["refused"]
        for kind in ("saved", "state", "weights"):
            assert found[kind].keys() == expected[kind].keys()
            for name, tensor in expected[kind].items():
                # The last numbers of a tensor are computed one by one: they may differ by one bit.
                torch.testing.assert_close(found[kind][name], tensor, rtol=1e-6, atol=0)
