"""A batch in columns draws what its sequences would one by one, and a step of one that stays the
same asks none of them anything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.conftest import END, VOCABULARY
from transformers import PreTrainedModel

from sixfold.engine.batch_state import NOISE_AHEAD, BatchState
from sixfold.engine.engine import Engine
from sixfold.engine.noise import uniforms
from sixfold.engine.sequence import Request, Sequence
from sixfold.model.causal_lm import CausalLM
from sixfold.types import SamplingParams


def make_sequence(
    name: str, prompt: int, limit: int, drawn: int = 0, stops: tuple[int, ...] = ()
) -> Sequence:
    params = SamplingParams(max_tokens=limit, stop_token_ids=stops, seed=3)
    noise = uniforms(3, name, 0, limit).tolist()
    sequence = Sequence(
        Request(name, [5] * prompt, params, [0]),
        0,
        noise,
        [5] * prompt + [6] * drawn,
        [],
        started=0.0,
    )
    sequence.logp, sequence.version = [-1.0] * drawn, [0] * drawn
    return sequence


rows = st.tuples(
    st.integers(1, 9),
    st.integers(1, 50),
    st.integers(0, 49),
    st.sets(st.integers(0, 5), max_size=2),
)


@pytest.mark.slow
@given(
    st.lists(
        rows.map(lambda row: (row[0], row[1], min(row[2], row[1] - 1), row[3])),
        min_size=1,
        max_size=6,
    ),
    st.data(),
)
@settings(max_examples=100, deadline=None)
def test_columns_equal_the_state_of_each_sequence(
    shapes: list[tuple[int, int, int, set[int]]], data: st.DataObject
) -> None:
    """From any place in its completion, to the first that ends; each position its own noise."""
    sequences = [
        make_sequence(str(i), *shape[:3], tuple(shape[3])) for i, shape in enumerate(shapes)
    ]
    expected = [([*s.tokens], [*s.logp], [*s.version]) for s in sequences]
    columns, ended = BatchState(sequences), []
    assert len(columns) == len(sequences) and columns.sequences == sequences
    step = 0
    while not ended:
        assert columns.newest.tolist() == [s.tokens[-1] for s in sequences]
        assert columns.lengths.tolist() == [s.length for s in sequences]
        for _ in range(1 + step % 2):  # asked again, as after an error, it is the same
            assert columns.noise().tolist() == [s.noise[len(s.logp)] for s in sequences]
        tokens = data.draw(
            st.lists(st.integers(0, 15), min_size=len(sequences), max_size=len(sequences))
        )
        ended = columns.advance(tokens, [-float(t) for t in tokens], [step] * len(tokens))
        for (own, logps, versions), token in zip(expected, tokens, strict=True):
            for column, value in ((own, token), (logps, -float(token)), (versions, step)):
                column.append(value)
        step += 1
        assert ended == [
            s
            for s, token in zip(sequences, tokens, strict=True)
            if token in s.stops or len(s.logp) == s.request.params.max_tokens
        ]
    assert [(s.tokens, s.logp, s.version) for s in sequences] == expected
    for s in sequences:
        reason = (
            "stop"
            if s.tokens[-1] in s.stops
            else "length"
            if len(s.logp) == s.request.params.max_tokens
            else None
        )
        assert (
            s.finish_reason == reason
            and (s in ended) == (reason is not None)
            and (s.seconds > 0) == (s in ended)
        )


def test_noise_is_gathered_for_many_tokens_at_a_time() -> None:
    class Watched(list[float]):
        reads = 0

        def __getitem__(self, at: object) -> object:
            Watched.reads += 1
            return super().__getitem__(at)  # type: ignore[index]

    sequence = make_sequence("a", 2, 40)
    sequence.noise = Watched(sequence.noise)
    columns = BatchState([sequence])
    for _ in range(2 * NOISE_AHEAD):
        columns.noise()
        columns.advance([9], [0.0], [0])
    assert Watched.reads == 3  # one at first, for batches that change with every step


@pytest.mark.mostly_slow(1)
@pytest.mark.parametrize(
    "sizes",
    [
        {},
        dict(block_size=4, max_running=5),
        dict(chunked_prefill=True, prefill_tokens=11),
        dict(continuous=False),
    ],
)
def test_keeping_columns_draws_what_making_them_anew_draws(
    sizes: dict[str, object], tiny: Callable[[str], PreTrainedModel]
) -> None:
    def draw(keep: bool) -> list[tuple[str, int, list[int], list[float], str | None]]:
        engine = Engine(CausalLM(tiny("qwen3")), **{"kv_tokens": 900, "block_size": 8, **sizes})  # type: ignore[arg-type]
        for i in range(5):
            params = SamplingParams(
                30 - 3 * i,
                temperature=0.5 * (i % 3),
                stop_token_ids=(END, 7),
                seed=i,
                top_k=5 * (i % 2),
            )
            engine.add(
                str(i), [(3 * i + j) % VOCABULARY for j in range(1 + 4 * i)], params, [0, 1, 2]
            )
        done: list[Sequence] = []
        while engine.busy:
            if not keep:
                engine._batch = BatchState([])
            done += engine.step()
        return sorted((s.request.key, s.sample, s.tokens, s.logp, s.finish_reason) for s in done)

    assert draw(keep=True) == draw(keep=False)


@pytest.mark.parametrize("many", [1, 40])
def test_step_of_an_unchanged_batch_reads_no_sequence(
    many: int, tiny: Callable[[str], PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no loop over sequences in the hot path: every so many steps they need a block, or
    noise, and in between nobody looks at them.
    """
    asked: Counter[str] = Counter()
    engine = Engine(CausalLM(tiny("qwen3")), kv_tokens=many * 96, block_size=32)
    engine.add("a", [2, 3, 4], SamplingParams(max_tokens=70), list(range(many)))
    for _ in range(4):
        engine.step()
    plain = Sequence.__getattribute__

    def watch(sequence: Sequence, name: str) -> object:
        asked[name] += 1
        return plain(sequence, name)

    monkeypatch.setattr(Sequence, "__getattribute__", watch)
    quiet = []
    for _ in range(50):
        asked.clear()
        engine.step()
        quiet.append(not asked)
    monkeypatch.undo()
    assert np.mean(quiet) > 0.85 and len(engine.scheduler.running) == many
