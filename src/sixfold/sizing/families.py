"""Model families whose parameters are counted exactly, and how they differ from Llama. No torch.

The source of each row is the family's module in transformers 5. `tests/sizing/test_model_size.py`
compares every row with that module.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Flag:
    """A yes-or-no field of config.json.

    Attributes:
        name: name of the field.
        default: its value if the file does not have it.
    """

    name: str
    default: bool = False


def is_set(flag: bool | Flag, config: Mapping[str, Any]) -> bool:
    """True if the family always has the part, or if the file asks for it."""
    if isinstance(flag, bool):
        return flag
    given = config.get(flag.name)
    return flag.default if given is None else bool(given)


@dataclass(frozen=True)
class Names:
    """Last parts of the names of a layer's linear modules.

    Attributes:
        qkv: projections to queries, keys and values: three, or one that is fused.
        out: output of the attention.
        up: gate and up projection of the MLP: two, or one (fused, or without a gate).
        down: output of the MLP.
    """

    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    out: str = "o_proj"
    up: tuple[str, ...] = ("gate_proj", "up_proj")
    down: str = "down_proj"


@dataclass(frozen=True)
class Experts:
    """Expert layers of a family.

    Attributes:
        count: field with the routed experts per layer; alternatives in order.
        top_k: field with the experts per token.
        width: field with the MLP width of one expert.
        layers: which layers have experts. "all"; "first": from `first_k_dense_replace` on;
            "steps": by `decoder_sparse_step` and `mlp_only_layers`; "range": by `moe_layer_*`;
            "types": by `mlp_layer_types`.
        shared: field with the number of shared experts of the same width.
        shared_width: field with the width of one shared expert.
        shared_gate: the shared expert has a gate: one number per number of the residual stream.
        router_bias: the router has one more number per expert.
        biases: experts have biases.
    """

    count: tuple[str, ...]
    top_k: str = "num_experts_per_tok"
    width: str = "moe_intermediate_size"
    layers: str = "all"
    shared: str = ""
    shared_width: str = ""
    shared_gate: bool = False
    router_bias: bool = False
    biases: bool = False


@dataclass(frozen=True)
class Family:
    """How a family differs from Llama.

    Attributes:
        tied: head and embedding are tied if the file does not say.
        pairs: key-value heads. "given": the file must have `num_key_value_heads`; "optional": all
            heads without it; "heads": always all heads; "one": one if `multi_query` is set.
        head_dim: head size if the file does not say. None: hidden size divided by heads.
        fixed_heads: the head size is always hidden size divided by heads.
        norms: norms per layer of the width of the residual stream.
        norm: parameters per number of a norm: 0, 1 (scale) or 2 (scale and shift).
        head_norms: queries and keys have a norm of the size of one head.
        wide_norms: queries and keys have a norm with a parameter per number of all heads.
        qkv_bias: the projections to q, k and v have biases.
        out_bias: the output of the attention has a bias.
        mlp_bias: the MLP has biases.
        head_bias: the output head has a bias.
        gated: the MLP has a gate.
        sinks: one number per query head.
        extra: further parameters per layer.
        latent: multi-head latent attention (arXiv:2405.04434).
        positions: field with the number of learned positions, and rows beyond it. None: no table.
        names: names of the linear modules.
        fields: Llama's field -> the family's.
        usual: fields that must have this value, if the file has them. Others are not counted.
        hidden: fields that must equal the hidden size, if the file has them.
        experts: expert layers. None: there are none.
    """

    tied: bool = False
    pairs: str = "given"
    head_dim: int | None = None
    fixed_heads: bool = False
    norms: int = 2
    norm: int = 1
    head_norms: bool | Flag = False
    wide_norms: bool | Flag = False
    qkv_bias: bool | Flag = False
    out_bias: bool | Flag = False
    mlp_bias: bool | Flag = False
    head_bias: bool | Flag = False
    gated: bool = True
    sinks: bool = False
    extra: int = 0
    latent: bool = False
    positions: tuple[str, int] | None = None
    names: Names = Names()
    fields: Mapping[str, str] = field(default_factory=dict)
    usual: Mapping[str, object] = field(default_factory=dict)
    hidden: tuple[str, ...] = ()
    experts: Experts | None = None

    def of(self, name: str) -> str:
        """The family's name of a field of Llama's config.json."""
        return self.fields.get(name, name)


_ATTENTION, _MLP = Flag("attention_bias"), Flag("mlp_bias")
_GPT_FIELDS = {
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
    "intermediate_size": "n_inner",
}
_FUSED = Names(up=("gate_up_proj",))
_UP_DOWN = Names(up=("up_proj",))
_DENSE_4H = Names(("query_key_value",), "dense", ("dense_h_to_4h",), "dense_4h_to_h")

_BIASED = Family(qkv_bias=_ATTENTION, out_bias=_ATTENTION)
_LLAMA = replace(_BIASED, pairs="optional", mlp_bias=_MLP)
_GEMMA = replace(_BIASED, tied=True, head_dim=256)
_OLMO = replace(_BIASED, wide_norms=True)
_GPT = Family(
    tied=True, pairs="heads", fixed_heads=True, norm=2, qkv_bias=True, out_bias=True,
    mlp_bias=True, gated=False, positions=("n_positions", 0),
    names=Names(("c_attn",), "c_proj", ("c_fc",), "c_proj"), fields=_GPT_FIELDS,
    usual={"add_cross_attention": False},
)  # fmt: skip
_GLM = Family(head_dim=128, qkv_bias=Flag("attention_bias", True), names=_FUSED)
_NUMBERED, _LOCAL = ("num_experts", "num_local_experts"), ("num_local_experts", "num_experts")
_ROUTED = Experts(("n_routed_experts", "num_local_experts"), layers="first")
_SHARED = replace(_ROUTED, shared="n_shared_experts")
_WIDE = Experts(_LOCAL, width="intermediate_size")
_DEEPSEEK = replace(_BIASED, latent=True, experts=_SHARED)

FAMILIES: Mapping[str, Family] = {
    "apertus": replace(_BIASED, head_norms=True, gated=False, extra=2, names=_UP_DOWN),
    "arcee": replace(_LLAMA, pairs="given", gated=False, names=_UP_DOWN),
    "cohere": replace(_BIASED, tied=True, norms=1, wide_norms=Flag("use_qk_norm")),
    "cohere2": replace(_BIASED, tied=True, norms=1),
    "cwm": Family(head_dim=128, mlp_bias=_MLP),
    "deepseek_v2": replace(
        _DEEPSEEK, usual={"mlp_bias": False, "moe_layer_freq": 1}
    ),
    "deepseek_v3": replace(_DEEPSEEK, usual={"moe_layer_freq": 1}),
    "dots1": replace(_BIASED, head_norms=True, experts=_SHARED),
    "ernie4_5": Family(
        tied=True, head_dim=128, qkv_bias=Flag("use_bias"), out_bias=Flag("use_bias"),
        mlp_bias=Flag("use_bias"),
    ),
    "ernie4_5_moe": Family(
        tied=True, usual={"use_bias": False},
        experts=Experts(
            ("moe_num_experts",), "moe_k", layers="range", shared="moe_num_shared_experts",
            router_bias=True,
        ),
    ),
    "exaone4": Family(head_norms=True),
    "flex_olmo": replace(_OLMO, experts=replace(_WIDE, count=_NUMBERED)),
    "gemma": _GEMMA,
    "gemma2": replace(_GEMMA, norms=4),
    "gemma3_text": replace(_GEMMA, norms=4, head_norms=True),
    "glm": _GLM,
    "glm4": replace(_GLM, norms=4),
    "glm4_moe": Family(
        qkv_bias=_ATTENTION, head_norms=Flag("use_qk_norm"), experts=_SHARED
    ),
    "glm4_moe_lite": replace(_DEEPSEEK, experts=replace(_SHARED, layers="types")),
    "gpt2": _GPT,
    "gpt_bigcode": replace(_GPT, pairs="one"),
    "gpt_neox": Family(
        pairs="heads", fixed_heads=True, norm=2, qkv_bias=Flag("attention_bias", True),
        out_bias=Flag("attention_bias", True), mlp_bias=True, gated=False, names=_DENSE_4H,
    ),
    "gpt_oss": Family(
        head_dim=64, qkv_bias=Flag("attention_bias", True), out_bias=Flag("attention_bias", True),
        sinks=True, experts=replace(_WIDE, router_bias=True, biases=True),
    ),
    "granite": replace(_LLAMA, pairs="optional"),
    "granitemoe": replace(_BIASED, pairs="optional", experts=_WIDE),
    "granitemoeshared": replace(
        _BIASED, pairs="optional", experts=replace(_WIDE, shared_width="shared_intermediate_size")
    ),
    "helium": Family(head_dim=128, qkv_bias=_ATTENTION, mlp_bias=_MLP),
    "hunyuan_v1_dense": replace(_BIASED, pairs="optional", head_norms=True),
    "hyperclovax": replace(_LLAMA, norms=4, usual={"use_post_norm": True}),
    "jais2": Family(
        norm=2, qkv_bias=Flag("attention_bias", True), out_bias=Flag("attention_bias", True),
        mlp_bias=Flag("mlp_bias", True), gated=False, names=_UP_DOWN,
    ),
    "llama": _LLAMA,
    "minigpt": Family(
        tied=True, pairs="heads", fixed_heads=True, norm=2, mlp_bias=True, gated=False,
        positions=("max_position_embeddings", 0), names=Names(("qkv",), "out", ("up",), "down"),
    ),
    "minimax_m2": Family(head_dim=128, wide_norms=True, experts=_WIDE),
    "ministral3": Family(head_dim=128),
    "mistral": Family(),
    "mixtral": Family(experts=_WIDE),
    "nanochat": replace(
        _BIASED, norm=0, gated=False, names=Names(up=("fc1",), down="fc2")
    ),
    "olmo": replace(_BIASED, pairs="optional", norm=0),
    "olmo2": replace(_OLMO, pairs="optional"),
    "olmo3": replace(_OLMO, pairs="optional"),
    "olmoe": replace(_OLMO, experts=replace(_WIDE, count=_NUMBERED)),
    "opt": Family(
        tied=True, pairs="heads", fixed_heads=True, norm=2, qkv_bias=True, out_bias=True,
        mlp_bias=True, gated=False, positions=("max_position_embeddings", 2),
        names=Names(out="out_proj", up=("fc1",), down="fc2"),
        fields={"intermediate_size": "ffn_dim"}, hidden=("word_embed_proj_dim",),
        usual={
            "do_layer_norm_before": True, "enable_bias": True, "_remove_final_layer_norm": False,
            "layer_norm_elementwise_affine": True,
        },
    ),
    "persimmon": Family(
        pairs="heads", fixed_heads=True, norm=2, head_norms=Flag("qk_layernorm", True),
        qkv_bias=True, out_bias=True, mlp_bias=True, gated=False, names=_DENSE_4H,
    ),
    "phi": Family(
        pairs="optional", norms=1, norm=2, qkv_bias=True, out_bias=True, mlp_bias=True,
        head_bias=True, gated=False, head_norms=Flag("qk_layernorm"),
        names=Names(out="dense", up=("fc1",), down="fc2"),
    ),
    "phi3": Family(pairs="optional", names=Names(("qkv_proj",), up=("gate_up_proj",))),
    "phimoe": replace(_BIASED, norm=2, head_bias=Flag("lm_head_bias"), experts=_WIDE),
    "qwen2": Family(qkv_bias=True),
    "qwen2_moe": Family(
        qkv_bias=Flag("qkv_bias", True),
        experts=Experts(
            _NUMBERED, layers="steps", shared_width="shared_expert_intermediate_size",
            shared_gate=True,
        ),
    ),
    "qwen3": replace(_BIASED, head_dim=128, head_norms=True),
    "qwen3_moe": replace(_BIASED, head_norms=True, experts=Experts(_NUMBERED, layers="steps")),
    "seed_oss": Family(
        head_dim=128, qkv_bias=Flag("attention_bias", True), out_bias=Flag("attention_out_bias"),
        mlp_bias=_MLP,
    ),
    "smollm3": replace(_LLAMA, tied=True, pairs="given"),
    "starcoder2": Family(
        tied=True, norm=2, qkv_bias=Flag("use_bias", True), out_bias=Flag("use_bias", True),
        mlp_bias=Flag("use_bias", True), gated=False, names=Names(up=("c_fc",), down="c_proj"),
    ),
    "vaultgemma": _GEMMA,
}  # fmt: skip
"""model_type -> family."""
