"""Chunked prefill by its counters: between two tokens of a running sequence lies at most one budget
of prompt tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_scheduling import BookRunner, _add, _mixes, assert_empty, book_engine
from torch import Tensor
from transformers import PreTrainedModel

from sixfold.engine.engine import Engine
from sixfold.engine.sequence import Chunk


class CountingRunner(BookRunner):
    """Counts the positions of chunks that were computed since it was last asked."""

    def __init__(self, engine: Engine, block_size: int) -> None:
        super().__init__(engine, block_size)
        self.computed = 0

    def prefill(self, chunks: list[Chunk]) -> Tensor:
        self.computed += sum(c.prompt_stop - c.start for c in chunks)
        return super().prefill(chunks)

    def replay(self, chunks: list[Chunk]) -> None:
        self.computed += sum(c.stop - c.prompt_stop for c in chunks)
        super().replay(chunks)


@pytest.mark.slow
@given(mix=_mixes(), late=st.lists(st.integers(0, 15), min_size=7, max_size=7))
@settings(max_examples=150, deadline=None)
def test_no_token_waits_for_more_than_one_chunk(
    tiny: Callable[[str], PreTrainedModel], mix: dict, late: list[int]
) -> None:
    """Whatever arrives, and when: in every step what runs gets its token, but for a sequence that
    lost its blocks in it; and at most a budget of positions is computed beside, prompts and what is
    computed again after a preemption alike."""
    requests = mix.pop("requests")
    engine = book_engine(tiny("qwen3"), **{**mix, "chunked_prefill": True})
    runner = engine.runner = CountingRunner(engine, mix["block_size"])  # type: ignore[assignment]
    now = 0
    while engine.busy or any(step >= now for step in late[: len(requests)]):
        for i, request in enumerate(requests):
            if late[i] == now:
                _add(engine, i, request)
        now += 1
        if not engine.busy:
            continue
        before = {s: s.length for s in engine.scheduler.running}
        runner.computed = 0
        ended = engine.step()
        assert runner.computed <= mix["prefill_tokens"]
        for s, length in before.items():
            if s.blocks or s in ended:
                assert s.length == length + 1
            else:  # preempted
                assert s.length == length
    assert_empty(engine)
