"""Parameters counted from config.json against transformers' own modules, made without memory."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models.public_sizes import PUBLIC
from tests.models.tiny_configs import VARIANTS, empty_model, saved, tiny_config
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from sixfold.errors import UserError
from sixfold.sizing.families import FAMILIES
from sixfold.sizing.model_size import model_size, read_size

QWEN_05B = dict(
    model_type="qwen2",
    vocab_size=151_936,
    hidden_size=896,
    intermediate_size=4_864,
    num_hidden_layers=24,
    num_attention_heads=14,
    num_key_value_heads=2,
    max_position_embeddings=32_768,
    tie_word_embeddings=True,
)

CASES: list[tuple[str, dict[str, Any]]] = [(kind, {}) for kind in FAMILIES] + VARIANTS
LAYERS = {"gpt2": "n_layer", "gpt_bigcode": "n_layer"}


def parameters(model: PreTrainedModel) -> int:
    return sum(p.numel() for p in model.parameters())


def named(kind: str, others: dict[str, Any]) -> str:
    return "-".join([kind, *others])


def test_there_are_thirty_families() -> None:
    assert len(FAMILIES) >= 30


@pytest.mark.mostly_slow(12)
@pytest.mark.parametrize(("kind", "others"), CASES, ids=[named(*case) for case in CASES])
def test_parameters_are_those_of_the_real_module(kind: str, others: dict[str, Any]) -> None:
    """Read from the file that transformers writes, which leaves defaults out."""
    config = tiny_config(kind, **others)
    model, size = empty_model(config), read_size(saved(config))
    assert size.parameters == parameters(model)
    assert (size.layers, size.hidden, size.vocabulary) == (3, 48, 50)
    assert size.tied == (
        model.get_output_embeddings().weight is model.get_input_embeddings().weight
    )
    if size.experts is None:
        assert size.linears is not None
        assert {(m.name, m.inputs, m.outputs): m.count for m in size.linears} == linears(model)
    else:
        assert size.experts.parameters == sum(
            p.numel()
            for name, p in model.named_parameters()
            if ".experts." in name and ".shared_experts." not in name
        )


def linears(model: PreTrainedModel) -> Counter[tuple[str, int, int]]:
    """(name, inputs, outputs) of the linear modules of the layers. gpt2 has its own class."""
    found = Counter[tuple[str, int, int]]()
    for path, module in model.base_model.named_modules():
        name = path.rpartition(".")[2]
        if isinstance(module, nn.Linear):
            found[name, module.in_features, module.out_features] += 1
        elif isinstance(module, Conv1D):
            found[name, module.nx, module.nf] += 1
    return found


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma3_text", "deepseek_v3", "gpt_oss"])
def test_the_count_is_linear_in_the_layers(kind: str) -> None:
    """So the tiny models stand for deep ones. Layers differ: 5 are not 3 and twice the last."""
    counts = []
    for layers in (4, 7):
        config = tiny_config(kind, **{LAYERS.get(kind, "num_hidden_layers"): layers})
        size = read_size(saved(config))
        assert size.parameters == parameters(empty_model(config))
        counts.append(size.parameters)
    middle = read_size(saved(config) | {LAYERS.get(kind, "num_hidden_layers"): 5}).parameters
    assert 3 * (middle - counts[0]) == counts[1] - counts[0]


@pytest.mark.parametrize("name", PUBLIC)
def test_public_models_have_their_published_parameters(name: str) -> None:
    """At full size, without the modules."""
    total, config = PUBLIC[name]
    assert read_size(config).parameters == total


CONFIGS = Path(__file__).parents[1] / "data" / "configs"
PUBLISHED = {
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-4b": 4_022_468_096,
    "llama-3-8b": 8_030_261_248,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_real_models_have_their_published_sizes(name: str) -> None:
    """Parameters and sizes of linear modules equal those of the model on the meta device."""
    given = json.loads((CONFIGS / name / "config.json").read_text())
    size = model_size(given)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**given))
    assert size is not None and size.linears is not None
    assert size.parameters == PUBLISHED[name] == sum(p.numel() for p in model.parameters())
    assert size.tied == (model.lm_head.weight is model.model.embed_tokens.weight)
    found = Counter(
        (path.rpartition(".")[2], module.in_features, module.out_features)
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not model.lm_head
    )
    assert found == {(m.name, m.inputs, m.outputs): m.count for m in size.linears}


def test_what_is_not_known_is_none() -> None:
    assert model_size({}) is None
    assert model_size({"model_type": "mamba", "hidden_size": 48}) is None
    assert model_size(None) is None
    for key in ("hidden_size", "vocab_size", "num_key_value_heads", "intermediate_size"):
        assert model_size({k: v for k, v in QWEN_05B.items() if k != key}) is None, key


def refusal(config: object) -> str:
    with pytest.raises(UserError) as error:
        read_size(config)
    message = str(error.value)
    assert "\n" not in message
    return message


def test_missing_sizes_are_named() -> None:
    told = refusal({"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2})
    assert "num_attention_heads, vocab_size, intermediate_size" in told
    assert "hidden_size" not in told and "num_hidden_layers" not in told
    assert "n_embd" in refusal({"model_type": "gpt2"})


@pytest.mark.parametrize("name", PUBLIC)
def test_every_size_of_a_public_model_is_needed_or_has_the_family_s_default(name: str) -> None:
    """Without a field, the file is refused, or the module does not need it either."""
    total, config = PUBLIC[name]
    for key in config.keys() - {"model_type"}:
        size = model_size({k: v for k, v in config.items() if k != key})
        if size is None or size.parameters == total:
            continue
        real = AutoConfig.for_model(**{k: v for k, v in config.items() if k != key})
        assert size.parameters == parameters(empty_model(real)), key


@pytest.mark.parametrize(
    "change",
    [
        dict(num_attention_heads=0), dict(hidden_size="896"), dict(vocab_size=-1),
        dict(intermediate_size=1.5), dict(num_hidden_layers=True),
    ],
)  # fmt: skip
def test_an_invalid_size_is_named(change: dict[str, Any]) -> None:
    (name,) = change
    assert name in refusal(QWEN_05B | change)


@pytest.mark.parametrize("layers", [3, "1", True, {"1": 1}])
def test_layers_without_experts_are_a_list(layers: Any) -> None:
    name = next(n for n, (_, config) in PUBLIC.items() if config["model_type"] == "qwen3_moe")
    assert "mlp_only_layers" in refusal(PUBLIC[name][1] | dict(mlp_only_layers=layers))


def test_parts_that_are_not_counted_are_refused() -> None:
    assert "do_layer_norm_before" in refusal(
        PUBLIC["opt-6.7b"][1] | dict(do_layer_norm_before=False)
    )
    assert "word_embed_proj_dim" in refusal(PUBLIC["opt-6.7b"][1] | dict(word_embed_proj_dim=512))
    assert "'mamba'" in refusal({"model_type": "mamba", "hidden_size": 48})
