"""The fused body on bfloat16 weights is nearer to float32 than autocast is, and the bits of a row
do not depend on other rows.
"""

from __future__ import annotations

import copy
import shutil
from typing import Any

import pytest
import torch
from tests.conftest import END, VOCABULARY
from tests.engine.test_same_seed_same_tokens import PROMPTS
from tests.model.test_fused_decoder import MORE, WRITTEN_OUT, prepared
from tests.model.test_lowered import AsItIs
from torch import Tensor
from transformers import PreTrainedModel

from sixfold.engine.engine import Engine
from sixfold.engine.speculative import Speculation
from sixfold.kernels.cpu.body_kernels import BodyKernels
from sixfold.kernels.cpu.engine_kernels import load_library
from sixfold.model.causal_lm import CausalLM
from sixfold.model.fused_decoder import FusedDecoder
from sixfold.rollout.kv_probe import exact_logp
from sixfold.types import SamplingParams

pytestmark = pytest.mark.skipif(
    not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="no C compiler"
)

BF16 = torch.bfloat16
TEXT = [(7 * i * i + 3 * i) % VOCABULARY for i in range(60)]
Drawn = dict[tuple[str, int], tuple[list[int], list[float]]]


def draw(model: PreTrainedModel, tasks: range, **sizes: Any) -> Drawn:
    engine = Engine(CausalLM(model), **{"kv_tokens": 4000, "autocast": BF16, **sizes})
    assert isinstance(engine.runner._body, FusedDecoder)
    return run(engine, tasks)


def run(engine: Engine, tasks: range = range(4), adapter: str | None = None) -> Drawn:
    for i in tasks:
        params = SamplingParams(max_tokens=16, temperature=0.8, stop_token_ids=(END,), seed=2)
        engine.add(f"task-{i}", PROMPTS[i], params, [0, 1], adapter=adapter)
    return {(s.request.key, s.sample): (s.tokens, s.logp) for s in engine.run()}


def assert_near(some: Drawn, others: Drawn, limit: float) -> None:
    """Check that most first tokens are equal, and that log-probs differ by less than `limit`."""
    gaps = []
    for (task, sample), (tokens, logp) in some.items():
        at = len(PROMPTS[int(task.removeprefix("task-"))])
        theirs = others[task, sample]
        if tokens[at] == theirs[0][at]:
            gaps.append(abs(logp[0] - theirs[1][0]))
    assert len(gaps) >= 0.75 * len(some)
    assert max(gaps) < limit


@pytest.mark.parametrize("name", sorted(WRITTEN_OUT | set(MORE)))
def test_log_probs_are_nearer_to_float32_than_under_autocast(name: str) -> None:
    model = prepared(name)
    exact = exact_logp(CausalLM(model), TEXT, None)
    ours, autocast = (exact_logp(kind(model), TEXT, BF16) for kind in (CausalLM, AsItIs))
    assert 0 < (ours - exact).abs().mean() < 0.01
    assert (ours - exact).abs().max() < 0.05
    assert (ours - exact).norm() < (autocast - exact).norm()


SIZES: list[dict[str, Any]] = [
    dict(max_running=1),
    dict(max_running=7, block_size=4, prefix_cache="hash"),
    dict(chunked_prefill=True, prefill_tokens=23, prefix_cache="none"),
    dict(preemption="recompute", kv_tokens=240, block_size=8),
    dict(speculation=Speculation(k=3)),
]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_same_seed_same_tokens(sizes: dict[str, Any]) -> None:
    model, tasks = prepared("qwen3"), range(9)
    assert draw(model, tasks, **sizes) == draw(model, tasks, max_running=20)


def test_one_call_gives_the_bits_of_single_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    model = prepared("qwen2")
    whole = draw(model, range(5))
    monkeypatch.setattr(FusedDecoder, "hidden", _written_out)
    assert draw(model, range(5)) == whole


def _written_out(self: Any, tokens: Tensor, positions: Tensor, layout: Any, _: object) -> Tensor:
    table = self._angles(int(positions.max()) + 1)
    return self._written_out(self._rows(tokens), positions, layout, table)


@pytest.mark.parametrize("threads", [1, 2])
def test_threads_change_no_bit(threads: int) -> None:
    """There are enough rows for each thread to compute its share through all layers."""
    model, before = prepared("llama"), torch.get_num_threads()
    body: Any = CausalLM(model).lowered(BF16, load_library)
    hidden = torch.randn(300, model.config.hidden_size)
    try:
        torch.set_num_threads(threads)
        drawn, logits = draw(model, range(12), max_running=200), body.ready().logits(hidden)
        torch.set_num_threads(1)
        assert draw(model, range(12), max_running=200) == drawn
        assert torch.equal(body.ready().logits(hidden[5:6])[0], logits[5])
    finally:
        torch.set_num_threads(before)


def test_packed_weights_follow_the_model_and_are_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = prepared("llama")
    engine = Engine(CausalLM(model), kv_tokens=4000, autocast=BF16)
    body = engine.runner._body
    assert isinstance(body, FusedDecoder)
    first = run(engine)
    packed = [linear.packed for linear in body._linears]
    assert all(p is not None and p.half for p in packed)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(1.5)
    second = run(engine)
    assert second != first
    assert second == draw(model, range(4))
    engine.release_memory()
    assert not any(linear.packed for linear in body._linears)
    assert run(engine) == second
    assert all(p.dtype == torch.float32 for p in model.parameters())


def test_a_hook_in_the_middle_of_a_run_is_called() -> None:
    """After the hook, the module continues with the cache that the kernels filled."""
    model = prepared("qwen3")
    engine = Engine(CausalLM(model), kv_tokens=4000, autocast=BF16)
    plain, seen = run(engine), list[int]()
    for i in range(4):
        params = SamplingParams(max_tokens=16, temperature=0.8, stop_token_ids=(END,), seed=2)
        engine.add(f"task-{i}", PROMPTS[i], params, [0, 1])
    engine.step()
    engine.step()
    handle = model.model.norm.register_forward_hook(lambda *_: seen.append(1))
    engine.run()
    assert seen
    handle.remove()
    assert run(engine) == plain


def test_an_adapter_is_added_to_float32_sums() -> None:
    model = prepared("qwen3")
    out, width = model.model.layers[0].mlp.up_proj.weight.shape
    made = torch.Generator().manual_seed(0)
    down, up = (torch.randn(*s, generator=made) * 0.1 for s in ((4, width), (out, 4)))

    class Added:
        def __init__(self) -> None:
            self.layers = {"model.layers.0.mlp.up_proj": (down, up)}

    engine = Engine(CausalLM(model), kv_tokens=4000, autocast=BF16)
    engine.load_adapter("a", Added())
    adapted, plain = run(engine, adapter="a"), run(engine)
    assert adapted != plain
    merged = copy.deepcopy(model)
    with torch.no_grad():
        merged.model.layers[0].mlp.up_proj.weight.add_(up @ down)
    theirs = Engine(CausalLM(merged), kv_tokens=4000, autocast=BF16)
    assert_near(run(theirs), adapted, 0.05)


@pytest.mark.parametrize("sizes", [dict(kv_dtype="int8"), dict(head_dim=8)], ids=str)
def test_attention_in_pytorch_gives_the_body_float32(sizes: dict[str, Any]) -> None:
    """PyTorch computes attention for an int8 cache and for unsupported head sizes."""
    extra = {name: sizes[name] for name in sizes if name == "head_dim"}
    model = prepared("qwen3", **extra)
    options = {} if extra else sizes
    drawn = draw(model, range(4), **options)
    exact = run(Engine(CausalLM(model), kv_tokens=4000, **options))
    assert_near(drawn, exact, 0.1)


def test_without_bfloat16_kernels_the_twin_runs() -> None:
    model = prepared("llama")
    assert not isinstance(CausalLM(model).lowered(BF16, None), FusedDecoder)
    assert not isinstance(CausalLM(model).lowered(torch.float16, load_library), FusedDecoder)
    gemma = prepared("gemma")  # its norm is 1 + weight
    assert not isinstance(CausalLM(gemma).lowered(BF16, load_library), FusedDecoder)


def test_no_product_reads_float32_weights() -> None:
    """All products of a forward pass read bfloat16 weights."""
    model = prepared("llama")
    body: Any = CausalLM(model).lowered(BF16, load_library)
    kernels: BodyKernels = body._kernels
    assert kernels.half_instructions in ("amx", "avx512_bf16", "float32")
    body.ready()
    for layer in body._layers:
        for linear in (layer.qkv, layer.output, layer.gate_up, layer.down):
            assert linear.pack(kernels).panels.dtype is BF16
    assert body._head.pack(kernels).panels.dtype is BF16
