"""Units: rows that stay together in every split, so that a loss can compare them."""

from __future__ import annotations

import copy
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from tiny import (
    make_trainer,
    plain_gradient,
    ragged_batch,
    ragged_groups,
    relative,
    step_gradient,
    tiny_model,
)
from torch import Tensor
from torch.nn.functional import logsigmoid

from sixfold.batch import Batch, LossOutput, collate, filled
from sixfold.trainer.packing import microbatches, pack, units
from sixfold.trainer.sharing import plan_updates

torch.set_num_threads(1)
ROWS = 12


def shuffled_units(rng: random.Random, count: int) -> list[int]:
    """A unit for each row; the rows of a unit need not be neighbours."""
    return [rng.randrange(count) for _ in range(ROWS)]


@hypothesis_settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 12), st.integers(8, 160), st.booleans())
def test_no_split_divides_a_unit(seed: int, count: int, most: int, share_prefix: bool) -> None:
    rng = random.Random(seed)
    number = shuffled_units(rng, count)
    part = [rng.randrange(3) for _ in range(count)]
    weighs = [rng.random() < 0.4 for _ in range(ROWS)]
    batch = collate(ragged_groups(seed % 7)).with_(unit=torch.tensor(number))
    plan = plan_updates(batch, weighs, [part[u] for u in number], most, share_prefix)
    placed = {
        b: (i, j) for i, parts in enumerate(plan) for j, rows in enumerate(parts) for b in rows
    }
    assert sum(len(rows) for parts in plan for rows in parts) == len(placed)
    weighty = {u for u, weight in zip(number, weighs, strict=True) if weight}
    assert set(placed) == {b for b in range(ROWS) if number[b] in weighty}
    for u in weighty:
        assert len({placed[b] for b in range(ROWS) if number[b] == u}) == 1
    assert [part[number[parts[0][0]]] for parts in plan] == sorted({part[u] for u in weighty})
    for rows in (rows for parts in plan for rows in parts):
        size = len(pack(batch, rows, share_prefix).tokens)
        assert size <= most or len({number[b] for b in rows}) == 1


@pytest.mark.parametrize("most", [20, 40, 10**6])
@pytest.mark.parametrize("share_prefix", [True, False])
def test_units_of_one_row_are_the_default(most: int, share_prefix: bool) -> None:
    batch = ragged_batch(0)
    alone = batch.with_(unit=torch.arange(ROWS))
    rows = [3, 4, 5, 7, 8, 11]
    assert units(batch, rows) == units(alone, rows) == [[b] for b in rows]
    parts = microbatches(batch, rows, most, share_prefix)
    assert microbatches(alone, rows, most, share_prefix) == parts


def test_mini_batch_that_splits_a_unit_is_refused() -> None:
    batch = ragged_batch(0).with_(unit=torch.arange(ROWS) // 2, minibatch=torch.arange(ROWS) // 3)
    with pytest.raises(ValueError, match=r"batch\.minibatch splits the unit of rows \[2, 3\]"):
        make_trainer(tiny_model()).train_step(batch, pair_loss)


def pair_loss(batch: Batch, logp: Tensor) -> LossOutput:
    """-log sigmoid(log-prob of a unit's first row - that of its second), mean over six pairs."""
    number, scores = filled(batch.unit, "unit"), torch.where(batch.mask, logp, 0.0).sum(-1)
    loss = scores.new_zeros(())
    for u in number.unique():
        first, second = scores[number == u]  # a divided pair could not be unpacked
        loss = loss - logsigmoid(first - second) / 6
    return LossOutput(loss, {"train/loss": loss.detach()})


@pytest.mark.parametrize("most", [20, 50, 10**6])
def test_gradient_of_a_pair_loss_is_the_same_for_every_split(most: int) -> None:
    """Only the first row of each pair has a weight; pairs are of different prompts too."""
    rng = random.Random(1)
    number = [u for u in range(6) for _ in range(2)]
    rng.shuffle(number)
    seen: set[int] = set()
    first = [u not in seen and not seen.add(u) for u in number]  # type: ignore[func-returns-value]
    batch = ragged_batch(3)
    batch = replace(
        batch.with_(unit=torch.tensor(number), weights=batch.mask * torch.tensor(first)[:, None]),
        minibatch=None,
    )
    model = tiny_model()
    expected = plain_gradient(copy.deepcopy(model), batch, pair_loss)
    got = step_gradient(model, batch, pair_loss, max_tokens_per_microbatch=most)
    assert float(expected.norm()) > 0.01 and relative(got, expected) < 1e-5
