"""Aggregation weights: golden sums, hand-made tables, and what padding, order and empty rows must
not change.
"""

from __future__ import annotations

import pytest
import torch
from golden import AGGREGATIONS as OURS
from golden import CASES, close, table
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sixfold.algorithm.aggregation import AGGREGATIONS

torch.set_num_threads(1)
EVERY = sorted(AGGREGATIONS)

masks = st.tuples(st.integers(1, 6), st.integers(1, 8)).flatmap(
    lambda shape: st.lists(
        st.lists(st.booleans(), min_size=shape[1], max_size=shape[1]),
        min_size=shape[0],
        max_size=shape[0],
    )
)


def _weights(name: str, mask: Tensor, group: Tensor | None = None, horizon: int = 5) -> Tensor:
    return AGGREGATIONS[name](
        mask, torch.arange(len(mask)) // 2 if group is None else group, horizon
    )


@pytest.mark.parametrize("theirs", sorted(OURS))
def test_golden(theirs: str) -> None:
    """A fully masked row is not counted, and the junk in the padding weighs nothing."""
    loss, mask = table("loss_aggregation", "loss"), table("loss_aggregation", "mask")
    horizon = CASES["loss_aggregation"]["params"]["norm_constant"]
    value = (_weights(OURS[theirs], mask, horizon=horizon).double() * loss).sum()
    close(value, table("loss_aggregation", theirs, "expected"))


@pytest.mark.parametrize(
    ("name", "long", "short"),
    [
        ("sequence", 1 / 8, 1 / 4),
        ("token", 1 / 6, 1 / 6),
        ("sequence-sum", 1 / 2, 1 / 2),
        ("constant", 1 / 20, 1 / 20),
    ],
)
def test_what_a_token_of_a_long_and_of_a_short_answer_weighs(
    name: str, long: float, short: float
) -> None:
    """Two answers of 4 and 2 tokens, horizon 10: A/|y|/B, A/sum|y|, A/B, A/B/L."""
    mask = torch.tensor([[0, 1, 1, 1, 1], [0, 1, 1, 0, 0]]).bool()
    close(
        _weights(name, mask, horizon=10),
        torch.tensor([[0, long, long, long, long], [0, short, short, 0, 0]]),
    )


def test_prompt_mean_by_hand() -> None:
    """Group 0: 3 tokens over two answers; group 1: one of 1 token, one empty; group 2: nothing, so
    two prompts count.
    """
    mask = torch.tensor([[1, 1], [1, 0], [1, 0], [0, 0], [0, 0]]).bool()
    group = torch.tensor([0, 0, 1, 1, 2])
    sixth, half = 1 / 6, 1 / 2
    close(
        _weights("prompt", mask, group),
        torch.tensor([[sixth, sixth], [sixth, 0], [half, 0], [0, 0], [0, 0]]),
    )


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(masks)
@pytest.mark.parametrize("name", EVERY)
def test_weights_are_a_mean_and_never_nan(name: str, rows: list[list[bool]]) -> None:
    """Zero off the mask; and, where anything is scored, the weights of a mean sum to one."""
    mask = torch.tensor(rows)
    weights = _weights(name, mask)
    assert (weights[~mask] == 0).all() and (weights[mask] > 0).all()
    if name in ("token", "sequence", "prompt"):
        assert float(weights.sum()) == pytest.approx(float(mask.any()), abs=1e-6)


@pytest.mark.mostly_slow(1)
@settings(max_examples=60, deadline=None)
@given(masks, st.integers(1, 5))
@pytest.mark.parametrize("name", EVERY)
def test_padding_and_empty_rows_change_nothing(
    name: str, rows: list[list[bool]], more: int
) -> None:
    mask = torch.tensor(rows)
    group = torch.arange(len(mask)) // 2
    wider = torch.nn.functional.pad(mask, (0, more, 0, more))
    grown = _weights(name, wider, torch.cat([group, torch.full((more,), 99)]))
    torch.testing.assert_close(
        grown[: len(mask), : mask.shape[1]], _weights(name, mask, group), rtol=0, atol=0
    )
    assert not grown[len(mask) :].any()


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(masks)
@pytest.mark.parametrize("name", EVERY)
def test_row_order_changes_nothing(name: str, rows: list[list[bool]]) -> None:
    mask = torch.tensor(rows)
    group = torch.arange(len(mask)) // 2
    order = torch.randperm(len(mask), generator=torch.Generator().manual_seed(len(mask)))
    torch.testing.assert_close(
        _weights(name, mask[order], group[order]), _weights(name, mask, group)[order]
    )
