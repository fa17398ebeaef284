"""Attention sinks: one more score in each head's softmax, without a value."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from tests.conftest import make_tiny
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

from sixfold.engine.kv_cache import DecodeLayout, KVCache
from sixfold.errors import UserError
from sixfold.kernels.attention import AttentionLayer, causal_attention
from sixfold.kernels.cpu.engine_kernels import cpu_kernels, load_library
from sixfold.model import attention as attention_module
from sixfold.model.attention import NAME
from sixfold.model.base import Layout
from sixfold.model.causal_lm import CausalLM
from sixfold.model.fused_decoder import FusedDecoder
from sixfold.model.split_check import check_split
from sixfold.trainer.segments import Segment, plan_calls, plan_spans

CPU = torch.device("cpu")
Attend = Callable[[Tensor, Tensor, Tensor, AttentionLayer], Tensor]


def masked(q: Tensor, k: Tensor, v: Tensor, kernel: AttentionLayer) -> Tensor:
    at = torch.arange(q.shape[2])
    seen = at[:, None] >= at
    return kernel.attend(
        q, k, v, seen if kernel.window is None else seen & (at[:, None] - at < kernel.window)
    )


def planned(plan: Callable[[list[Segment], torch.device], Layout]) -> Attend:
    """The trainer's attention of a row that is one text: a prompt and its completion."""

    def attend(q: Tensor, k: Tensor, v: Tensor, kernel: AttentionLayer) -> Tensor:
        length = q.shape[2]
        layout = plan([Segment(0, length - 1), Segment(length - 1, length, 0, length - 1)], CPU)
        return layout.attend(q, k, v, kernel).transpose(1, 2)

    return attend


WAYS: dict[str, Attend] = {
    "mask": masked,
    "causal": causal_attention,
    "calls of the trainer on a CPU": planned(plan_calls),
    "spans of the trainer on a GPU": planned(plan_spans),
}


@pytest.mark.parametrize("attend", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("softcap", [None, 1e4])
def test_two_tokens_by_hand(attend: Attend, softcap: float | None) -> None:
    """Keys of weight 1 and 2, values 6 and 12, a sink of weight 3: the first token gets 1/4 of 6,
    the second 1/6 of 6 and 2/6 of 12.

    With s the sink, the outputs are 6 / (1 + e^s) and 30 / (3 + e^s); their derivatives at log 3
    are -18/16 and -90/36. A soft cap of 10,000 changes nothing; it takes another way.
    """
    q, k, v = (
        torch.tensor(x, dtype=torch.float64).view(1, 1, 2, 1)
        for x in ([0.0, 1.0], [0.0, math.log(2)], [6.0, 12.0])
    )
    sinks = torch.tensor([math.log(3)], dtype=torch.float64, requires_grad=True)
    out = attend(q, k, v, AttentionLayer(0, scale=1.0, softcap=softcap, sinks=sinks))
    torch.testing.assert_close(
        out.flatten(), torch.tensor([1.5, 5.0], dtype=torch.float64), rtol=0, atol=1e-6
    )
    (gradient,) = torch.autograd.grad(out.sum(), sinks)
    assert float(gradient) == pytest.approx(-18 / 16 - 90 / 36, abs=1e-6)


class Heads(torch.nn.Module):
    """Module with the attributes that transformers' function reads."""

    def __init__(self, sinks: Tensor, groups: int) -> None:
        super().__init__()
        self.sinks = torch.nn.Parameter(sinks.clone())
        self.num_key_value_groups = groups


@pytest.mark.parametrize("attend", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("window", [None, 1, 4])
def test_it_is_the_attention_of_transformers_with_its_gradients(
    attend: Attend, window: int | None
) -> None:
    made = torch.Generator().manual_seed(0)
    q, k, v, grad = (
        torch.randn(1, h, 13, 6, generator=made, dtype=torch.float64) for h in (4, 2, 2, 4)
    )
    module = Heads(torch.tensor([-2.0, 0.0, 1.5, 4.0], dtype=torch.float64), 2)
    at = torch.arange(13)
    hidden = (at > at[:, None]) | (at[:, None] - at >= (window or 99))
    mask = torch.zeros(13, 13, dtype=torch.float64).masked_fill(hidden, -torch.inf)[None, None]
    inputs = [x.requires_grad_() for x in (q, k, v)]
    theirs = eager_attention_forward(module, *inputs, mask, scaling=0.7)[0].transpose(1, 2)
    ours = attend(*inputs, AttentionLayer(0, scale=0.7, window=window, sinks=module.sinks))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-7)
    for mine, other in zip(
        *(torch.autograd.grad(out, [*inputs, module.sinks], grad) for out in (ours, theirs)),
        strict=True,
    ):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-6)


@pytest.mark.parametrize("attend", WAYS.values(), ids=WAYS)
def test_sinks_without_weight_and_with_all_of_it(attend: Attend) -> None:
    q, k, v = (
        torch.randn(1, h, 9, 8, generator=torch.Generator().manual_seed(h)) for h in (4, 2, 2)
    )
    none = attend(q, k, v, AttentionLayer(0))
    torch.testing.assert_close(
        attend(q, k, v, AttentionLayer(0, sinks=torch.full((4,), -200.0))), none, rtol=0, atol=1e-6
    )
    all_of_it = attend(q, k, v, AttentionLayer(0, sinks=torch.full((4,), 200.0)))
    assert bool(all_of_it.isfinite().all()) and float(all_of_it.abs().max()) < 1e-30


@pytest.mark.parametrize("compile_kernels", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_decode_has_sinks_of_any_dtype(
    compile_kernels: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The C kernel reads float32: what else comes is converted, and lives until it has
    been read.
    """
    if not compile_kernels:
        monkeypatch.setattr(KVCache, "kernels", lambda *_: None)
    made = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, h, 5, 16, generator=made) for h in (4, 2, 2))
    kernel = AttentionLayer(0, window=3, sinks=torch.tensor([-2.0, 0.5, 1.5, 3.0], dtype=dtype))
    at = torch.arange(5)
    layout = DecodeLayout(KVCache(2, 4), at, torch.tensor([[0, 1]]).expand(5, 2).contiguous(), at)
    ours = layout.attend(q, k, v, kernel).transpose(1, 2)
    torch.testing.assert_close(ours, masked(q, k, v, kernel), rtol=0, atol=1e-5)


def test_a_model_whose_sinks_are_dropped_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As ours were before, and as they would be under another name."""
    model = make_tiny("gpt_oss")
    model.set_attn_implementation(NAME)
    assert check_split(model).note == ""
    monkeypatch.setattr(
        attention_module,
        "AttentionLayer",
        lambda layer, scale, window, softcap, sinks: AttentionLayer(layer, scale, window, softcap),
    )
    with pytest.raises(UserError, match="GptOssForCausalLM is not supported: its logits differ"):
        check_split(model)


@pytest.mark.skipif(cpu_kernels() is None, reason="no C compiler: every module runs as it is")
def test_model_with_sinks_is_not_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The written-out body would keep the sinks of its probe, which are random numbers."""
    model = make_tiny("llama")
    model.set_attn_implementation(NAME)
    assert isinstance(CausalLM(model).body(load_library), FusedDecoder)
    for layer in model.model.layers:
        layer.self_attn.sinks = torch.nn.Parameter(torch.ones(4))
    monkeypatch.setattr(
        attention_module,
        "AttentionLayer",
        lambda layer, *rest: replace(
            AttentionLayer(layer, *rest), sinks=model.model.layers[layer].self_attn.sinks
        ),
    )
    assert not isinstance(CausalLM(model).body(load_library), FusedDecoder)


def test_a_cast_copy_of_a_model_keeps_its_sinks_in_float32(
    tiny: Callable[[str], PreTrainedModel],
) -> None:
    """They are added to scores, which are float32."""
    model = copy.deepcopy(tiny("gpt_oss"))
    lowered = CausalLM(model).lowered(torch.bfloat16)
    lowered.ready()
    found = {
        name: p.dtype
        for name, p in lowered.module.named_parameters()
        if "self_attn" in name and p.numel()
    }
    assert (
        found.pop("model.layers.0.self_attn.sinks")
        == found.pop("model.layers.1.self_attn.sinks")
        == torch.float32
    )
    assert set(found.values()) == {torch.bfloat16}
