"""Decode forwards as CUDA graphs, with `tape.py` standing for the capture: replays draw what eager
steps draw, from what is in the buffers by then; graphs are few, and go when what they stand on
goes. On a GPU the last test runs real ones."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tape import Launched, Tape, TapeCapture
from tests.conftest import END, VOCABULARY, make_tiny
from torch import Tensor
from transformers import PreTrainedModel

from sixfold.engine import cuda_graphs, model_runner
from sixfold.engine.cuda_graphs import rounded_up
from sixfold.engine.engine import Engine
from sixfold.engine.speculative import Speculation
from sixfold.kernels.cpu.engine_kernels import cpu_kernels
from sixfold.model.attention import NAME
from sixfold.model.causal_lm import CausalLM
from sixfold.types import SamplingParams

PROMPTS = [
    [(5 * i + 3 * j + 2) % VOCABULARY for j in range(n)]
    for i, n in enumerate((1, 7, 16, 17, 33, 70))
]
Drawn = dict[tuple[str, int], tuple[list[int], list[float]]]


@pytest.fixture(autouse=True)
def taped(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The written-out body reads the largest position on the host, so here every module runs as it
    is, as on a GPU.
    """
    monkeypatch.setattr(cuda_graphs, "CUDACapture", TapeCapture)
    monkeypatch.setenv("SIXFOLD_KERNELS", "torch")
    cpu_kernels.cache_clear()
    yield
    monkeypatch.undo()
    cpu_kernels.cache_clear()


@pytest.fixture
def own() -> PreTrainedModel:
    """A model to be changed."""
    made = make_tiny("qwen3")
    made.set_attn_implementation(NAME)
    return made


def make_engine(model: PreTrainedModel, graphs: bool | None = True, **settings: Any) -> Engine:
    return Engine(
        CausalLM(model), **{"kv_tokens": 4000, "block_size": 8, "cuda_graphs": graphs, **settings}
    )


def draw(engine: Engine, samples: int = 3, adapter: Any = None) -> Drawn:
    """The longest prompts end first, so that the batch loses rows and columns."""
    for i, prompt in enumerate(PROMPTS):
        params = SamplingParams(
            max_tokens=4 * (len(PROMPTS) - i),
            temperature=0.8 if i % 2 else 1.0,
            stop_token_ids=(END,),
            seed=4,
        )
        engine.add(
            str(i), prompt, params, list(range(samples)), adapter=adapter if i == 2 else None
        )
    return {(s.request.key, s.sample): (s.tokens, s.logp) for s in engine.run()}


def tapes(engine: Engine) -> list[Tape]:
    graphs = engine.runner._graphs
    assert graphs is not None
    return [graph for _, graph, _ in graphs._graphs.values()]  # type: ignore[misc]


SCHEDULES: list[dict[str, Any]] = [
    dict(),
    dict(block_size=5, max_running=7, kv_dtype="int8"),
    dict(chunked_prefill=True, prefill_tokens=23, max_running=17, continuous=False),
    dict(preemption="recompute", kv_tokens=230, block_size=4, prefix_cache="hash"),
    dict(preemption="swap", kv_tokens=230, block_size=1),
    dict(speculation=Speculation(k=3, shortest=1)),
]


@pytest.mark.mostly_nightly(6)
@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", "gemma2", "gpt2"])
@pytest.mark.parametrize("settings", SCHEDULES, ids=str)
def test_replays_draw_the_same_bits(
    name: str, settings: dict[str, Any], tiny: Callable[[str], PreTrainedModel]
) -> None:
    """In batches that lose rows and columns as they go."""
    engine = make_engine(tiny(name), **settings)
    assert draw(engine, samples=8) == draw(
        make_engine(tiny(name), graphs=False, **settings), samples=8
    )
    stats = engine.stats
    assert stats.eager_decodes == 0 and stats.graph_replays > 2 * stats.graph_captures > 0
    assert (
        sum(tape.replays for tape in tapes(engine)) == stats.graph_replays
        and len(tapes(engine)) == stats.graph_captures
    )


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_replays_of_the_gpu_kernels_draw_the_same_bits(
    kv_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shared prefixes and all. The scratch block holds NaN before each replay, which no row of a
    sequence may come to see.
    """
    pytest.importorskip("triton")
    from sixfold.engine import quantised_cache
    from sixfold.kernels.triton import attention as triton_kernels

    for module in (model_runner, quantised_cache):
        monkeypatch.setattr(module, "triton_serves", lambda device: True)
    for kernel in ("_attend", "_merge", "_write_int8"):
        monkeypatch.setattr(triton_kernels, kernel, Launched(vars(triton_kernels)[kernel]))
    model = make_tiny("qwen3", num_hidden_layers=1)
    model.set_attn_implementation(NAME)
    engines = [make_engine(model, graphs, kv_dtype=kv_dtype) for graphs in (True, False)]

    def over_rubbish(tape: Tape, replay: Callable[[Tape], None] = Tape.replay) -> None:
        for side in engines[0].runner.cache.tensors():
            side[:, -1].fill_(float("nan") if side.is_floating_point() else 113)
        replay(tape)

    monkeypatch.setattr(Tape, "replay", over_rubbish)
    drawn: list[Drawn] = []
    for engine in engines:
        for i, prompt in enumerate(([3] * 9, [3] * 8 + [4] * 9)):
            engine.add(
                str(i),
                prompt,
                SamplingParams(max_tokens=3 + i, temperature=0.8, stop_token_ids=(END,), seed=5),
                [0, 1],
            )
        drawn.append({(s.request.key, s.sample): (s.tokens, s.logp) for s in engine.run()})
    assert drawn[0] == drawn[1]
    graphs, stats = engines[0].runner._graphs, engines[0].stats
    assert graphs is not None and stats.graph_replays >= 3 and stats.eager_decodes == 0
    assert {key[4] for key in graphs._graphs} == {
        (2, 8)
    }  # 16 rows: the prefix of all four, and an empty line


def test_a_replay_writes_to_its_rows_and_to_scratch(
    tiny: Callable[[str], PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three sequences in a graph of 16 rows: at each step three slots of the cache change, besides
    the scratch block.
    """
    engine = make_engine(tiny("qwen3"), block_size=4)
    changed: list[int] = []

    def watch(tape: Tape, replay: Callable[[Tape], None] = Tape.replay) -> None:
        before = [side[:, :-1].clone() for side in engine.runner.cache.tensors()]
        replay(tape)
        for side, old in zip(engine.runner.cache.tensors(), before, strict=True):
            changed.append(int((side[:, :-1] != old).any(-1).any(0).sum()))

    monkeypatch.setattr(Tape, "replay", watch)
    engine.add("a", [3, 4, 5], SamplingParams(max_tokens=9), [0, 1, 2])
    engine.run()
    assert changed == [3] * (8 * 4)


@given(st.integers(1, 700), st.integers(1, 5000))
def test_number_of_graph_shapes_is_small(rows: int, columns: int) -> None:
    more = rounded_up(rows, columns)
    assert rounded_up(*more) == more and more[0] >= rows and more[1] >= columns
    if rows > cuda_graphs.MOST_ROWS:
        assert more == (rows, columns)
    else:
        assert more[0] in {16, *range(32, cuda_graphs.MOST_ROWS + 1, 32)} and more[0] < max(
            17, rows + 32
        )
        assert more[1] & (more[1] - 1) == 0 and more[1] < 2 * columns


@pytest.mark.slow
def test_graphs_are_reused_and_bounded(
    tiny: Callable[[str], PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same load once more captures nothing. With room for two, two are kept, those used last,
    and the same tokens come out.
    """
    engine = make_engine(tiny("qwen3"))
    drawn, captures = draw(engine, samples=8), engine.stats.graph_captures
    assert captures >= 4
    assert draw(engine, samples=8) == drawn and engine.stats.graph_captures == captures
    monkeypatch.setattr(cuda_graphs, "MOST_GRAPHS", 2)
    small = make_engine(tiny("qwen3"))
    assert draw(small, samples=8) == drawn
    assert small.stats.graph_captures >= captures and len(tapes(small)) == 2


def test_the_graph_used_least_recently_goes(
    tiny: Callable[[str], PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_graphs, "MOST_GRAPHS", 2)
    engine = make_engine(tiny("qwen3"))
    lengths = {"short": 3, "middle": 20, "long": 40}

    def one(which: str) -> int:
        before = engine.stats.graph_captures
        engine.add(which, [5] * lengths[which], SamplingParams(max_tokens=2), [0])
        engine.run()
        return engine.stats.graph_captures - before

    assert [one(which) for which in ("short", "middle", "short", "long", "short", "middle")] == [
        1,
        1,
        0,
        1,
        0,
        1,
    ]


def assert_as_eager(engine: Engine, model: PreTrainedModel, captures: int | None) -> None:
    """The engine draws the same tokens as one without graphs, from the current weights. captures:
    number of captures that this makes; None: any number above zero.
    """
    before, replays, eager = (
        engine.stats.graph_captures,
        engine.stats.graph_replays,
        engine.stats.eager_decodes,
    )
    assert draw(engine) == draw(make_engine(model, graphs=False))
    made = engine.stats.graph_captures - before
    assert made == captures if captures is not None else made > 0
    assert engine.stats.graph_replays > replays and engine.stats.eager_decodes == eager


@pytest.mark.slow
def test_new_weights_in_the_old_places_keep_the_graphs(own: PreTrainedModel) -> None:
    engine = make_engine(own)
    first = draw(engine)
    engine.load_weights({name: p * 1.5 for name, p in own.state_dict().items()}, 1)
    assert_as_eager(engine, own, captures=0)
    assert draw(engine) != first


def _elsewhere(model: PreTrainedModel) -> None:
    weight = model.model.layers[1].mlp.up_proj.weight
    weight.data = weight.data * 1.5


def _exchanged(model: PreTrainedModel) -> None:
    model.model.layers[0].mlp = copy.deepcopy(model.model.layers[1].mlp)


def _other_dtype(model: PreTrainedModel) -> None:
    model.bfloat16()


def _other_buffer(model: PreTrainedModel) -> None:
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq * 0.5


@pytest.mark.mostly_nightly(1)
@pytest.mark.slow
@pytest.mark.parametrize("change", [_elsewhere, _exchanged, _other_dtype, _other_buffer])
def test_moved_model_is_captured_again(
    change: Callable[[PreTrainedModel], None], own: PreTrainedModel
) -> None:
    engine = make_engine(own)
    first = draw(engine)
    old = tapes(engine)
    change(own)
    (
        engine.release_memory() if change is _other_dtype else None
    )  # the cache holds what it was made for
    assert_as_eager(engine, own, captures=None)
    assert draw(engine) != first and not set(map(id, old)) & set(map(id, tapes(engine)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "release", [Engine.release_memory, lambda engine: engine.runner.cache.clear()]
)
def test_moving_the_kv_cache_drops_the_graphs(
    release: Callable[[Engine], None], own: PreTrainedModel
) -> None:
    engine = make_engine(own)
    draw(engine)
    captures = engine.stats.graph_captures
    release(engine)
    assert (
        release is not Engine.release_memory or tapes(engine) == []
    )  # their memory is given back at once
    assert_as_eager(engine, own, captures=captures)


@pytest.mark.mostly_slow(1)
@pytest.mark.parametrize(
    "register", [torch.nn.Module.register_forward_hook, torch.nn.Module.register_forward_pre_hook]
)
def test_model_with_a_hook_runs_eagerly(register: Callable[..., Any], own: PreTrainedModel) -> None:
    engine = make_engine(own)

    def run() -> tuple[int, int, int]:
        engine.add("a", [3, 4, 5], SamplingParams(max_tokens=6), [0])
        engine.run()
        return engine.stats.graph_captures, engine.stats.graph_replays, engine.stats.eager_decodes

    assert run() == (1, 5, 0)
    seen: list[int] = []
    handle = register(own.model.norm, lambda *_: seen.append(1))
    assert run() == (1, 5, 5) and len(seen) == 6
    handle.remove()
    assert run() == (1, 10, 5) and len(seen) == 6


class Added:
    """An adapter on one layer."""

    def __init__(self, model: PreTrainedModel) -> None:
        out, width = model.model.layers[0].mlp.up_proj.weight.shape
        self.layers = {
            "model.layers.0.mlp.up_proj": (torch.ones(4, width) * 0.1, torch.ones(out, 4) * 0.2)
        }


@pytest.mark.slow
def test_a_batch_with_an_adapter_runs_eagerly(own: PreTrainedModel) -> None:
    engine, eager = make_engine(own), make_engine(own, graphs=False)
    for one in (engine, eager):
        one.load_adapter("a", Added(own))
    drawn = draw(engine, adapter="a")
    assert drawn == draw(eager, adapter="a") and drawn != draw(make_engine(own))
    assert engine.stats.eager_decodes > 0
    assert_as_eager(engine, own, captures=None)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_moe", "dynamic"])
def test_model_that_reads_tensors_on_the_host_runs_eagerly(
    name: str, tiny: Callable[[str], PreTrainedModel]
) -> None:
    """Experts whose tokens are looked up on the host, angles that depend on the longest
    position.
    """
    model = (
        tiny(name)
        if name == "qwen3_moe"
        else make_tiny("qwen3", rope_scaling=dict(rope_type="dynamic", factor=2.0))
    )
    model.set_attn_implementation(NAME)
    engine = make_engine(model)
    drawn = draw(engine)
    assert (
        engine.stats.graph_captures == engine.stats.graph_replays == 0 < engine.stats.eager_decodes
    )
    eager = draw(make_engine(model, graphs=False))
    assert {key: tokens for key, (tokens, _) in drawn.items()} == {
        key: tokens for key, (tokens, _) in eager.items()
    }


@pytest.mark.slow
def test_a_shape_beyond_the_largest_runs_eagerly(
    tiny: Callable[[str], PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_graphs, "MOST_ROWS", 16)
    engine = make_engine(tiny("qwen3"))
    assert draw(engine) == draw(
        make_engine(tiny("qwen3"), graphs=False)
    )  # 18 sequences, until some end
    assert engine.stats.eager_decodes > 0 and engine.stats.graph_replays > 0


def test_which_engines_use_cuda_graphs(
    tiny: Callable[[str], PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine on CUDA, unless they are switched off. Asked for elsewhere they are refused."""
    model = CausalLM(tiny("qwen3"))
    assert Engine(model, kv_tokens=64).runner._graphs is None
    monkeypatch.undo()
    with pytest.raises(ValueError, match="on cpu"):
        Engine(model, kv_tokens=64, cuda_graphs=True)
    built, made = model_runner.ModelRunner.__init__, []

    def on_cuda(runner: model_runner.ModelRunner, *args: Any, **settings: Any) -> None:
        built(runner, *args, **settings)
        runner.device = torch.device("cuda")

    monkeypatch.setattr(model_runner.ModelRunner, "__init__", on_cuda)
    monkeypatch.setattr(
        model_runner.ModelRunner,
        "use_graphs",
        lambda runner, stats, may_fail: made.append((stats, may_fail)),
    )
    Engine(model, kv_tokens=64, cuda_graphs=False)
    assert made == []
    for asked in (None, True):
        engine = Engine(model, kv_tokens=64, cuda_graphs=asked)
        assert made.pop() == (engine.stats, asked is None)


class Refusing(TapeCapture):
    """A capture that CUDA ends, from the second on."""

    def __call__(self, run: Callable[[], Tensor], beside: Tape | None) -> tuple[Tape, Tensor]:
        if self.tapes:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().__call__(run, beside)


@pytest.mark.slow
def test_failed_capture_turns_graphs_off_with_a_warning(
    tiny: Callable[[str], PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On by default must not end a run that would do without; asked for, the error is the
    user's.
    """
    monkeypatch.setattr(cuda_graphs, "CUDACapture", Refusing)
    engine = make_engine(tiny("qwen3"), graphs=None)
    engine.runner.use_graphs(engine.stats, may_fail=True)
    with pytest.warns(UserWarning, match=r"out of memory.*engine\.cuda_graphs = 'off'"):
        drawn = draw(engine)
    assert drawn == draw(make_engine(tiny("qwen3"), graphs=False))
    assert (
        engine.stats.graph_captures == 1 and engine.stats.eager_decodes > 0 and tapes(engine) == []
    )
    with pytest.raises(torch.OutOfMemoryError):
        draw(make_engine(tiny("qwen3")))


@pytest.mark.slow
def test_fake_graph_runs_no_python_and_detects_stale_inputs() -> None:
    class Runner:
        cache = type("Cache", (), {"tensors": lambda self: []})()
        model = type("Model", (), {"module": torch.nn.Linear(1, 1)})()
        step, outside = 1, torch.ones(3)

        def baked(self, inputs: list[Tensor]) -> Tensor:
            return inputs[0] * 2 + self.step

        def stale(self, inputs: list[Tensor]) -> Tensor:
            return inputs[0] + self.outside

    runner, static, capture = Runner(), torch.zeros(3), TapeCapture(torch.device("cpu"))
    graph, out = capture(partial(runner.baked, [static]), None)
    assert not bool((out < 1e9).any())  # a capture computes nothing
    runner.step = 100
    static.copy_(torch.tensor([1.0, 2.0, 3.0]))
    graph.replay()
    np.testing.assert_array_equal(out, [3, 5, 7])
    with pytest.raises(AssertionError, match="made before the capture"):
        capture(partial(runner.stale, [static]), graph)


@pytest.mark.skipif(
    not torch.cuda.is_available() or os.environ["TRITON_INTERPRET"] == "1",
    reason="no GPU, or Triton's interpreter: all above is the stand-in's word",
)
def test_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    model = make_tiny("qwen3").cuda()
    model.set_attn_implementation(NAME)
    engine = make_engine(model)
    drawn, eager = draw(engine, samples=8), draw(make_engine(model, graphs=False), samples=8)
    assert (
        engine.stats.graph_replays > engine.stats.graph_captures > 0 == engine.stats.eager_decodes
    )
    assert {key: tokens for key, (tokens, _) in drawn.items()} == {
        key: tokens for key, (tokens, _) in eager.items()
    }
    for key, (_, logp) in drawn.items():
        np.testing.assert_allclose(logp, eager[key][1], rtol=0, atol=1e-4)
