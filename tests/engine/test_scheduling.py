"""Continuous batching by its books: a fake runner stands in for the model and plays the cache, so
that every block is watched in every step.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine.drain import drain
from torch import Tensor
from transformers import PreTrainedModel

from sixfold.engine.batch_state import BatchState
from sixfold.engine.engine import Engine
from sixfold.engine.scheduler import ScheduledStep
from sixfold.engine.sequence import Chunk, Request, Sequence
from sixfold.model.causal_lm import CausalLM
from sixfold.types import SamplingParams

VOCABULARY = 7
END = 1


class BookHost:
    """Plays host memory: what the slots of a block hold, and counts blocks for bytes."""

    def __init__(self, runner: BookRunner) -> None:
        self.runner = runner
        self.held: dict[int, list[int | None]] = {}
        self.taken_out = self.brought_back = 0

    def take_out(self, copies: dict[int, int], slots: int) -> None:
        assert all(0 <= slot < slots for slot in copies)
        size = self.runner.size
        for slot, block in copies.items():
            self.held[slot] = [self.runner.slots.get(block * size + i) for i in range(size)]
        self.taken_out += len(copies)

    def bring_back(self, pairs: list[tuple[int, int]]) -> None:
        assert len({block for _, block in pairs}) == len(pairs)
        for slot, block in pairs:
            for i, token in enumerate(self.held[slot]):
                if token is not None:
                    self.runner.slots[block * self.runner.size + i] = token
        self.brought_back += len(pairs)


class BookRunner:
    """Writes each token into the slot that the real runner would put its keys and values in, and
    reads a sequence's past back from the slots.
    """

    routes = None

    def __init__(self, engine: Engine, block_size: int) -> None:
        self.engine = engine
        self.size = block_size
        self.slots: dict[int, int] = {}
        self.cache = self
        self.host = BookHost(self)

    def refresh(self) -> None:
        """Nothing to do: there are no weights."""

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        for source, target in pairs:
            for i in range(self.size):
                if source * self.size + i in self.slots:
                    self.slots[target * self.size + i] = self.slots[source * self.size + i]

    def prefill(self, chunks: list[Chunk]) -> Tensor:
        for c in chunks:
            for i in range(max(c.start, c.known), c.prompt_stop):
                self.slots[c.blocks[i // self.size] * self.size + i % self.size] = c.ticket.tokens[
                    i
                ]
        for c in (
            chunks
        ):  # after all writes: a prompt may stand on what another writes in this very step
            self.read(c.blocks, c.ticket.tokens[: c.prompt_stop])
        return torch.stack([self.logits(c.ticket.tokens[: c.prompt_stop]) for c in chunks])

    def replay(self, chunks: list[Chunk]) -> None:
        for c in chunks:
            for i in range(max(c.prompt_stop, c.known), c.stop):
                self.slots[c.blocks[i // self.size] * self.size + i % self.size] = c.ticket.tokens[
                    i
                ]
            self.read(c.blocks, c.ticket.tokens[: c.stop])

    def read(self, blocks: list[int], tokens: list[int]) -> None:
        past = [
            self.slots[blocks[i // self.size] * self.size + i % self.size]
            for i in range(len(tokens))
        ]
        assert past == tokens, "the cache holds another sequence's tokens"

    def decode(self, batch: BatchState, revision: int, slots: int) -> Tensor:
        for s in batch.sequences:
            i = s.length - 1
            self.slots[s.blocks[i // self.size] * self.size + i % self.size] = s.tokens[-1]
        rows = []
        for s in batch.sequences:
            self.read(s.blocks, s.tokens)
            rows.append(self.logits(s.tokens))
        self.check(batch.sequences)
        return torch.stack(rows)

    def check(self, sequences: list[Sequence]) -> None:
        """Nobody writes where another reads: the block of a sequence's newest token is its own."""
        scheduler = self.engine.scheduler
        newest = [s.blocks[(s.length - 1) // self.size] for s in sequences]
        for s, block in zip(sequences, newest, strict=True):
            assert sum(block in other.blocks for other in sequences) == 1
            assert not scheduler.blocks._cached[block]
            assert len(s.blocks) == -(-s.length // self.size)
        held = {b for s in scheduler.running for b in s.blocks} | {
            b for t in scheduler.waiting for b in t.blocks
        }
        assert len(held) == scheduler.blocks.used  # nobody holds a block for nothing

    @staticmethod
    def logits(tokens: list[int]) -> Tensor:
        """Any function of the whole past."""
        return torch.randn(
            VOCABULARY, generator=torch.Generator().manual_seed(hash(tuple(tokens)) % 2**31)
        )


def book_engine(model: PreTrainedModel, **sizes: object) -> Engine:
    engine = Engine(CausalLM(model), **sizes)  # type: ignore[arg-type]
    engine.runner = BookRunner(engine, engine.scheduler.blocks.block_size)  # type: ignore[assignment]
    return engine


def assert_empty(engine: Engine) -> None:
    scheduler = engine.scheduler
    assert scheduler.blocks.used == 0
    scheduler.cache.evict(scheduler.blocks.count)
    assert scheduler.blocks.free == scheduler.blocks.count  # every idle block could be had
    assert scheduler.reservation.reserved == 0
    assert not scheduler.waiting and not scheduler.running
    assert len(scheduler.host._free) == scheduler.host.count


def _prompt(length: int, like: int) -> list[int]:
    """Prompts of one `like` have their beginning in common, and differ soon or late by length."""
    return [(like + j) % VOCABULARY for j in range(max(0, length - 2))] + [
        length % VOCABULARY,
        like % VOCABULARY,
    ][: min(2, length)]


@st.composite
def _mixes(draw: st.DrawFn) -> dict:
    requests = draw(
        st.lists(
            # prompt, max_tokens, samples, which prompts it is like, priority
            st.tuples(
                st.integers(1, 11),
                st.integers(1, 8),
                st.integers(1, 4),
                st.integers(0, 2),
                st.integers(0, 1),
            ),
            min_size=1,
            max_size=7,
        )
    )
    longest = max(p + m for p, m, *_ in requests)
    return dict(
        block_size=draw(st.integers(1, 5)), requests=requests,
        kv_tokens=longest + draw(st.integers(0, 40)), max_running=draw(st.integers(1, 9)),
        prefill_tokens=draw(st.integers(1, 30)),
        prefix_cache=draw(st.sampled_from(["none", "radix", "hash"])),
        chunked_prefill=draw(st.booleans()),
        preemption=draw(st.sampled_from(["none", "recompute", "swap"])),
        host_tokens=draw(st.sampled_from([None, 0, 5, 17, 9999])),
    )  # fmt: skip


def _add(engine: Engine, i: int, request: tuple[int, int, int, int, int]) -> Request:
    prompt, tokens, samples, like, priority = request
    params = SamplingParams(max_tokens=tokens, stop_token_ids=(END,), seed=4)
    return engine.add(str(i), _prompt(prompt, like), params, list(range(samples)), priority)


def _watch(engine: Engine, mix: dict) -> None:
    """Check the invariants of every step."""
    scheduler = engine.scheduler
    assert len(scheduler.running) <= mix["max_running"]
    assert scheduler.blocks.used <= scheduler.blocks.count - scheduler.blocks.free
    assert [t.rank for t in scheduler.waiting] == sorted(t.rank for t in scheduler.waiting)
    if mix["preemption"] == "none":
        assert scheduler.blocks.used <= scheduler.reservation.reserved <= scheduler.blocks.count
    held = scheduler.host._held
    assert (
        len({slot for slot, _ in held.values()})
        == len(held)
        == scheduler.host.count - len(scheduler.host._free)
    )
    waiting = {t.sequence for t in scheduler.waiting}
    assert all(
        owner.unfinished > 0 if isinstance(owner, Request) else owner in waiting
        for owner, _ in held
    )
    usage, size = engine.usage(), scheduler.blocks.block_size
    assert usage.used + usage.idle + usage.free == scheduler.blocks.count
    filled = {
        (s.blocks[i // size], i % size) for s in scheduler.running for i in range(s.length - 1)
    }
    filled |= {
        (t.blocks[i // size], i % size) for t in scheduler.waiting for i in range(t.computed)
    }
    assert usage.wasted_slots == usage.used * size - len(filled)
    assert usage.fragmentation == pytest.approx(usage.wasted_slots / max(1, usage.used * size))


@pytest.mark.slow
@given(_mixes())
@settings(max_examples=150, deadline=None)
def test_any_mix_runs_through_and_leaves_nothing_behind(
    tiny: Callable[[str], PreTrainedModel], mix: dict
) -> None:
    requests = mix["requests"]
    engine = book_engine(tiny("qwen3"), **{k: v for k, v in mix.items() if k != "requests"})
    for i, request in enumerate(requests):
        _add(engine, i, request)
    finished: list[Sequence] = []
    while engine.busy:
        finished += engine.step()
        _watch(engine, mix)
    assert sorted((s.request.key, s.sample) for s in finished) == [
        (str(i), k) for i, r in enumerate(requests) for k in range(r[2])
    ]
    for s in finished:
        prompt, tokens, *_ = requests[int(s.request.key)]
        completion = s.tokens[prompt:]
        assert 1 <= len(completion) <= tokens and END not in completion[:-1]
        assert s.finish_reason == ("stop" if completion[-1] == END else "length")
        assert len(completion) == tokens or completion[-1] == END
    assert_empty(engine)
    asked = sum(p * n for p, _, n, *_ in requests)
    computed = engine.stats.prefill_tokens + engine.stats.reused_tokens
    assert computed >= asked if mix["preemption"] != "none" else computed == asked
    if mix["prefix_cache"] == "none" and mix["preemption"] == "none":
        assert engine.stats.prefill_tokens == sum(p for p, *_ in requests)
    assert engine.stats.decoded_tokens == sum(len(s.logp) for s in finished)
    assert (
        mix["preemption"] != "none"
        or engine.stats.preemptions == engine.stats.recomputed_tokens == 0
    )
    if mix["preemption"] == "swap" and mix["host_tokens"] == 9999:
        assert engine.stats.recomputed_tokens == 0
    if mix["preemption"] != "swap" or mix["host_tokens"] == 0:
        assert engine.stats.taken_out_bytes == engine.stats.brought_back_bytes == 0


@pytest.mark.slow
@given(_mixes())
@settings(max_examples=80, deadline=None)
def test_a_sample_draws_the_same_tokens_in_any_schedule(
    tiny: Callable[[str], PreTrainedModel], mix: dict
) -> None:
    requests = mix.pop("requests")

    def run(order: list[int], **sizes: object) -> dict[tuple[str, int], list[int]]:
        engine = book_engine(tiny("qwen3"), **sizes)
        for i in order:
            _add(engine, i, requests[i])
        return {(s.request.key, s.sample): s.tokens for s in engine.run()}

    roomy = run(
        list(range(len(requests))),
        kv_tokens=2000,
        block_size=16,
        max_running=64,
        prefill_tokens=1000,
        prefix_cache="none",
    )
    assert run(list(reversed(range(len(requests)))), **mix) == roomy


@pytest.mark.slow
@given(
    _mixes(),
    st.lists(
        st.tuples(st.integers(0, 12), st.integers(0, 6), st.none() | st.sets(st.integers(0, 3))),
        max_size=4,
    ),
)
@settings(max_examples=80, deadline=None)
def test_an_abort_frees_what_the_samples_held_and_nothing_else(
    tiny: Callable[[str], PreTrainedModel],
    mix: dict,
    aborts: list[tuple[int, int, set[int] | None]],
) -> None:
    requests = mix["requests"]
    engine = book_engine(tiny("qwen3"), **{k: v for k, v in mix.items() if k != "requests"})
    asked = [_add(engine, i, r) for i, r in enumerate(requests)]
    gone: set[tuple[str, int]] = set()
    seen: list[Sequence] = []
    step = 0
    while engine.busy:
        for request, samples in ((asked[i % len(asked)], k) for at, i, k in aborts if at == step):
            asked_for = range(requests[int(request.key)][2]) if samples is None else samples
            begun = engine.abort(request, samples)
            assert all(
                s.finish_reason == "aborted"
                and s.request is request
                and s.sample in asked_for
                and not s.blocks
                for s in begun
            )
            held = [s for s in engine.scheduler.running if s.request is request]
            held += [
                t.sequence
                for t in engine.scheduler.waiting
                if t.request is request and t.sequence is not None
            ]
            assert not {s.sample for s in held} & set(asked_for)
            assert not set(request.samples) & set(asked_for)
            gone |= {(request.key, sample) for sample in asked_for}
            seen += begun
            _watch(engine, mix)
        if engine.busy:
            seen += engine.step()
            _watch(engine, mix)
        step += 1
    assert_empty(engine)
    ended = {(s.request.key, s.sample) for s in seen if s.finish_reason in ("stop", "length")}
    everything = {(r.key, k) for r in asked for k in range(requests[int(r.key)][2])}
    assert ended >= everything - gone
    assert engine.stats.aborted == len(everything) - len(ended)


def test_a_prompt_is_computed_once_for_all_its_samples(
    tiny: Callable[[str], PreTrainedModel],
) -> None:
    engine = book_engine(tiny("qwen3"), kv_tokens=1000, block_size=16, max_running=3)
    engine.add("t", [2] * 37, SamplingParams(max_tokens=3), list(range(8)))
    engine.run()
    assert engine.stats.prefill_tokens == 37
    assert engine.stats.reused_tokens == 7 * 37


@pytest.mark.parametrize(
    ("prompt", "tokens"), [(37, 20), (32, 20), (48, 1), (5, 3), (16, 17), (15, 2)]
)
@pytest.mark.parametrize("samples", [1, 8])
def test_samples_hold_the_prompt_once(
    tiny: Callable[[str], PreTrainedModel], prompt: int, tokens: int, samples: int
) -> None:
    """At the fullest moment: the prompt's full blocks once, and what each sample needs beyond them;
    its last token is never cached.
    """
    engine = book_engine(tiny("qwen3"), kv_tokens=4000, block_size=16)
    engine.add("t", [2] * prompt, SamplingParams(max_tokens=tokens), list(range(samples)))
    engine.run()
    full = prompt // 16
    own = max(-(-(prompt + tokens - 1) // 16), -(-prompt // 16)) - full
    assert engine.stats.peak_blocks == full + samples * own


def test_samples_take_turns_in_a_cache_that_holds_one_sequence(
    tiny: Callable[[str], PreTrainedModel],
) -> None:
    engine = book_engine(tiny("qwen3"), kv_tokens=20, block_size=4, max_running=64)
    engine.add("t", [2] * 10, SamplingParams(max_tokens=10), [0, 1, 2])
    engine.add("u", [3] * 9, SamplingParams(max_tokens=11), [0])
    most = 0
    while engine.busy:
        engine.step()
        most = max(most, len(engine.scheduler.running))
    assert most == 1
    assert_empty(engine)


def test_the_default_room_lets_max_running_sequences_run_together(
    tiny: Callable[[str], PreTrainedModel],
) -> None:
    """kv_tokens = max_running * longest is enough, whatever the prompts' last blocks look like."""
    engine = book_engine(tiny("qwen3"), kv_tokens=5 * 16, block_size=4, max_running=5)
    for i in range(5):
        engine.add(str(i), [i] * 7, SamplingParams(max_tokens=9), [0])
    engine.step()
    assert len(engine.scheduler.running) == 5


def test_a_finished_sequence_makes_room_at_once(tiny: Callable[[str], PreTrainedModel]) -> None:
    """Long-tailed lengths: static batches of 4 take the sum of their longest."""
    lengths = [40, 2, 2, 3, 40, 2, 2, 3, 40, 3, 2, 2, 40, 2, 2, 2]
    continuous, static = (
        book_engine(tiny("qwen3"), kv_tokens=4 * 48, block_size=8, max_running=4, continuous=way)
        for way in (True, False)
    )
    drawn = []
    for engine in (continuous, static):
        for i, n in enumerate(lengths):
            engine.add(str(i), [i % VOCABULARY] * 3, SamplingParams(max_tokens=n), [0])
        drawn.append({s.request.key: (s.tokens, s.logp) for s in engine.run()})
    assert drawn[0] == drawn[1]
    # Of a batch's steps the first is its prefill, from which each sequence has its first token.
    assert static.stats.steps == 4 * 40
    assert continuous.stats.steps < 0.5 * static.stats.steps
    assert static.stats.decode_slots == 4 * 4 * 39
    assert static.stats.decode_rows == sum(n - 1 for n in lengths)
    assert continuous.stats.decode_rows == continuous.stats.decode_slots


def test_a_static_batch_fills_up_over_several_prefills_and_then_admits_nobody(
    tiny: Callable[[str], PreTrainedModel],
) -> None:
    engine = book_engine(
        tiny("qwen3"),
        kv_tokens=400,
        block_size=4,
        max_running=3,
        prefill_tokens=6,
        continuous=False,
    )
    for i, n in enumerate([5, 2, 9, 4, 4]):
        engine.add(str(i), [i] * 6, SamplingParams(max_tokens=n), [0])
    sizes = []
    while engine.busy:
        engine.step()
        sizes.append(len(engine.scheduler.running))
    # Three prefills, then the first batch runs down (5, 2 and 9 tokens); two prefills, then the
    # second.
    assert sizes == [1, 2, 3, 2, 2, 2, 1, 1, 1, 1, 0, 1, 2, 2, 2, 0]


def test_prompts_in_one_step_stay_within_the_budget_but_for_one_longer_than_it(
    tiny: Callable[[str], PreTrainedModel],
) -> None:
    engine = book_engine(tiny("qwen3"), kv_tokens=1000, block_size=4, prefill_tokens=20)
    for i, n in enumerate([8, 8, 8, 50, 3]):
        engine.add(str(i), [i] * n, SamplingParams(max_tokens=1), [0])
    computed = []
    while engine.busy:
        before = engine.stats.prefill_tokens
        engine.step()
        computed.append(engine.stats.prefill_tokens - before)
    assert computed == [16, 8, 50, 3]


def test_a_sequence_that_can_never_fit_is_refused_when_it_is_added(
    tiny: Callable[[str], PreTrainedModel],
) -> None:
    engine = book_engine(tiny("qwen3"), kv_tokens=16, block_size=4)
    with pytest.raises(
        ValueError,
        match=r"30 tokens needs \d+ blocks, but the KV cache has 5.*Raise engine.kv_tokens",
    ):
        engine.add("t", [2] * 10, SamplingParams(max_tokens=20), [0])
    assert not engine.busy
    engine.add("t", [2] * 10, SamplingParams(max_tokens=6), [0, 1])
    engine.run()
    assert_empty(engine)


@pytest.mark.parametrize(
    ("prompt", "tokens", "samples", "words"),
    [
        ([], 4, [0], "prompt is empty"),
        ([1], 0, [0], "max_tokens=0"),
        ([1], 4, [], "samples=\\[\\]"),
    ],
)
def test_nothing_to_do_is_refused(
    tiny: Callable[[str], PreTrainedModel],
    prompt: list[int],
    tokens: int,
    samples: list[int],
    words: str,
) -> None:
    with pytest.raises(ValueError, match=words):
        book_engine(tiny("qwen3"), kv_tokens=16).add(
            "t", prompt, SamplingParams(max_tokens=tokens), samples
        )


def test_chunked_long_prompt_does_not_delay_running_sequences(
    tiny: Callable[[str], PreTrainedModel],
) -> None:
    """With chunking a token a step for the running sequence, whatever else arrives; without it,
    none while the prompt is computed.
    """
    pieces: dict[bool, list[tuple[int, int]]] = {}
    for chunked in (False, True):
        engine = book_engine(
            tiny("qwen3"), kv_tokens=400, block_size=4, prefill_tokens=8, chunked_prefill=chunked
        )
        engine.add("runs", [1, 2], SamplingParams(max_tokens=12), [0])
        engine.step()
        engine.add("long", [3] * 30, SamplingParams(max_tokens=2), [0])
        pieces[chunked] = []
        while engine.busy:
            before, (running, *_) = engine.stats.prefill_tokens, engine.scheduler.running
            length = running.length
            engine.step()
            pieces[chunked].append((engine.stats.prefill_tokens - before, running.length - length))
    assert pieces[False][:2] == [(30, 0), (0, 1)]
    assert pieces[True][:5] == [(8, 1), (8, 1), (8, 1), (6, 1), (0, 1)]


def test_room_for_the_prompt_is_enough_where_sequences_may_be_preempted(
    tiny: Callable[[str], PreTrainedModel],
) -> None:
    """Eight sequences that may get long: reserving the worst case runs two at a time."""
    at_first = {}
    for preemption in ("none", "recompute"):
        engine = book_engine(tiny("qwen3"), kv_tokens=80, block_size=4, preemption=preemption)
        for i in range(8):
            engine.add(str(i), [i % VOCABULARY] * 4, SamplingParams(max_tokens=30), [0])
        engine.step()
        at_first[preemption] = len(engine.scheduler.running)
        engine.run()
        assert_empty(engine)
        assert (engine.stats.preemptions > 0) == (preemption != "none")
    assert at_first == {"none": 2, "recompute": 8}


def test_last_sequence_is_preempted_and_resumes_first(
    tiny: Callable[[str], PreTrainedModel],
) -> None:
    engine = book_engine(
        tiny("qwen3"), kv_tokens=36, block_size=4, preemption="recompute", prefix_cache="none"
    )
    for key in ("a", "b", "c"):
        engine.add(key, [ord(key) % VOCABULARY] * 8, SamplingParams(max_tokens=12), [0])
    finished, order = [], []
    while engine.busy:
        before = {s.request.key for s in engine.scheduler.running}
        finished += [s.request.key for s in engine.step()]
        order += sorted(
            before - {s.request.key for s in engine.scheduler.running} - set(finished), reverse=True
        )
    assert order[0] == "c" and "a" not in order
    assert finished == ["a", "b", "c"]
    assert engine.stats.preemptions == len(order) and engine.stats.recomputed_tokens > 8


def test_a_larger_priority_goes_first_and_keeps_its_blocks(
    tiny: Callable[[str], PreTrainedModel],
) -> None:
    engine = book_engine(tiny("qwen3"), kv_tokens=36, block_size=4, preemption="recompute")
    engine.add("low", [1] * 8, SamplingParams(max_tokens=20), [0, 1])
    engine.step()
    engine.add("later", [2] * 8, SamplingParams(max_tokens=2), [0])
    engine.add("high", [3] * 8, SamplingParams(max_tokens=20), [0], priority=1)
    order = [s.request.key for s in engine.run()]
    assert order.index("high") == 0 and order.index("later") > 0
    assert engine.stats.preemptions > 0
    assert_empty(engine)


@pytest.mark.parametrize(("kind", "again"), [("none", 20), ("hash", 4), ("radix", 1)])
def test_turns_of_a_conversation_are_not_computed_twice(
    tiny: Callable[[str], PreTrainedModel], kind: str, again: int
) -> None:
    """Turn 2: the 12 prompt tokens and 8 sampled ones of turn 1, the last of which was never
    cached, and 5 new. `again` of the 20 are computed.
    """
    engine = book_engine(tiny("qwen3"), kv_tokens=400, block_size=4, prefix_cache=kind)
    engine.add("turn 1", [2, 3, 4] * 4, SamplingParams(max_tokens=8), [0])
    (turn,) = engine.run()
    before = engine.stats.prefill_tokens
    engine.add("turn 2", [*turn.tokens, 5, 5, 5, 5, 5], SamplingParams(max_tokens=3), [0])
    drain(engine)
    assert engine.stats.prefill_tokens - before == again + 5


def test_prompts_with_a_common_beginning_compute_it_once_in_one_step_too(
    tiny: Callable[[str], PreTrainedModel],
) -> None:
    engine = book_engine(tiny("qwen3"), kv_tokens=2000, block_size=4)
    for i in range(6):
        engine.add(str(i), [2] * 40 + [i], SamplingParams(max_tokens=2), [0, 1])
    engine.run()
    assert engine.stats.prefill_tokens == 41 + 5
    assert engine.stats.hit_rate == pytest.approx(1 - 46 / (12 * 41))


def test_a_prompt_that_is_cached_to_its_end_computes_one_token(
    tiny: Callable[[str], PreTrainedModel],
) -> None:
    for length in (8, 10):  # ends with a block, or within one
        engine = book_engine(tiny("qwen3"), kv_tokens=200, block_size=4)
        for _ in range(3):
            before = engine.stats.prefill_tokens
            engine.add("t", [2, 3] * (length // 2), SamplingParams(max_tokens=6, seed=1), [0, 1])
            done = [s.tokens for s in drain(engine)]
            computed = engine.stats.prefill_tokens - before
        assert computed == 1 and len(done) == 2


def test_sixteen_samples_of_512_tokens_compute_and_hold_the_prompt_once(
    tiny: Callable[[str], PreTrainedModel],
) -> None:
    """Blocks: the prompt's, and those of 16 completions of 33 tokens, whose last token is never
    cached.
    """
    engine = book_engine(tiny("qwen3"), kv_tokens=20_000, block_size=16)
    engine.add("t", [2, 3] * 256, SamplingParams(max_tokens=33), list(range(16)))
    engine.run()
    assert engine.stats.prefill_tokens == 512
    assert engine.stats.reused_tokens == 15 * 512
    assert engine.stats.peak_blocks == 512 // 16 + 16 * 2


def test_a_small_cache_keeps_what_need_not_go(tiny: Callable[[str], PreTrainedModel]) -> None:
    """Three prompts of 10 blocks fill 30 of 40. The fourth needs 15, so half of the first goes."""
    engine = book_engine(tiny("qwen3"), kv_tokens=160, block_size=4, prefix_cache="radix")
    b, c = ([start, *range(2, 6)] * 8 for start in (6, 7))
    for number, prompt in enumerate([[1, 2, 3, 4] * 10, b, c, [8] * 60, b, c]):
        engine.add(str(number), prompt, SamplingParams(max_tokens=1), [0])
        while engine.busy:  # `run` would clear the cache
            engine.step()
    assert engine.stats.reused_tokens >= 2 * 36


def test_a_block_that_this_step_writes_is_shared_but_never_copied(
    tiny: Callable[[str], PreTrainedModel],
) -> None:
    """The second prompt parts from the first within a block of which nothing is in the cache yet:
    that block is computed again.
    """
    engine = book_engine(tiny("qwen3"), kv_tokens=200, block_size=4)
    engine.add("a", [1, 2, 3, 4, 5, 6, 0, 1, 2], SamplingParams(max_tokens=2), [0])
    engine.add("b", [1, 2, 3, 4, 5, 6, 6, 6, 6], SamplingParams(max_tokens=2), [0])
    engine.step()
    assert engine.stats.prefill_tokens == 9 + 5
    engine.add("c", [1, 2, 3, 4, 5, 6, 5, 5, 5], SamplingParams(max_tokens=2), [0])
    engine.run()
    assert engine.stats.prefill_tokens == 9 + 5 + 3  # a step later it can be copied


def test_block_being_restored_from_host_memory_is_not_copied(
    tiny: Callable[[str], PreTrainedModel],
) -> None:
    """A prompt that begins like one which comes back in the same step may share its full blocks,
    but not copy half of one: copies are made first.
    """
    engine = book_engine(tiny("qwen3"), kv_tokens=200, block_size=4, preemption="swap")
    engine.add("a", [1, 2, 3, 4, 5, 6, 1, 2, 3], SamplingParams(max_tokens=12, seed=1), [0])
    engine.step()
    work = ScheduledStep(0)
    engine.scheduler._make_room(work)
    engine.runner.host.take_out(work.taken_out, 99)
    engine.prefixes.clear()
    engine.runner.slots.clear()  # type: ignore[attr-defined]
    engine.add("b", [1, 2, 3, 4, 5, 6, 0, 0], SamplingParams(max_tokens=1), [0])
    engine.step()
    assert engine.stats.brought_back_bytes == 3 and engine.stats.recomputed_tokens == 0
    assert engine.stats.reused_tokens == 4  # b stands on the block that both share
    engine.run()
    assert_empty(engine)


def test_prompt_does_not_reuse_sampled_tokens_computed_after_it(
    tiny: Callable[[str], PreTrainedModel],
) -> None:
    engine = book_engine(tiny("qwen3"), kv_tokens=200, block_size=2, preemption="recompute")
    engine.add("a", [1, 2], SamplingParams(max_tokens=12, seed=1), [0])
    for _ in range(9):
        engine.step()
    (victim,) = engine.scheduler.running
    engine.scheduler._make_room(ScheduledStep(0))
    engine.prefixes.clear()
    engine.add("b", [*victim.tokens[:-1], 3], SamplingParams(max_tokens=2), [0])
    engine.step()  # both get on in it
    assert engine.stats.recomputed_tokens == 10 and engine.stats.prefill_tokens == 2 + 9
    engine.run()
    assert_empty(engine)


def test_an_aborted_request_gives_up_a_half_computed_prompt_and_samples_that_wait(
    tiny: Callable[[str], PreTrainedModel],
) -> None:
    for sizes in (dict(chunked_prefill=True, prefill_tokens=5), dict(max_running=1)):
        engine = book_engine(
            tiny("qwen3"), kv_tokens=200, block_size=4, prefix_cache="none", **sizes
        )
        request = engine.add("t", [2] * 11, SamplingParams(max_tokens=9), [0, 1, 2])
        engine.step()
        assert engine.scheduler.waiting[0].blocks
        begun = engine.abort(request)
        assert len(begun) == sizes.get("max_running", 0) and engine.stats.aborted == 3
        assert not engine.busy
        assert_empty(engine)


@pytest.mark.parametrize("preemption", ["none", "recompute"])
def test_samples_that_wait_give_up_their_prompt_for_a_larger_priority(
    tiny: Callable[[str], PreTrainedModel], preemption: str
) -> None:
    """Both fit the cache alone, but not one beside the other's prompt."""
    engine = book_engine(
        tiny("qwen3"), kv_tokens=40, block_size=4, max_running=1, preemption=preemption
    )
    engine.add("low", [2] * 15, SamplingParams(max_tokens=3), [0, 1])
    engine.step()
    engine.add("high", [3] * 30, SamplingParams(max_tokens=8), [0], priority=1)
    assert [s.request.key for s in engine.run()] == ["low", "high", "low"]
    assert_empty(engine)
