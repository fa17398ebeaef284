"""Ranks that divide the positions of a row compute what one process computes."""

from __future__ import annotations

from functools import cache
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from context_cases import (
    AVERAGED,
    FOURS,
    PAIRS,
    activation_bytes,
    everything,
    scores,
    values,
    with_routes,
)
from hypothesis import given
from hypothesis import strategies as st
from rank_cases import SMALL, Case, assert_same_step, averaged, spoiled_step, step
from tests.rank_processes import on_ranks
from tiny import ragged_groups, relative

from sixfold.batch import collate, filled
from sixfold.errors import UserError
from sixfold.model.experts import OWN
from sixfold.ranks import ALONE
from sixfold.trainer.context_parallel import ContextGroup, assign_positions, key_counts, own_spans
from sixfold.trainer.packing import pack
from sixfold.trainer.segments import Segment
from sixfold.trainer.sharded import check_context

torch.set_num_threads(1)


@cache
def of_ranks(size: int) -> list[dict[str, Any]]:
    """Everything, by the ranks of one group of processes."""
    return on_ranks(size, everything)


CHOSEN = [
    *((name, 2) for name in PAIRS),
    *(pytest.param(name, 4, marks=pytest.mark.slow) for name in FOURS),
]


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "size"), CHOSEN)
def test_step_equals_that_of_one_process_on_every_rank(name: str, size: int) -> None:
    expected = step(ALONE, (PAIRS | FOURS)[name])
    for found in of_ranks(size):
        assert_same_step(found[name], expected)


@pytest.mark.nightly
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_gradients_are_equal_under_every_aggregation(size: int) -> None:
    expected = averaged(ALONE, AVERAGED["context"])
    for found in of_ranks(size):
        for name, gradient in expected.items():
            assert relative(found["averaged"][name], gradient) < 1e-5, name


def test_all_ranks_skip_a_loss_that_is_not_finite() -> None:
    expected = spoiled_step(ALONE, AVERAGED["context"])
    for found in (each["spoiled"] for each in of_ranks(2)):
        assert found["skipped"] == 1.0 and found["kept"] and found["version"] == 1
        assert found["reason"].startswith("loss not finite in rows [")
        assert found["sound"] == pytest.approx(expected["sound"], rel=1e-5)


def test_bfloat16_gradient_is_as_close_as_rounding_allows() -> None:
    expected = step(ALONE, Case(values=SMALL), torch.bfloat16)
    for found in of_ranks(2):
        assert relative(found["bfloat16"]["gradient"], expected["gradient"]) < 2e-2


def test_reference_and_critics_score_as_in_one_process() -> None:
    tables, of_critics = scores(ALONE), values(ALONE)
    for found in of_ranks(2):
        for table, expected in zip(found["scores"], tables, strict=True):
            torch.testing.assert_close(table, expected, rtol=1e-5, atol=1e-5)
        for body, (expected, norm) in of_critics.items():
            table, found_norm = found["values"][body]
            torch.testing.assert_close(table, expected, rtol=1e-4, atol=1e-5)
            assert found_norm == pytest.approx(norm, rel=1e-4)


def test_a_group_waits_no_longer_than_the_setting_says() -> None:
    assert [found["timeout"] for found in of_ranks(2)] == [17.0] * 2


def test_a_rank_keeps_its_share_of_the_activations() -> None:
    """With recomputation, a rank keeps hidden states alone. Otherwise also keys of other ranks."""
    for mode, most in (("none", 0.65), ("full", 0.52)):
        whole = activation_bytes(ALONE, mode)
        for found in of_ranks(2):
            assert 0.4 < found["bytes"][mode] / whole < most, mode


# --- the division of a row


@st.composite
def rows(draw: st.DrawFn) -> list[Segment]:
    """Segments of a row: prompts, each with its completions."""
    made, used = list[Segment](), 0
    for _ in range(draw(st.integers(1, 4))):
        prompt = draw(st.integers(1, 40))
        made.append(Segment(used, used + prompt))
        used += prompt
        for _ in range(draw(st.integers(0, 4))):
            length = draw(st.integers(1, 60))
            made.append(Segment(used, used + length, made[-1].start, made[-1].stop))
            if made[-2].prefix:
                made[-1] = Segment(used, used + length, made[-2].prefix_start, made[-2].prefix_stop)
            used += length
    return made


def seen_by(segments: list[Segment]) -> list[list[int]]:
    """Keys that each query of a row sees, by the definition."""
    return [
        [*range(s.prefix_start, s.prefix_stop), *range(s.start, query + 1)]
        for s in segments
        for query in range(s.start, s.stop)
    ]


@given(rows(), st.integers(1, 5))
def test_every_query_is_computed_once_with_its_keys(segments: list[Segment], ranks: int) -> None:
    expected = seen_by(segments)
    assert key_counts(segments).tolist() == [len(keys) for keys in expected]
    owner = assign_positions(key_counts(segments), ranks)
    assert len(owner) == len(expected)
    for rank in range(ranks):
        own = np.flatnonzero(owner == rank)
        if not len(own):
            continue
        spans, keys = own_spans(segments, own)
        queries, at = iter(own.tolist()), 0
        for count, seen in spans:
            span = keys[at : at + seen].tolist()
            at += seen
            for i in range(count):
                assert span[: seen - count + 1 + i] == expected[next(queries)]
        assert next(queries, None) is None and at == len(keys)


def shared_prompt(prompt: int, *completions: int) -> list[Segment]:
    """A prompt of a row, followed by its completions."""
    made, used = [Segment(0, prompt)], prompt
    for length in completions:
        made.append(Segment(used, used + length, 0, prompt))
        used += length
    return made


@pytest.mark.parametrize(
    "segments",
    [
        shared_prompt(4000),
        shared_prompt(500, 4000),
        shared_prompt(500, 100, 3000, 20, 900, 1500),
        shared_prompt(3000, *(200,) * 16),
    ],
)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_positions_and_costs_are_balanced(segments: list[Segment], ranks: int) -> None:
    cost = key_counts(segments)
    owner = assign_positions(cost, ranks)
    counts, loads = np.bincount(owner), np.bincount(owner, weights=cost)
    assert counts.max() - counts.min() <= 8
    assert loads.max() < 1.1 * loads.mean()


def test_one_sequence_is_divided_into_early_and_late_stretches() -> None:
    assert assign_positions(np.arange(8) + 1, 2).tolist() == [0, 0, 1, 1, 1, 1, 0, 0]
    equal = np.tile(np.arange(4) + 1, 4)
    assert assign_positions(equal, 2).tolist() == [0] * 8 + [1] * 8, "whole completions"
    assert assign_positions(np.array([1, 2]), 4).tolist().count(0) <= 1


@pytest.mark.parametrize("ranks", [1, 3, 7])
def test_tokens_count_once_and_a_rank_without_positions_counts_none(
    ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks of the group take turns in this process."""
    batch = collate(ragged_groups(1, groups=1, samples=2, longest=3)).with_host()
    row = pack(with_routes(batch), [0, 1], share_prefix=True)
    assert row.experts is not None and len(row.tokens) == 4
    parts = []
    for rank in range(ranks):
        monkeypatch.setattr(dist, "get_rank", lambda group, rank=rank: rank)
        monkeypatch.setattr(dist, "get_world_size", lambda group: ranks)
        parts.append(ContextGroup(cast(dist.ProcessGroup, None)).divide(row).part)
    assert sum(int(part.copies.sum()) for part in parts) == int(row.copies.sum())
    assert sum(len(part.target) for part in parts) == len(row.target)
    known = [int((filled(part.experts, "experts") != OWN).sum()) for part in parts]
    assert sum(known) == int((row.experts != OWN).sum())
    assert all(len(part.tokens) >= 1 for part in parts)


@pytest.mark.parametrize(
    ("context", "tensor", "ranks", "nearest"), [(3, 1, 4, 2), (8, 1, 4, 4), (2, 2, 2, 1)]
)
def test_group_that_does_not_divide_is_refused_with_the_nearest(
    context: int, tensor: int, ranks: int, nearest: int
) -> None:
    with pytest.raises(UserError, match=rf"parallel\.context = {context} must.* {nearest}$"):
        check_context(context, tensor, ranks)
    check_context(nearest, tensor, ranks)
