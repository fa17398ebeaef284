"""Ranks in expert groups compute what one process computes."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from expert_cases import EXCHANGED, REFUSED, SPOILED, bfloat16, expert_steps, others
from rank_cases import assert_same_step, spoiled_step, step
from tests.models.experts import FAMILIES, meta_model
from tests.rank_processes import on_ranks
from tiny import relative, tiny_model

from sixfold.errors import UserError
from sixfold.ranks import ALONE
from sixfold.trainer.expert_parallel import check_experts

torch.set_num_threads(1)

CASES = [(name, 4 if case.everywhere else 2) for name, case in EXCHANGED.items()]


@cache
def of_ranks(size: int) -> list[dict[str, Any]]:
    """Everything, by the ranks of one group of processes."""
    return on_ranks(size, expert_steps)


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "size"), CASES)
def test_step_equals_that_of_one_process_on_every_rank(name: str, size: int) -> None:
    expected = step(ALONE, EXCHANGED[name])
    for found in of_ranks(size):
        assert_same_step(found[name], expected)


@pytest.mark.nightly
def test_all_ranks_skip_a_loss_that_is_not_finite_on_one() -> None:
    """Tokens of both ranks reach all experts, so no expert has a finite gradient."""
    expected = spoiled_step(ALONE, SPOILED)
    for found in (of_rank["spoiled"] for of_rank in of_ranks(2)):
        assert found["skipped"] == 1.0 and found["kept"] and found["version"] == 1
        assert found["reason"].startswith("loss not finite in rows [")
        assert found["sound"] == pytest.approx(expected["sound"], rel=1e-5)


def test_bfloat16_step_is_as_close_as_rounding_allows() -> None:
    expected = bfloat16(ALONE)
    for found in of_ranks(2):
        assert relative(found["bfloat16"]["gradient"], expected["gradient"]) < 2e-2


def test_reference_and_critic_divide_their_experts_too() -> None:
    expected = others(ALONE)
    assert expected["computed"] == {8}
    for found in (of_rank["others"] for of_rank in of_ranks(2)):
        assert found["computed"] == {4}
        assert relative(found["reference"], expected["reference"]) < 2e-2
        assert relative(found["critic"], expected["critic"]) < 1e-5


def test_gathered_weights_are_exactly_those_of_the_model() -> None:
    assert all(found["others"]["gathered"] for found in of_ranks(2))


@pytest.mark.parametrize("family", FAMILIES)
def test_families_are_supported_or_refused_by_name(family: str) -> None:
    model = meta_model(family)
    if family not in REFUSED:
        check_experts(model, 2, 4)
        return
    with pytest.raises(UserError, match=rf"parallel\.experts = 2: .*{type(model).__name__}.*= 1"):
        check_experts(model, 2, 4)


def test_a_model_without_experts_is_refused() -> None:
    with pytest.raises(UserError, match=r"parallel\.experts = 2: .*Qwen3ForCausalLM.*= 1"):
        check_experts(tiny_model(), 2, 4)


@pytest.mark.parametrize(
    ("experts", "ranks", "nearest"), [(3, 6, 2), (16, 16, 8), (2, 3, 1), (4, 6, 2)]
)
def test_group_that_does_not_divide_is_refused_with_the_nearest(
    experts: int, ranks: int, nearest: int
) -> None:
    model = meta_model("qwen3_moe")
    with pytest.raises(UserError) as raised:
        check_experts(model, experts, ranks)
    text = str(raised.value)
    assert f"parallel.experts = {experts}" in text and text.endswith(f"does is {nearest}")
    assert f"{ranks} ranks" in text and "8 experts" in text
    check_experts(model, nearest, ranks)
