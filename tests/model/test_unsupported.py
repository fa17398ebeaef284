"""A refusal says what is not supported, and where that was seen."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from tests.conftest import make_tiny
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from sixfold.errors import UserError
from sixfold.model import split_check
from sixfold.model.attention import NAME
from sixfold.model.split_check import check_split, error_in_model

KINDS = {
    **dict.fromkeys(
        ("axk2", "deepseek_v32", "dots3_note_text", "glm_moe_dsa", "hy_v4"), "indexed_attention"
    ),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "kimi_linear"), "linear_attention"),
    "deepseek_v4": "compressed_sparse_attention, heavily_compressed_attention",
}


@pytest.mark.mostly_slow(1)
@pytest.mark.parametrize("name", KINDS)
def test_layers_of_other_kinds_are_named(name: str) -> None:
    """Before anything runs: these models have no weights."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, num_hidden_layers=4))
    with pytest.raises(
        UserError, match=f"{type(model).__name__} is not supported: .*{KINDS[name]}.*'{name}'"
    ):
        check_split(model)


def test_compressed_keys_are_refused_although_short_texts_do_not_show_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A key of its own for 128 tokens, and the texts of the check have 13."""
    model = make_tiny(
        "deepseek_v4",
        sliding_window=8,
        moe_intermediate_size=32,
        n_routed_experts=4,
        num_experts_per_tok=2,
        q_lora_rank=16,
        num_key_value_heads=1,
    )
    model.set_attn_implementation(NAME)
    with pytest.raises(UserError, match="heavily_compressed_attention"):
        check_split(model)
    monkeypatch.setattr(split_check, "unknown_layer_kinds", lambda _: [])
    assert check_split(model).note == ""


class NeedsMask(nn.Module):
    """Attention that cuts the mask which other implementations are given."""

    def __init__(self, own: nn.Module) -> None:
        super().__init__()
        self.own = own
        self.mask: Tensor | None = None

    def forward(self, hidden_states: Tensor, **rest: object) -> Tensor:
        seen = self.mask[..., : hidden_states.shape[1]]  # type: ignore[index]
        return self.own(hidden_states + seen, **rest)


def test_an_error_of_the_models_code_says_what_and_where(
    tiny: Callable[[str], PreTrainedModel],
) -> None:
    model = copy.deepcopy(tiny("qwen3"))
    model.model.layers[1].self_attn = NeedsMask(model.model.layers[1].self_attn)
    with pytest.raises(UserError) as refused:
        check_split(model)
    told = str(refused.value)
    for part in (
        "Qwen3ForCausalLM is not supported",
        "'qwen3'",
        f"NeedsMask of {__name__}",
        "self.mask[...",
        "TypeError",
        "subscriptable",
    ):
        assert part in told, told


def test_an_error_inside_a_layer_of_pytorch_is_that_of_the_part_that_called_it() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)

    with pytest.raises(RuntimeError) as caught:
        Outer()(torch.zeros(1, 2))
    assert error_in_model(caught.value).startswith(
        f"Outer of {__name__} (line "
    ) and "self.inner(x)" in error_in_model(caught.value)
    assert error_in_model(KeyError()) == "KeyError"  # raised nowhere, and without a text
