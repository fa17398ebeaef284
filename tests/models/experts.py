"""Tiny models of all families of mixtures of experts, and samples from them."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from sixfold.engine.engine import Engine
from sixfold.engine.routes import RecordedModel
from sixfold.model.attention import NAME, register
from sixfold.model.causal_lm import CausalLM
from sixfold.model.experts import find_routers
from sixfold.model.scratch import character_tokenizer
from sixfold.renderer.renderer import Renderer
from sixfold.types import Group, Reward, SamplingParams, Task
from tests.rollouts import EngineRollout

VOCABULARY = 61
_SIZES: dict[str, Any] = dict(
    vocab_size=VOCABULARY, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=128,
    bos_token_id=2, eos_token_id=1, pad_token_id=0,
)  # fmt: skip
_NUMBERED = dict(num_experts=8, num_local_experts=8, num_experts_per_tok=2)
_SMALL = dict(moe_intermediate_size=16, shared_expert_intermediate_size=16)
_LATENT = dict(
    num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8,
    qk_rope_head_dim=4, v_head_dim=8,
)  # fmt: skip
_GROUPS = dict(
    _SMALL, n_routed_experts=8, num_local_experts=8, n_shared_experts=1, num_experts_per_tok=2,
    n_group=4, topk_group=2, first_k_dense_replace=1,
)  # fmt: skip

FAMILIES: dict[str, dict[str, Any]] = {
    "afmoe": _NUMBERED | _SMALL | dict(num_dense_layers=1, sliding_window=8),
    "aria_text": dict(moe_num_experts=8, moe_topk=2, moe_num_shared_experts=1),
    "cohere2_moe": _NUMBERED | dict(sliding_window=8),
    "deepseek_v2": _GROUPS | _LATENT | dict(topk_method="group_limited_greedy"),
    "deepseek_v3": _GROUPS | _LATENT,
    "dots1": _GROUPS,
    "ernie4_5_moe": _SMALL | dict(moe_num_experts=8, moe_k=2, moe_layer_start_index=0),
    "flex_olmo": _NUMBERED,
    "glm4_moe": _GROUPS,
    "glm4_moe_lite": _GROUPS | _LATENT,
    "gpt_oss": _NUMBERED | dict(sliding_window=8),
    "granitemoe": _NUMBERED,
    "granitemoeshared": _NUMBERED | dict(shared_intermediate_size=16),
    "hunyuan_v1_moe": _NUMBERED | dict(moe_topk=2),
    "jetmoe": dict(_NUMBERED, kv_channels=8, num_key_value_heads=2, num_attention_heads=4),
    "laguna": _NUMBERED | _SMALL,
    "mellum": _NUMBERED | _SMALL | dict(sliding_window=8),
    "minimax_m2": _NUMBERED,
    "mixtral": _NUMBERED,
    "olmoe": _NUMBERED,
    "phimoe": _NUMBERED | dict(sliding_window=32),
    "qwen2_moe": _NUMBERED | _SMALL,
    "qwen3_moe": _NUMBERED | _SMALL | dict(norm_topk_prob=True),
    "solar_open": _GROUPS,
}
"""Model type -> settings besides the common sizes. Together they have every kind of router that a
policy can have: softmax or sigmoid, normalised or not, groups of experts, a bias of the choice,
shared experts, dense layers before the expert layers, experts in the attention.
"""

_MADE: dict[str, PreTrainedModel] = {}


def expert_model(name: str) -> PreTrainedModel:
    """A new model with Sixfold's attention. Large weights make the experts differ clearly."""
    if name not in _MADE:
        _MADE[name] = _make(name)
    return copy.deepcopy(_MADE[name])


def meta_model(name: str) -> PreTrainedModel:
    """A model without values."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(_config(name))


def _config(name: str) -> PretrainedConfig:
    sizes = _SIZES | FAMILIES[name]
    if "kv_lora_rank" in sizes:
        sizes.pop("head_dim")
    return AutoConfig.for_model(name, **sizes)


def _make(name: str) -> PreTrainedModel:
    register()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(_config(name))
        with torch.no_grad():
            for parameter_name, p in model.named_parameters():
                if p.dim() > 1:
                    p.normal_(0, 0.15)
                elif parameter_name.endswith("sinks"):
                    p.normal_(0, 1.5)
            for buffer_name, b in model.named_buffers():
                if buffer_name.endswith("e_score_correction_bias"):
                    b.normal_(0, 0.05)
    model.set_attn_implementation(NAME)
    return model.eval()


ALPHABET = "".join(chr(ord("0") + i) for i in range(VOCABULARY - 6))
TASKS = [Task(f"t{i}", ALPHABET[i : i + n]) for i, n in enumerate((2, 9, 17))]
RENDERER = Renderer(character_tokenizer(ALPHABET))


def sampled_groups(model: PreTrainedModel, **options: Any) -> list[Group]:
    """Groups of an engine that records experts, with made-up rewards."""
    routers = find_routers(model)
    assert routers is not None
    engine = Engine(
        RecordedModel(CausalLM(model), routers),
        kv_tokens=600,
        block_size=8,
        max_running=8,
        **options,
    )
    params = SamplingParams(max_tokens=12, stop_token_ids=(1,))
    groups = EngineRollout(engine, RENDERER, params, samples=4).generate(TASKS, 0)
    for group in groups:
        for t in group.trajectories:
            t.reward = Reward(float(t.sample % 2))
    return groups
