"""Ranks in tensor groups compute what one process computes."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from rank_cases import DIVIDED, assert_same_step, step, steps
from tests.rank_processes import on_ranks
from tiny import tiny_model
from transformers import PreTrainedModel

from sixfold.errors import UserError
from sixfold.ranks import ALONE
from sixfold.trainer.tensor_parallel import (
    FIRST,
    HEAD_NORMS,
    LAST,
    check_divisible,
    decoder_layers,
    layer_plan,
)

torch.set_num_threads(1)


@cache
def of_ranks() -> list[dict[str, dict[str, Any]]]:
    """All cases, by the ranks of one group of processes."""
    return on_ranks(4, steps, list(DIVIDED))


@pytest.mark.parametrize("name", DIVIDED)
def test_step_equals_that_of_one_process_on_every_rank(name: str) -> None:
    expected = step(ALONE, DIVIDED[name])
    for found in of_ranks():
        assert_same_step(found[name], expected)


@pytest.mark.parametrize("kind", ["qwen3", "mistral", "gemma2"])
def test_plan_is_that_of_transformers(kind: str) -> None:
    model = tiny_model(kind)
    given = {
        name.removeprefix("layers.*."): style
        for name, style in model.config.base_model_tp_plan.items()
    }
    plan = layer_plan(decoder_layers(model)[0])
    ours = {
        **{name: "colwise" for name in FIRST if name in plan},
        **{name: "rowwise" for name in LAST if name in plan},
        **{name: "replicated_with_grad_allreduce" for name in HEAD_NORMS if name in plan},
    }
    assert ours == given


def test_gpt2_and_experts_are_refused() -> None:
    for model, part in ((tiny_model("gpt2"), "q_proj"), (tiny_model("gpt_oss"), "mlp.gate_proj")):
        with pytest.raises(UserError, match=rf"parallel\.tensor = 2: .*{part}.*tensor = 1"):
            check_divisible(model, 2, 4)


def changed(part: str) -> PreTrainedModel:
    """A model with a part that a plan for Qwen would compute wrongly."""
    model = tiny_model()
    layer: Any = decoder_layers(model)[1]
    if part == "q_norm":  # over all heads, as in OLMo 2
        layer.self_attn.q_norm.weight = torch.nn.Parameter(torch.ones(32))
    elif part == "q_proj":  # queries and gates, as in Qwen 3 Next
        layer.self_attn.q_proj = torch.nn.Linear(16, 64)
    elif part == "sinks":
        layer.self_attn.sinks = torch.nn.Parameter(torch.ones(4))
    elif part == "adapter":
        layer.mlp.adapter = torch.nn.Linear(16, 16)
    return model


@pytest.mark.parametrize("part", ["q_norm", "q_proj", "sinks", "adapter"])
def test_layers_with_other_parts_are_refused(part: str) -> None:
    with pytest.raises(UserError, match=r"parallel\.tensor = 2: a layer has"):
        check_divisible(changed(part), 2, 4)


@pytest.mark.parametrize(
    ("tensor", "ranks", "sizes", "nearest"),
    [
        (4, 8, {"num_key_value_heads": 2}, 2),
        (5, 8, {"num_key_value_heads": 4}, 4),
        (3, 6, {"num_attention_heads": 8}, 2),
        (8, 8, {"num_attention_heads": 8, "num_key_value_heads": 8, "intermediate_size": 12}, 4),
        (2, 3, {}, 1),
    ],
)
def test_group_that_does_not_divide_is_refused_with_the_nearest(
    tensor: int, ranks: int, sizes: dict[str, int], nearest: int
) -> None:
    model = tiny_model(**sizes)
    heads = sizes.get("num_key_value_heads", 2)
    with pytest.raises(UserError) as raised:
        check_divisible(model, tensor, ranks)
    text = str(raised.value)
    assert f"parallel.tensor = {tensor}" in text and text.endswith(f"does is {nearest}")
    assert f"{ranks} ranks" in text and f"{heads} key-value heads" in text
    check_divisible(model, nearest, ranks)
