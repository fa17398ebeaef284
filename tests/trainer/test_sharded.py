"""Several gloo ranks compute what one process computes."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from rank_cases import CASES, bfloat16_step, spoiled_step, step, steps
from tests.rank_processes import on_ranks
from tiny import relative

from sixfold.ranks import ALONE

torch.set_num_threads(1)


@cache
def alone(name: str) -> dict[str, Any]:
    return step(ALONE, CASES[name])


@cache
def of_ranks(size: int) -> list[dict[str, dict[str, Any]]]:
    """Results of all cases, computed by one group of processes."""
    return on_ranks(size, steps, [n for n in CASES if size % CASES[n].replicas == 0])


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_gradients_equal_those_of_one_process(name: str, size: int) -> None:
    expected = alone(name)
    for found in of_ranks(size):
        assert found[name]["skipped"] == ""
        assert relative(found[name]["gradient"], expected["gradient"]) < 1e-5
        # AdamW turns the rounding error of a gradient that should be 0 into a step.
        assert relative(found[name]["weights"], expected["weights"]) < 1e-4


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", CASES)
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
    for found in on_ranks(2, bfloat16_step):
        assert relative(found["gradient"], expected["gradient"]) < 2e-2


@pytest.mark.parametrize("size", [2, 4])
def test_all_ranks_skip_a_loss_that_is_not_finite_on_one(size: int) -> None:
    """With four ranks and three groups, one rank has nothing to do."""
    expected, ranks = spoiled_step(ALONE), on_ranks(size, spoiled_step)
    for found in ranks:
        assert found["skipped"] == 1.0 and found["kept"] and found["version"] == 1
        assert found["reason"].startswith("loss not finite in rows [")
        assert found["reason"] == ranks[0]["reason"]
        assert found["passes"] == ranks[0]["passes"]
        assert found["sound"] == pytest.approx(expected["sound"], rel=1e-5)
