"""Parameters counted from config.json against transformers' own modules, made without memory."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from sixfold.recipe.model_size import model_size

COMMON: dict[str, Any] = dict(
    vocab_size=50,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
    max_position_embeddings=64,
)
MOE = dict(
    head_dim=12,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=20,
    decoder_sparse_step=2,
)
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

CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", dict(attention_bias=True, mlp_bias=True, head_dim=10)),
    ("llama", dict(tie_word_embeddings=True)),
    ("smollm3", dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)),
    ("mistral", dict(head_dim=10)),
    ("qwen2", {}),
    ("qwen2", dict(tie_word_embeddings=True)),
    ("qwen3", {}),
    ("qwen3", dict(head_dim=10, attention_bias=True)),
    ("qwen3_moe", MOE),
    ("qwen3_moe", MOE | dict(decoder_sparse_step=1, mlp_only_layers=[1])),
    ("phi3", dict(pad_token_id=0)),
    ("gemma", dict(head_dim=10)),
    ("gemma2", dict(head_dim=10)),
    ("gemma3_text", dict(head_dim=10)),
    ("gpt2", dict(n_embd=48, n_layer=3, n_head=6, n_positions=32)),
    ("gpt2", dict(n_embd=48, n_layer=3, n_head=6, n_positions=32, n_inner=70)),
]


def real_parameters(config: Any) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())


@pytest.mark.mostly_slow(11)
@pytest.mark.parametrize(("kind", "sizes"), CASES)
def test_parameters_are_those_of_the_real_module(
    kind: str, sizes: dict[str, Any], tmp_path: Path
) -> None:
    """Read from the file that transformers writes, which leaves defaults out."""
    config = AutoConfig.for_model(
        kind, **(dict(vocab_size=50) if kind == "gpt2" else COMMON), **sizes
    )
    config.save_pretrained(tmp_path)
    size = model_size(json.loads((tmp_path / "config.json").read_text()))
    assert size is not None and size.parameters == real_parameters(config)
    assert (size.layers, size.hidden, size.vocabulary) == (3, 48, 50)


def test_a_real_model_has_its_published_number_of_parameters() -> None:
    size = model_size(QWEN_05B)
    assert size is not None and size.parameters == 494_032_768 == real_parameters(
        AutoConfig.for_model(**QWEN_05B)
    )
    assert (size.queries, size.keys) == (896, 128)


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
    assert model_size({"model_type": "mamba", **COMMON}) is None
    for key in ("hidden_size", "vocab_size", "num_key_value_heads", "intermediate_size"):
        assert model_size({k: v for k, v in QWEN_05B.items() if k != key}) is None, key
    assert model_size(QWEN_05B | dict(num_attention_heads=0)) is None
    assert model_size(QWEN_05B | dict(hidden_size=None)) is None
