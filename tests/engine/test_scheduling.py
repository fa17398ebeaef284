"""Continuous batching by its books: a fake runner stands in for the model and plays the cache, so that every block is watched in every step."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import PreTrainedModel

from sixfold.engine.engine import Engine
from sixfold.engine.sequence import Request, Sequence
from sixfold.types import SamplingParams

VOCABULARY = 7
END = 1


class BookRunner:
    """Writes each token into the slot that the real runner would put its keys and values in, and reads a sequence's past back from the slots."""

    def __init__(self, engine: Engine, block_size: int) -> None:
        self.engine = engine
        self.size = block_size
        self.slots: dict[int, int] = {}
        self.cache = self

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        for source, target in pairs:
            for i in range(self.size):
                if source * self.size + i in self.slots:
                    self.slots[target * self.size + i] = self.slots[source * self.size + i]

    def prefill(self, requests: list[Request]) -> Tensor:
        for request in requests:
            for i, token in enumerate(request.prompt):
                self.slots[request.blocks[i // self.size] * self.size + i % self.size] = token
        return torch.stack([self.logits(r.prompt) for r in requests])

    def decode(self, sequences: list[Sequence], revision: int, members: int) -> Tensor:
        for s in sequences:
            i = s.length - 1
            self.slots[s.blocks[i // self.size] * self.size + i % self.size] = s.tokens[-1]
        rows = []
        for s in sequences:
            past = [self.slots[s.blocks[i // self.size] * self.size + i % self.size] for i in range(s.length)]
            assert past == s.tokens, "the cache holds another sequence's tokens"
            rows.append(self.logits(past))
        self.check(sequences)
        return torch.stack(rows)

    def check(self, sequences: list[Sequence]) -> None:
        """Nobody writes where another reads: the block of a sequence's newest token is its own."""
        newest = [s.blocks[(s.length - 1) // self.size] for s in sequences]
        for s, block in zip(sequences, newest, strict=True):
            assert sum(block in other.blocks for other in sequences) == 1
            assert len(s.blocks) == -(-s.length // self.size)
        assert len({b for s in sequences for b in s.blocks}) <= self.engine.scheduler.blocks.count - self.engine.scheduler.blocks.free

    @staticmethod
    def logits(tokens: list[int]) -> Tensor:
        """Any function of the whole past."""
        return torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(hash(tuple(tokens)) % 2**31))


def book_engine(model: PreTrainedModel, **sizes: int) -> Engine:
    engine = Engine(model, **sizes)  # type: ignore[arg-type]
    engine.runner = BookRunner(engine, engine.scheduler.blocks.block_size)  # type: ignore[assignment]
    return engine


def assert_empty(engine: Engine) -> None:
    scheduler = engine.scheduler
    assert scheduler.blocks.free == scheduler.blocks.count
    assert scheduler._reserved == 0
    assert not scheduler.waiting and not scheduler.running and not scheduler.copies


@st.composite
def _mixes(draw: st.DrawFn) -> dict[str, object]:
    size = draw(st.integers(1, 5))
    requests = draw(
        st.lists(
            st.tuples(st.integers(1, 11), st.integers(1, 8), st.integers(1, 4)),  # prompt, max_tokens, samples
            min_size=1,
            max_size=7,
        )
    )
    longest = max(p + m for p, m, _ in requests)
    return dict(
        block_size=size, requests=requests, kv_tokens=longest + draw(st.integers(0, 40)), max_running=draw(st.integers(1, 9)),
        prefill_tokens=draw(st.integers(1, 30)),
    )  # fmt: skip


@given(_mixes())
@settings(max_examples=80, deadline=None)
def test_any_mix_runs_through_and_leaves_nothing_behind(tiny: Callable[[str], PreTrainedModel], mix: dict) -> None:
    requests = mix.pop("requests")
    engine = book_engine(tiny("qwen3"), **mix)
    for i, (prompt, tokens, samples) in enumerate(requests):
        params = SamplingParams(max_tokens=tokens, stop_token_ids=(END,), seed=4)
        engine.add(str(i), [(i + j) % VOCABULARY for j in range(prompt)], params, list(range(samples)))
    finished = []
    while engine.busy:
        finished += engine.step()
        scheduler = engine.scheduler
        assert len(scheduler.running) <= mix["max_running"]
        assert scheduler.blocks.count - scheduler.blocks.free <= scheduler._reserved <= scheduler.blocks.count
    assert sorted((s.request.key, s.sample) for s in finished) == [(str(i), k) for i, (_, _, n) in enumerate(requests) for k in range(n)]
    for s in finished:
        prompt, tokens, _ = requests[int(s.request.key)]
        completion = s.tokens[prompt:]
        assert 1 <= len(completion) <= tokens and END not in completion[:-1]
        assert s.finish_reason == ("stop" if completion[-1] == END else "length")
        assert len(completion) == tokens or completion[-1] == END
    assert_empty(engine)
    assert engine.stats.prefill_tokens == sum(p for p, _, _ in requests)
    assert engine.stats.reused_tokens == sum(p * (n - 1) for p, _, n in requests)
    assert engine.stats.decoded_tokens == sum(len(s.logp) for s in finished)


@given(_mixes())
@settings(max_examples=40, deadline=None)
def test_a_sample_draws_the_same_tokens_in_any_schedule(tiny: Callable[[str], PreTrainedModel], mix: dict) -> None:
    requests = mix.pop("requests")

    def run(order: list[int], **sizes: int) -> dict[tuple[str, int], list[int]]:
        engine = book_engine(tiny("qwen3"), **sizes)
        for i in order:
            prompt, tokens, samples = requests[i]
            params = SamplingParams(max_tokens=tokens, stop_token_ids=(END,), seed=4)
            engine.add(str(i), [(i + j) % VOCABULARY for j in range(prompt)], params, list(range(samples)))
        return {(s.request.key, s.sample): s.tokens for s in engine.run()}

    roomy = run(list(range(len(requests))), kv_tokens=2000, block_size=16, max_running=64, prefill_tokens=1000)
    assert run(list(reversed(range(len(requests)))), **mix) == roomy


def test_a_prompt_is_computed_once_for_all_its_samples(tiny: Callable[[str], PreTrainedModel]) -> None:
    engine = book_engine(tiny("qwen3"), kv_tokens=1000, block_size=16, max_running=3)
    engine.add("t", [2] * 37, SamplingParams(max_tokens=3), list(range(8)))
    engine.run()
    assert engine.stats.prefill_tokens == 37
    assert engine.stats.reused_tokens == 7 * 37


@pytest.mark.parametrize(("prompt", "tokens"), [(37, 20), (32, 20), (48, 1), (5, 3), (16, 17), (15, 2)])
@pytest.mark.parametrize("samples", [1, 8])
def test_samples_hold_the_prompt_once(tiny: Callable[[str], PreTrainedModel], prompt: int, tokens: int, samples: int) -> None:
    """At the fullest moment: the prompt's full blocks once, and what each sample needs beyond them; its last token is never cached."""
    engine = book_engine(tiny("qwen3"), kv_tokens=4000, block_size=16)
    engine.add("t", [2] * prompt, SamplingParams(max_tokens=tokens), list(range(samples)))
    engine.run()
    full = prompt // 16
    own = max(-(-(prompt + tokens - 1) // 16), -(-prompt // 16)) - full
    assert engine.stats.peak_blocks == full + samples * own


def test_samples_take_turns_in_a_cache_that_holds_one_sequence(tiny: Callable[[str], PreTrainedModel]) -> None:
    engine = book_engine(tiny("qwen3"), kv_tokens=20, block_size=4, max_running=64)
    engine.add("t", [2] * 10, SamplingParams(max_tokens=10), [0, 1, 2])
    engine.add("u", [3] * 9, SamplingParams(max_tokens=11), [0])
    most = 0
    while engine.busy:
        engine.step()
        most = max(most, len(engine.scheduler.running))
    assert most == 1
    assert_empty(engine)


def test_the_default_room_lets_max_running_sequences_run_together(tiny: Callable[[str], PreTrainedModel]) -> None:
    """kv_tokens = max_running * longest is enough, whatever the prompts' last blocks look like."""
    engine = book_engine(tiny("qwen3"), kv_tokens=5 * 16, block_size=4, max_running=5)
    for i in range(5):
        engine.add(str(i), [i] * 7, SamplingParams(max_tokens=9), [0])
    engine.step()
    assert len(engine.scheduler.running) == 5


def test_a_finished_sequence_makes_room_at_once(tiny: Callable[[str], PreTrainedModel]) -> None:
    """Long-tailed lengths: static batches of 4 would take the sum of their longest."""
    lengths = [40, 1, 2, 3, 40, 2, 1, 3, 40, 3, 2, 1, 40, 1, 1, 1]
    engine = book_engine(tiny("qwen3"), kv_tokens=4 * 48, block_size=8, max_running=4)
    for i, n in enumerate(lengths):
        engine.add(str(i), [i % VOCABULARY] * 3, SamplingParams(max_tokens=n), [0])
    engine.run()
    static = sum(max(lengths[i : i + 4]) for i in range(0, len(lengths), 4))
    assert static == 160
    assert engine.stats.steps < 0.5 * static
    utilisation = engine.stats.decoded_tokens / (engine.stats.steps * 4)
    assert utilisation > 2 * sum(lengths) / (static * 4)


def test_prompts_in_one_step_stay_within_the_budget_but_for_one_longer_than_it(tiny: Callable[[str], PreTrainedModel]) -> None:
    engine = book_engine(tiny("qwen3"), kv_tokens=1000, block_size=4, prefill_tokens=20)
    for i, n in enumerate([8, 8, 8, 50, 3]):
        engine.add(str(i), [2] * n, SamplingParams(max_tokens=1), [0])
    computed = []
    while engine.busy:
        before = engine.stats.prefill_tokens
        engine.step()
        computed.append(engine.stats.prefill_tokens - before)
    assert computed == [16, 8, 50, 3]


def test_a_sequence_that_can_never_fit_is_refused_when_it_is_added(tiny: Callable[[str], PreTrainedModel]) -> None:
    engine = book_engine(tiny("qwen3"), kv_tokens=16, block_size=4)
    with pytest.raises(ValueError, match=r"30 tokens needs \d+ blocks, the KV cache has 5.*kv_tokens"):
        engine.add("t", [2] * 10, SamplingParams(max_tokens=20), [0])
    assert not engine.busy
    engine.add("t", [2] * 10, SamplingParams(max_tokens=6), [0, 1])
    engine.run()
    assert_empty(engine)


@pytest.mark.parametrize(
    ("prompt", "tokens", "samples", "words"),
    [([], 4, [0], "empty prompt"), ([1], 0, [0], "max_tokens=0"), ([1], 4, [], "samples=\\[\\]")],
)
def test_nothing_to_do_is_refused(tiny: Callable[[str], PreTrainedModel], prompt: list[int], tokens: int, samples: list[int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        book_engine(tiny("qwen3"), kv_tokens=16).add("t", prompt, SamplingParams(max_tokens=tokens), samples)
