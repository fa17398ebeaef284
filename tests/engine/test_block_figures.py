"""Occupancy of the paged cache, by block arithmetic at every step, compared with contiguous slabs
for the same work.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_scheduling import END, VOCABULARY, assert_empty, book_engine
from tests.conftest import END as STOP
from transformers import PreTrainedModel

from sixfold.engine.engine import Engine
from sixfold.engine.sequence import Sequence
from sixfold.model.causal_lm import CausalLM
from sixfold.types import SamplingParams

PROMPT, SAMPLES = 512, 16
SCHEDULES: list[dict[str, object]] = [
    {},
    dict(max_running=5),
    dict(chunked_prefill=True, prefill_tokens=200),
    dict(preemption="recompute"),
]


def blocks_of(tokens: int, size: int) -> int:
    return -(-tokens // size)


def step(engine: Engine) -> tuple[list[Sequence], dict[Sequence, int]]:
    """One step -> what ended with it, and for each that runs the tokens that have a place in the
    cache: all that it had when the step began, whose newest the step may have put there or only
    made room for; of one that has joined, for the first time or again, all but its newest.
    """
    before = {s: s.length for s in engine.scheduler.running}
    finished = engine.step()
    return finished, {s: before.get(s, s.length - 1) for s in engine.scheduler.running}


@pytest.mark.mostly_slow(5)
@pytest.mark.parametrize("sizes", SCHEDULES)
@pytest.mark.parametrize("kind", ["none", "radix", "hash"])
@pytest.mark.parametrize("size", [16, 24, 1000])
def test_samples_of_a_prompt_compute_and_hold_it_once_at_every_step(
    tiny: Callable[[str], PreTrainedModel], size: int, kind: str, sizes: dict[str, object]
) -> None:
    """The prompt's full blocks once, and for each sample the blocks of what it has beyond those.
    Its partly filled one: for each sample, and for those that wait."""
    engine = book_engine(
        tiny("qwen3"), kv_tokens=40_000, block_size=size, prefix_cache=kind, **sizes
    )
    engine.add(
        "t",
        [2, 3] * (PROMPT // 2),
        SamplingParams(max_tokens=60, stop_token_ids=(END,), seed=3),
        list(range(SAMPLES)),
    )
    full, ended, lengths = PROMPT // size, 0, set()
    while engine.busy:
        finished, placed = step(engine)
        ended += len(finished)
        lengths |= {s.length for s in finished}
        waiting = engine.scheduler.waiting
        known = waiting[0].computed if waiting else 0  # of the prompt that waits
        shared = full if placed else known // size
        own = sum(blocks_of(tokens, size) - full for tokens in placed.values())
        assert engine.usage().used == shared + own + blocks_of(known, size) - known // size
        assert len({b for s in placed for b in s.blocks[:full]}) == (full if placed else 0)
    assert ended == SAMPLES and len(lengths) > 5
    assert engine.stats.prefill_tokens == PROMPT
    assert engine.stats.reused_tokens == (SAMPLES - 1) * PROMPT
    assert_empty(engine)


@pytest.mark.mostly_slow(1)
@pytest.mark.parametrize(
    ("size", "together", "apart"), [(16, 32 + 16 * 2, 16 * 34), (24, 21 + 16 * 2, 16 * 23)]
)
@pytest.mark.parametrize("kind", ["none", "radix", "hash"])
def test_peak_blocks_of_sixteen_samples(
    tiny: Callable[[str], PreTrainedModel], kind: str, size: int, together: int, apart: int
) -> None:
    """33 tokens each, the last of which is never cached. As 16 requests of other prompts they hold
    the prompt 16 times.
    """
    for prompts, blocks in ((1, together), (SAMPLES, apart)):
        engine = book_engine(tiny("qwen3"), kv_tokens=40_000, block_size=size, prefix_cache=kind)
        for i in range(prompts):
            engine.add(
                str(i),
                [i % VOCABULARY, i // VOCABULARY] * (PROMPT // 2),
                SamplingParams(max_tokens=33),
                list(range(SAMPLES // prompts)),
            )
        engine.run()
        assert engine.stats.prefill_tokens == prompts * PROMPT
        assert engine.stats.peak_blocks == blocks


@pytest.mark.slow
@given(
    size=st.integers(1, 20),
    requests=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 30)), min_size=1, max_size=8),
    preemption=st.sampled_from(["none", "recompute"]),
)
@example(
    size=1, requests=[(1, 1), (40, 7), (31, 7), (34, 7), (1, 1), (23, 7)], preemption="recompute"
)  # one is preempted, and joins again
@settings(max_examples=60, deadline=None)
def test_every_sequence_holds_its_tokens_and_less_than_a_block_more(
    tiny: Callable[[str], PreTrainedModel],
    size: int,
    requests: list[tuple[int, int]],
    preemption: str,
) -> None:
    """Nothing is shared here: every prompt begins with another token."""
    engine = book_engine(
        tiny("qwen3"), kv_tokens=150, block_size=size, preemption=preemption, prefix_cache="none"
    )
    for i, (prompt, tokens) in enumerate(requests):
        engine.add(str(i), [i] * prompt, SamplingParams(tokens, stop_token_ids=(END,), seed=1), [0])
    while engine.busy:
        _, placed = step(engine)
        assert all(len(s.blocks) == blocks_of(tokens, size) for s, tokens in placed.items())
        assert engine.usage().used == sum(blocks_of(tokens, size) for tokens in placed.values())
        assert all(0 <= len(s.blocks) * size - tokens < size for s, tokens in placed.items())
    assert_empty(engine)


@dataclass
class Held:
    """Slots that an engine held, in tokens and summed over its steps (rows: sequences), and its
    output.
    """

    slots: int = 0
    empty: int = 0
    rows: int = 0
    steps: int = 0
    together: int = 0
    tokens: dict[str, list[int]] = field(default_factory=dict)


def hold(
    model: PreTrainedModel,
    slots: int,
    longest: int,
    block: int,
    preemption: Literal["none", "recompute"],
) -> Held:
    """24 prompts of 20 tokens, each of which may get `longest` tokens long and mostly stops before,
    in a cache of `slots`.
    """
    engine = Engine(
        CausalLM(model),
        kv_tokens=slots - block,
        block_size=block,
        prefix_cache="none",
        preemption=preemption,
    )
    assert engine.scheduler.blocks.count * block == slots
    for i in range(24):
        params = SamplingParams(longest - 20, stop_token_ids=(STOP, 5, 6, 7), seed=1)
        engine.add(str(i), [(7 * i + j) % 60 + 1 for j in range(20)], params, [0])
    held = Held()
    while engine.busy:
        held.tokens |= {s.request.key: s.tokens for s in engine.step()}
        usage = engine.usage()
        held.slots, held.empty, held.rows = (
            held.slots + usage.used * block,
            held.empty + usage.wasted_slots,
            held.rows + usage.running,
        )
        held.steps, held.together = held.steps + 1, max(held.together, usage.running)
    return held


def test_slabs_beside_pages(tiny: Callable[[str], PreTrainedModel]) -> None:
    """A slab is a block as long as a sequence may get, its own from its first token to its last. In
    a cache of six slabs: the same tokens, but six sequences at a time instead of all, and most of a
    slab holds nothing, while of pages each sequence wastes less than one.
    """
    longest, page = 240, 8
    slabs = hold(tiny("qwen3"), 6 * longest, longest, longest, "none")
    pages = hold(tiny("qwen3"), 6 * longest, longest, page, "recompute")
    assert pages.tokens == slabs.tokens
    lengths = [len(tokens) for tokens in pages.tokens.values()]
    assert len(lengths) == 24 and sum(lengths) < 24 * longest / 3
    assert slabs.slots == longest * slabs.rows and slabs.empty > 0.7 * slabs.slots
    assert pages.empty < page * pages.rows and pages.empty < 0.15 * pages.slots
    assert (slabs.together, pages.together) == (6, 24)
    assert pages.steps < 0.6 * slabs.steps
