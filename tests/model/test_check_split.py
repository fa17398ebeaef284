"""Models that would be silently wrong are refused: the oracle is the model's own code."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from tests.conftest import ARCHITECTURES, make_tiny
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, Qwen3ForCausalLM

from sixfold.errors import UserError
from sixfold.model.attention import NAME
from sixfold.model.causal_lm import Segments, head_logits, hidden_states
from sixfold.model.split_check import Context, check_split


@pytest.mark.mostly_slow(5)
@pytest.mark.parametrize(
    "name", [*ARCHITECTURES, "gpt_oss", "mistral", "mixtral", "phi3", "olmo2", "cohere", "granite"]
)
def test_transformers_with_plain_heads_pass(name: str) -> None:
    """Among them soft caps (Gemma 2), scaled logits (Cohere, Granite), windows and experts."""
    model = make_tiny(name, **({"logits_scaling": 3.0} if name == "granite" else {}))
    model.set_attn_implementation(NAME)
    check_split(model)
    assert model.config._attn_implementation == NAME  # the check leaves our attention in place


class ScaledHead(Qwen3ForCausalLM):
    """A head with a twist after it that no setting tells of."""

    def forward(self, *args: object, **kwargs: object) -> object:
        output = super().forward(*args, **kwargs)
        output.logits = output.logits * 1.1
        return output


def test_a_head_with_a_twist_is_refused(tiny: Callable[[str], PreTrainedModel]) -> None:
    model = ScaledHead(copy.deepcopy(tiny("qwen3").config)).eval()
    model.load_state_dict(tiny("qwen3").state_dict())
    model.set_attn_implementation(NAME)
    with pytest.raises(
        UserError, match=r"ScaledHead is not supported: its logits differ .* plain output head"
    ):
        check_split(model)


@pytest.mark.mostly_slow(3)
@pytest.mark.parametrize("name", ["bloom", "gptj", "mamba", "qwen3_next", "lfm2"])
def test_unsupported_attention_is_refused(name: str) -> None:
    """ALiBi and other attention of their own; state carried along the row, across the border of two
    texts.
    """
    sizes = dict(vocab_size=61, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
    hybrid = dict(sizes, num_key_value_heads=2, head_dim=8, intermediate_size=32)
    experts = dict(
        hybrid,
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    )
    linear = dict(
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
    )
    configs: dict[str, dict[str, object]] = {
        "bloom": dict(vocab_size=61, hidden_size=32, n_layer=2, n_head=4),
        "gptj": dict(vocab_size=61, n_embd=32, n_layer=2, n_head=4, rotary_dim=4),
        "mamba": dict(vocab_size=61, hidden_size=32, num_hidden_layers=2),
        "qwen3_next": dict(experts, **linear),
        "lfm2": dict(hybrid, layer_types=["conv", "full_attention"]),
    }
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **configs[name])).eval()
    model.set_attn_implementation(NAME)
    with pytest.raises(UserError, match="is not supported: "):
        check_split(model)


def test_non_causal_model_is_refused(
    tiny: Callable[[str], PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As our attention would, had it lost its causal mask."""
    import torch.nn.functional as F

    from sixfold.model import causal_lm

    def unmasked(q: Tensor, k: Tensor, v: Tensor, kernel: object) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    monkeypatch.setattr(causal_lm, "causal_attention", unmasked)
    with pytest.raises(UserError, match="logits differ"):
        check_split(copy.deepcopy(tiny("qwen3")))


def test_weights_that_are_not_finite_are_refused(tiny: Callable[[str], PreTrainedModel]) -> None:
    model = copy.deepcopy(tiny("qwen3"))
    with torch.no_grad():
        next(model.parameters())[3, 0] = float("nan")
    with pytest.raises(UserError, match="by nan"):
        check_split(model)


def test_window_hidden_from_attention_limits_the_context() -> None:
    """phimoe of transformers builds a mask with the window and passes no window on."""
    config = dict(num_local_experts=2, num_experts_per_tok=1)
    model = make_tiny("phimoe", sliding_window=100, **config)
    model.set_attn_implementation(NAME)
    context = check_split(model)
    assert context.tokens == 100 and "window of 100 tokens" in context.note
    assert model.config.sliding_window == 100  # the probe's small window is gone
    within = make_tiny("phimoe", sliding_window=256, **config)
    within.set_attn_implementation(NAME)
    assert check_split(within) == Context(
        256
    )  # the window is as long as the context: it never matters
    short = make_tiny("phimoe", sliding_window=6, **config)
    short.set_attn_implementation(NAME)
    with pytest.raises(UserError, match="is not supported: "):
        check_split(short)


def test_large_windows_that_attention_is_told_of_leave_the_context_whole() -> None:
    model = make_tiny("mistral", sliding_window=100)
    model.set_attn_implementation(NAME)
    assert check_split(model) == Context(256)
    assert model.config.sliding_window == 100


def longrope(original: int) -> PreTrainedModel:
    """Phi-3 with other frequencies for texts of more than `original` tokens."""
    rope = dict(rope_type="longrope", rope_theta=1e4, short_factor=[1.0] * 8, long_factor=[4.0] * 8)
    rope["original_max_position_embeddings"] = original
    model = make_tiny("phi3", rope_parameters=rope, original_max_position_embeddings=original)
    model.set_attn_implementation(NAME)
    return model


def test_frequencies_that_change_with_the_longest_position_end_the_context() -> None:
    """Else a long text would change the short ones that are computed with it, and keys in the
    cache.
    """
    context = check_split(longrope(40))
    assert context.tokens == 40 and "more than 40 tokens" in context.note


def test_the_threshold_is_exact() -> None:
    """At the context's last position a short text has the bits that it has alone; one further it
    has not.
    """
    model, alone = longrope(40), torch.arange(5)

    def first_text(last: int) -> Tensor:
        positions = torch.cat([alone, torch.tensor([last])])
        layout = Segments(((0, 5), (5, 6)))
        with torch.no_grad():
            return head_logits(model, hidden_states(model, torch.arange(1, 7), positions, layout))[
                :5
            ]

    assert torch.equal(first_text(39), first_text(0))
    assert not torch.allclose(first_text(40), first_text(0), atol=1e-3)


def test_dynamic_frequencies_are_right_up_to_the_context() -> None:
    model = make_tiny(
        "llama", rope_parameters=dict(rope_type="dynamic", rope_theta=1e4, factor=2.0)
    )
    model.set_attn_implementation(NAME)
    assert check_split(model) == Context(256)


@pytest.mark.parametrize(
    "error", [RuntimeError, ValueError, KeyError, IndexError, AssertionError, NotImplementedError]
)
def test_any_error_of_a_model_is_a_user_error(
    tiny: Callable[[str], PreTrainedModel], monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    model = copy.deepcopy(tiny("qwen3"))

    def fail(*args: object, **kwargs: object) -> None:
        raise error("sizes differ")

    monkeypatch.setattr(model.model.layers[1], "forward", fail)
    with pytest.raises(
        UserError, match=r"Qwen3ForCausalLM is not supported: it cannot be run .*sizes differ"
    ):
        check_split(model)
