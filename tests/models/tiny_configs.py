"""Tiny configurations of all families whose parameters are counted from config.json."""

from __future__ import annotations

import copy
import json
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from sixfold.sizing.families import FAMILIES

_COMMON: dict[str, Any] = dict(
    vocab_size=50, hidden_size=48, intermediate_size=80, num_hidden_layers=3,
    num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0,
    bos_token_id=1, eos_token_id=2,
)  # fmt: skip
_GPT: dict[str, Any] = dict(vocab_size=50, n_embd=48, n_layer=3, n_head=6, n_positions=32)
_EXPERTS: dict[str, Any] = dict(
    num_experts=4, num_local_experts=4, n_routed_experts=4, num_experts_per_tok=2,
    moe_intermediate_size=20,
)  # fmt: skip
_SHARED = _EXPERTS | dict(n_shared_experts=1, first_k_dense_replace=1, n_group=2, topk_group=1)
_LATENT = _SHARED | dict(
    num_key_value_heads=6, q_lora_rank=16, kv_lora_rank=14, qk_nope_head_dim=8, qk_rope_head_dim=4,
    v_head_dim=10,
)  # fmt: skip
_STEPS = _EXPERTS | dict(shared_expert_intermediate_size=36, decoder_sparse_step=2)
_RANGE = dict(
    moe_num_experts=4, moe_k=2, moe_intermediate_size=20, moe_layer_start_index=1,
    moe_num_shared_experts=2,
)  # fmt: skip
_OWN: dict[str, dict[str, Any]] = {
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "dots1": _SHARED,
    "ernie4_5_moe": _RANGE,
    "flex_olmo": _EXPERTS,
    "gemma": dict(head_dim=10),
    "gemma2": dict(head_dim=10),
    "gemma3_text": dict(head_dim=10),
    "glm4_moe": _SHARED,
    "glm4_moe_lite": _LATENT,
    "gpt_oss": _EXPERTS,
    "granitemoe": _EXPERTS,
    "granitemoeshared": _EXPERTS | dict(shared_intermediate_size=28),
    "helium": dict(head_dim=8),
    "hunyuan_v1_dense": dict(head_dim=12),
    "minigpt": dict(num_key_value_heads=6),
    "minimax_m2": _EXPERTS,
    "mistral": dict(head_dim=10),
    "mixtral": _EXPERTS,
    "olmoe": _EXPERTS,
    "phimoe": _EXPERTS,
    "qwen2_moe": _STEPS,
    "qwen3_moe": _EXPERTS | dict(head_dim=12, decoder_sparse_step=2),
}
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("apertus", dict(attention_bias=True)),
    ("cohere", dict(use_qk_norm=True, attention_bias=True)),
    ("cwm", dict(mlp_bias=True, head_dim=8)),
    ("deepseek_v2", dict(q_lora_rank=None, n_shared_experts=2)),
    ("deepseek_v3", dict(q_lora_rank=None, attention_bias=True, first_k_dense_replace=0)),
    ("deepseek_v3", dict(attention_bias=True)),
    ("ernie4_5", dict(use_bias=True, head_dim=8, tie_word_embeddings=False)),
    ("ernie4_5_moe", dict(moe_layer_end_index=1, moe_layer_start_index=0)),
    ("glm", dict(attention_bias=False)),
    ("glm4_moe", dict(use_qk_norm=True, attention_bias=True)),
    ("gpt2", dict(n_inner=70)),
    ("gpt_bigcode", dict(multi_query=False)),
    ("gpt_neox", dict(attention_bias=False, tie_word_embeddings=True)),
    ("gpt_oss", dict(attention_bias=False)),
    ("granite", dict(attention_bias=True, mlp_bias=True)),
    ("jais2", dict(attention_bias=False, mlp_bias=False)),
    ("llama", dict(attention_bias=True, mlp_bias=True, head_dim=10)),
    ("llama", dict(tie_word_embeddings=True)),
    ("nanochat", dict(attention_bias=True)),
    ("olmo", dict(attention_bias=True)),
    ("olmo2", dict(attention_bias=True)),
    ("persimmon", dict(qk_layernorm=False)),
    ("phi", dict(qk_layernorm=True)),
    ("phimoe", dict(attention_bias=True, lm_head_bias=True)),
    ("qwen2", dict(tie_word_embeddings=True)),
    ("qwen2_moe", dict(qkv_bias=False, decoder_sparse_step=1, mlp_only_layers=[1])),
    ("qwen3", dict(head_dim=10, attention_bias=True)),
    ("qwen3_moe", dict(attention_bias=True, decoder_sparse_step=1, mlp_only_layers=[0, 2])),
    ("seed_oss", dict(attention_bias=False, attention_out_bias=True, mlp_bias=True)),
    ("smollm3", dict(attention_bias=True, mlp_bias=True)),
    ("starcoder2", dict(use_bias=False)),
]
"""Settings that change the number of parameters."""


def tiny_config(kind: str, **others: Any) -> PretrainedConfig:
    """Configuration of a tiny model of a family.

    Args:
        kind: model_type.
        others: settings that differ.
    """
    assert kind in FAMILIES
    common = _GPT if kind in ("gpt2", "gpt_bigcode") else _COMMON
    return AutoConfig.for_model(kind, **{**common, **_OWN.get(kind, {}), **others})


def saved(config: PretrainedConfig) -> dict[str, Any]:
    """What `save_pretrained` writes. It leaves some defaults out."""
    written: dict[str, Any] = json.loads(config.to_json_string(use_diff=True))
    return written


def empty_model(config: PretrainedConfig) -> PreTrainedModel:
    """The real module, without memory for its parameters."""
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(copy.deepcopy(config))
    return model
