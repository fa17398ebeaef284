"""Weights in autocast's dtype, made once: no parameter is cast in a forward, and no bit of a result
changes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.conftest import ARCHITECTURES, END, VOCABULARY, make_tiny
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

import sixfold.engine.model_runner
from sixfold.engine.engine import Engine
from sixfold.model.attention import NAME
from sixfold.model.causal_lm import CausalLM
from sixfold.types import SamplingParams

BF16 = torch.bfloat16
Drawn = dict[tuple[str, int], tuple[list[int], list[float]]]


class CastParameters(TorchDispatchMode):
    """Counts the numbers of parameters that are cast to another dtype."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.storages = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self.numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(args):
            if (
                isinstance(t, Tensor)
                and t.untyped_storage().data_ptr() in self.storages
                and isinstance(out, Tensor)
            ):
                self.numbers += (
                    t.numel() if (out.shape, out.dtype) == (t.shape, torch.bfloat16) else 0
                )
        return out


class AsItIs(CausalLM):
    """The module under autocast, which casts its weights in each forward: the oracle."""

    def lowered(self, dtype: torch.dtype, build: object = None) -> Any:
        return self


@pytest.fixture(autouse=True)
def without_the_fused_body(monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin is for GPUs, and for models and machines that the CPU kernels do not support."""
    monkeypatch.setattr(sixfold.engine.model_runner, "cpu_kernels", lambda: None)


def own(name: str) -> PreTrainedModel:
    model = make_tiny(name)
    model.set_attn_implementation(NAME)
    return model


def draw(engine: Engine, adapter: str | None = None) -> Drawn:
    for i, length in enumerate((3, 17, 40)):
        params = SamplingParams(max_tokens=8, temperature=0.9, stop_token_ids=(END,), seed=i)
        engine.add(
            str(i),
            [(5 * i + j) % VOCABULARY for j in range(length)],
            params,
            [0, 1],
            adapter=adapter,
        )
    return {(s.request.key, s.sample): (s.tokens, s.logp) for s in engine.run()}


@pytest.mark.mostly_slow(2)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_same_bits_as_by_casting_in_each_forward(
    name: str, tiny: Callable[[str], PreTrainedModel]
) -> None:
    model = tiny(name)
    ours, theirs = (
        Engine(kind(model), kv_tokens=800, autocast=BF16) for kind in (CausalLM, AsItIs)
    )
    assert draw(ours) == draw(theirs)
    assert all(p.dtype == torch.float32 for p in model.parameters()), (
        "the trainer's weights stay as they are"
    )


@pytest.mark.mostly_slow(2)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_decode_step_casts_no_parameter(
    name: str, tiny: Callable[[str], PreTrainedModel]
) -> None:
    model = tiny(name)
    counts = []
    for kind in (CausalLM, AsItIs):
        engine = Engine(kind(model), kv_tokens=800, autocast=BF16)
        engine.add("t", [3, 4, 5], SamplingParams(max_tokens=6), [0, 1])
        engine.step()
        engine.step()
        with CastParameters(model) as casts:
            engine.step()
        counts.append(casts.numbers)
    assert counts[0] == 0
    head = model.get_output_embeddings().weight.numel()
    assert counts[1] > 3 * head, "what this test would see: the oracle casts"


@pytest.mark.mostly_slow(2)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_process_that_only_samples_keeps_matrices_in_the_lower_dtype_alone(
    name: str, tiny: Callable[[str], PreTrainedModel]
) -> None:
    """Also with new weights, which arrive in float32."""
    model = own(name)
    model.load_state_dict(tiny(name).state_dict())
    body = CausalLM(model)
    body.keep_only(BF16)
    tables = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    small = {id(p) for p in model.parameters() if p.dtype == BF16}
    linears = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Linear)}
    assert linears - tables <= small and not small & tables
    engine, new = Engine(body, kv_tokens=800, autocast=BF16), own(name)
    assert draw(engine) == draw(Engine(AsItIs(tiny(name)), kv_tokens=800, autocast=BF16))
    with torch.no_grad():
        for p in new.parameters():
            p.mul_(1.5)
    engine.load_weights(new.state_dict(), 1)
    assert draw(engine) == draw(Engine(AsItIs(new), kv_tokens=800, autocast=BF16))


@pytest.mark.slow
def test_new_weights_are_detected_for_every_writer(tiny: Callable[[str], PreTrainedModel]) -> None:
    model = own("qwen3")
    engine = Engine(CausalLM(model), kv_tokens=800, autocast=BF16)

    def as_the_module() -> Drawn:
        drawn = draw(engine)
        assert drawn == draw(Engine(AsItIs(model), kv_tokens=800, autocast=BF16))
        return drawn

    first = as_the_module()
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(1.5)  # counted by PyTorch
    second = as_the_module()
    model.lm_head.weight.data.mul_(0.5)  # not counted: seen at the next run
    third = as_the_module()
    engine.load_weights({name: p * 1.1 for name, p in model.state_dict().items()}, 1)
    fourth = as_the_module()
    model.model.layers[1].self_attn = copy.deepcopy(
        model.model.layers[0].self_attn
    )  # a part exchanged
    fifth = as_the_module()
    model.model.norm.weight = torch.nn.Parameter(
        model.model.norm.weight * 2
    )  # a parameter exchanged
    sixth = as_the_module()
    drawn = [first, second, third, fourth, fifth, sixth]
    assert all(a != b for i, a in enumerate(drawn) for b in drawn[:i])


def test_a_hook_is_called(tiny: Callable[[str], PreTrainedModel]) -> None:
    model = own("qwen3")
    engine = Engine(CausalLM(model), kv_tokens=800, autocast=BF16)
    draw(engine)
    seen: list[int] = []
    handle = model.model.norm.register_forward_hook(lambda *_: seen.append(1))
    draw(engine)
    assert seen
    handle.remove()
    before = len(seen)
    draw(engine)
    assert len(seen) == before


def test_tied_weights_are_looked_up_in_float32_and_multiplied_in_bfloat16() -> None:
    model = own("gemma")
    lowered = CausalLM(model).lowered(BF16)
    lowered.ready()
    twin: Any = lowered.module
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert twin.model.embed_tokens.weight is model.model.embed_tokens.weight
    assert twin.lm_head.weight.dtype == BF16 and torch.equal(
        twin.lm_head.weight, model.lm_head.weight.to(BF16)
    )
    assert twin.model.norm.weight is model.model.norm.weight


def copies(lowered: Any, model: PreTrainedModel) -> dict[int, Tensor]:
    theirs = {id(p) for p in model.parameters()}
    return {id(p): p for p in lowered.module.parameters() if id(p) not in theirs}


def test_the_copies_cost_two_bytes_a_number_and_go_when_memory_is_released() -> None:
    model = own("llama")
    lm = CausalLM(model)
    engine = Engine(lm, kv_tokens=800, autocast=BF16)
    drawn = draw(engine)
    made = copies(lm.lowered(BF16), model)
    matrices = sum(
        p.numel() for n, p in model.named_parameters() if p.dim() > 1 and "embed" not in n
    )
    assert sum(p.nbytes for p in made.values()) == 2 * matrices
    engine.release_memory()
    assert sum(p.nbytes for p in made.values()) == 0
    assert draw(engine) == drawn


def test_renewed_copies_stay_where_they_are() -> None:
    """CUDA graphs hold on to their addresses."""
    model = own("qwen3")
    lm = CausalLM(model)
    engine = Engine(lm, kv_tokens=800, autocast=BF16)
    draw(engine)
    before = [p.data_ptr() for p in copies(lm.lowered(BF16), model).values()]
    engine.load_weights({name: p * 1.1 for name, p in model.state_dict().items()}, 1)
    draw(engine)
    assert [p.data_ptr() for p in copies(lm.lowered(BF16), model).values()] == before


def test_an_adapter_is_cast_once_too() -> None:
    model = own("qwen3")
    out, width = model.model.layers[0].mlp.up_proj.weight.shape

    class Added:
        def __init__(self) -> None:
            generator = torch.Generator().manual_seed(0)
            down, up = (
                torch.randn(4, width, generator=generator),
                torch.randn(out, 4, generator=generator),
            )
            self.layers = {"model.layers.0.mlp.up_proj": (down * 0.1, up * 0.2)}

    drawn = []
    for kind in (CausalLM, AsItIs):
        engine = Engine(kind(model), kv_tokens=800, autocast=BF16)
        engine.load_adapter("a", Added())
        drawn.append(draw(engine, adapter="a"))
        (loaded,) = engine.adapters._loaded.values()
        assert {t.dtype for pair in loaded.layers.values() for t in pair} == {BF16}
    assert drawn[0] == drawn[1] != draw(Engine(CausalLM(model), kv_tokens=800, autocast=BF16))
