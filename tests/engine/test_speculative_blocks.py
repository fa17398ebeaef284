"""The books of speculative decoding: guesses come and go, and every block is where it would be
without them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_scheduling import BookRunner, _add, _mixes, _watch, assert_empty
from tests.engine.drain import drain
from torch import Tensor
from transformers import PreTrainedModel

from sixfold.engine.adapters import LoadedAdapter
from sixfold.engine.draft import DraftProposer
from sixfold.engine.engine import Engine
from sixfold.engine.look_ahead import give_back, look_ahead
from sixfold.engine.ngram import NGramProposer
from sixfold.engine.sequence import Request, Sequence
from sixfold.engine.speculative import Speculator
from sixfold.model.causal_lm import CausalLM
from sixfold.types import SamplingParams

VOCABULARY = 7


class RowRunner(BookRunner):
    """The book runner, any number of tokens of a sequence at a time. It reads from the slots what
    each row would see.
    """

    def decode_rows(
        self,
        tables: list[list[int]],
        owner: np.ndarray,
        tokens: np.ndarray,
        positions: np.ndarray,
        adapters: list[LoadedAdapter | None] | None = None,
    ) -> Tensor:
        for i, token, at in zip(owner, tokens.tolist(), positions.tolist(), strict=True):
            self.slots[tables[i][at // self.size] * self.size + at % self.size] = token
        running = {id(s.blocks): s for s in self.engine.scheduler.running}
        written = [
            (running[id(tables[i])], tables[i][at // self.size])
            for i, at in zip(owner, positions.tolist(), strict=True)
        ]
        self.check_written(written)
        rows = []
        for i, at in zip(owner, positions.tolist(), strict=True):
            past = [
                self.slots[tables[i][j // self.size] * self.size + j % self.size]
                for j in range(at + 1)
            ]
            s = running[id(tables[i])]
            assert past[: s.length] == s.tokens, (
                "the cache holds another sequence's tokens, or a guess that did not stand"
            )
            rows.append(self.logits(past))
        return torch.stack(rows)

    def check_written(self, written: list[tuple[Sequence, int]]) -> None:
        """Nobody writes where another reads, guesses included; and nobody holds a block for
        nothing.
        """
        scheduler = self.engine.scheduler
        for s, block in written:
            assert not scheduler.blocks._cached[block]
            assert not any(block in other.blocks for other in scheduler.running if other is not s)
            assert not any(block in t.blocks for t in scheduler.waiting)
        held = {b for s in scheduler.running for b in s.blocks} | {
            b for t in scheduler.waiting for b in t.blocks
        }
        assert len(held) == scheduler.blocks.used


class DraftRunner(RowRunner):
    """A draft that is right more often than not."""

    @staticmethod
    def logits(tokens: list[int]) -> Tensor:
        return RowRunner.logits(tokens) + 0.7 * torch.randn(
            VOCABULARY, generator=torch.Generator().manual_seed(hash((*tokens, 1)) % 2**31)
        )


def book_engine(model: PreTrainedModel, k: int, proposer: str, **sizes: object) -> Engine:
    """k 0: without speculation."""
    engine = Engine(CausalLM(model), **sizes)  # type: ignore[arg-type]
    size = engine.scheduler.blocks.block_size
    runner = RowRunner(engine, size)
    engine.runner = runner  # type: ignore[assignment]
    if k:
        made = (
            NGramProposer(1, 3)
            if proposer == "n-gram"
            else DraftProposer(DraftRunner(engine, size))
        )  # type: ignore[arg-type]
        engine.speculator = Speculator(made, k, engine.scheduler, runner, engine.stats)  # type: ignore[arg-type]
    return engine


def sizes_of(mix: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in mix.items() if name != "requests"}


def second_turn(engine: Engine, first: list[Sequence]) -> list[Request]:
    """Prompts that continue some completions, and so stand on cached blocks, whatever was guessed
    in them. They are at most as long as the first requests.
    """
    return [
        engine.add(
            f"again {s.request.key}",
            [*s.tokens[:-1], 3],
            SamplingParams(max_tokens=s.request.limit - s.length + 1, seed=5),
            [0],
        )
        for s in first
        if s.finish_reason != "aborted" and s.sample == 0 and s.length < s.request.limit
    ]


PROPOSERS = st.sampled_from(["n-gram", "draft"])


@pytest.mark.slow
@given(
    _mixes(),
    PROPOSERS,
    st.integers(1, 5),
    st.lists(st.tuples(st.integers(0, 12), st.integers(0, 6), st.booleans()), max_size=4),
)
@settings(max_examples=60, deadline=None)
def test_no_block_is_lost_or_shared_whatever_is_guessed(
    tiny: Callable[[str], PreTrainedModel],
    mix: dict,
    proposer: str,
    k: int,
    stops: list[tuple[int, int, bool]],
) -> None:
    """stops: (before which step, which request, the whole of it or one sequence): given up by the
    caller.
    """
    engine = book_engine(tiny("qwen3"), k, proposer, **sizes_of(mix))
    asked = [_add(engine, i, request) for i, request in enumerate(mix["requests"])]
    seen: list[Sequence] = []
    step, turn = 0, 1
    while engine.busy:
        for _, i, whole in (stop for stop in stops if stop[0] == step):
            if whole:
                seen += engine.abort(asked[i % len(asked)])
            elif engine.scheduler.running:
                ended = engine.scheduler.running[i % len(engine.scheduler.running)]
                engine.end(ended, "stop")
                seen.append(ended)
            _watch(engine, mix)
        if engine.busy:
            seen += engine.step()
            _watch(engine, mix)
            assert all(
                len(s.blocks) <= engine.scheduler.blocks.blocks_for(s.length)
                for s in engine.scheduler.running
            )
        if not engine.busy and turn == 1:
            asked, turn = second_turn(engine, seen) or asked, 2
        step += 1
    assert all(
        s.length <= s.request.limit
        and len(s.logp) == len(s.version) == s.length - len(s.request.prompt)
        for s in seen
    )
    assert engine.stats.decoded_tokens == sum(len(s.logp) for s in seen)
    assert engine.stats.pass_tokens >= engine.stats.target_passes
    assert (
        0
        <= engine.stats.accepted_tokens
        <= engine.stats.proposed_tokens
        <= k * engine.stats.target_passes
    )
    assert_empty(engine)


@pytest.mark.slow
@given(_mixes(), PROPOSERS, st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_the_same_tokens_in_any_schedule(
    tiny: Callable[[str], PreTrainedModel], mix: dict, proposer: str, k: int
) -> None:
    """With n-grams those of no speculation; with a draft those of another k, and of room for every
    guess.
    """

    def run(order: range, k: int, **sizes: object) -> dict[tuple[str, int], list[int]]:
        engine = book_engine(tiny("qwen3"), k, proposer, **sizes)
        for i in order:
            _add(engine, i, mix["requests"][i])
        first = engine.run()
        second_turn(engine, sorted(first, key=lambda s: (s.request.key, s.sample)))
        return {(s.request.key, s.sample): s.tokens for s in [*first, *drain(engine)]}

    everyone = range(len(mix["requests"]))
    roomy = run(everyone, 0 if proposer == "n-gram" else 3, kv_tokens=2000, prefix_cache="none")
    assert run(everyone[::-1], k, **sizes_of(mix)) == roomy


def test_proposed_tokens_take_no_blocks_of_other_sequences(
    tiny: Callable[[str], PreTrainedModel],
) -> None:
    """A cache that is full to the last block: who runs goes on without guesses, and nobody is
    preempted for one.
    """
    engine = book_engine(
        tiny("qwen3"),
        4,
        "draft",
        kv_tokens=16,
        block_size=4,
        preemption="recompute",
        prefix_cache="none",
    )
    for key in ("a", "b"):
        engine.add(key, [2] * 5, SamplingParams(max_tokens=3), [0])
    engine.step()
    assert (len(engine.scheduler.running), engine.scheduler.blocks.free) == (2, 1)
    grown, ahead = (
        [s.length for s in engine.scheduler.running],
        look_ahead(engine.scheduler, engine.scheduler.running, [4, 4]),
    )
    assert grown == [6, 6] and ahead == [4, 2]  # two blocks hold 8; the free one goes to the first
    give_back(engine.scheduler, engine.scheduler.running)
    assert engine.scheduler.blocks.free == 1
    engine.run()
    assert engine.stats.preemptions == 0
    assert_empty(engine)


def test_an_ngram_proposer_finds_the_longest_ending_and_its_last_occurrence() -> None:
    def propose(
        prompt: list[int], completion: list[int], count: int = 3, shortest: int = 1
    ) -> list[int]:
        request = Request("t", prompt, SamplingParams(max_tokens=20), [0])
        (sequence,) = (Sequence(request, 0, np.zeros(20), prompt + completion[:1], [], 0.0),)
        proposer = NGramProposer(shortest, 3)
        for token in completion[1:]:
            proposer.propose([sequence], [count])  # as it grows
            sequence.tokens.append(token)
        grown = proposer.propose([sequence], [count]).tokens
        assert grown == NGramProposer(shortest, 3).propose([sequence], [count]).tokens  # as at once
        return grown[0]

    assert propose([1, 2, 3, 9, 9, 2, 3, 4, 5], [8, 2, 3]) == [
        4,
        5,
        8,
    ]  # the last occurrence of (2, 3)
    assert propose([1, 2, 3, 6, 6, 9, 2, 3, 4, 5], [1, 2, 3]) == [6, 6, 9]  # three tokens beat two
    assert propose([1, 2], [3, 4, 1, 2]) == [3, 4, 1]  # across the prompt's end
    assert propose([1], [2, 7, 2, 5, 2], count=2) == [5, 2]
    assert propose([1], [7, 7], count=4) == [7, 7, 7, 7]  # goes round where text and guess overlap
    assert propose([1], [4, 5, 4, 5], count=5) == [4, 5, 4, 5, 4]
    assert propose([1, 2, 3], [4]) == []
    assert propose([1, 2, 3], [1, 3], shortest=2) == []
    assert propose([1, 2, 3], [1, 2], count=0) == []


@given(st.lists(st.integers(0, 3), min_size=2, max_size=40), st.integers(1, 39))
def test_the_index_finds_what_a_scan_finds(text: list[int], prompt: int) -> None:
    prompt = min(prompt, len(text) - 1)
    request = Request("t", text[:prompt], SamplingParams(max_tokens=40), [0])
    sequence, proposer = (
        Sequence(request, 0, np.zeros(40), text[: prompt + 1], [], 0.0),
        NGramProposer(1, 3),
    )
    for length in range(prompt + 1, len(text) + 1):
        sequence.tokens[:] = text[:length]
        ends = (
            (n, at)
            for n in (3, 2, 1)
            for at in range(length - 1, n - 1, -1)
            if text[at - n : at] == text[length - n : length]
        )
        n, at = next(ends, (0, 0))
        period = text[at:length]
        assert proposer.propose([sequence], [4]).tokens == [(period * 4)[:4] if n else []]
