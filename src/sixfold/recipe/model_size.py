"""Sizes of a model and its number of parameters, from its config.json alone. No torch.

The result is None for an unknown family, or if the file omits a size that the family does not fix.
It is never a guess.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class LinearModule:
    """Linear modules of the same name and size, one per layer.

    Attributes:
        name: last part of the modules' names, such as q_proj.
        inputs: width of the input.
        outputs: width of the output.
        count: number of layers that have such a module.
    """

    name: str
    inputs: int
    outputs: int
    count: int


@dataclass(frozen=True)
class ExpertSize:
    """Expert layers of a model.

    Attributes:
        layers: layers with experts.
        count: experts per layer.
        top_k: experts that compute each token.
        parameters: parameters of all experts of all layers, if each has gate, up and down
            projections. Routers do not count.
    """

    layers: int
    count: int
    top_k: int
    parameters: int = 0

    @property
    def record(self) -> int:
        """Bytes of the record of the experts of one token: `engine/routes.py`."""
        return self.layers * self.top_k * (1 if self.count <= 256 else 2)


@dataclass(frozen=True)
class ModelSize:
    """Sizes of a decoder.

    Attributes:
        parameters: parameters of the whole model, tied weights counted once.
        layers: decoder layers.
        hidden: width of the residual stream.
        intermediate: MLP width that one token passes through.
        heads: query heads.
        queries: width of all queries: heads times head size.
        keys: width of all keys, and of all values: key-value heads times head size.
        vocabulary: rows of the embedding.
        head_norms: queries and keys are normalised.
        tied: the head is the embedding.
        linears: linear modules of the layers, without the head. None: unknown.
        experts: expert layers. None: there are none, or their sizes are unknown.
    """

    parameters: int
    layers: int
    hidden: int
    intermediate: int
    heads: int
    queries: int
    keys: int
    vocabulary: int
    head_norms: bool = False
    tied: bool = False
    linears: tuple[LinearModule, ...] | None = None
    experts: ExpertSize | None = None

    @property
    def table(self) -> int:
        """Parameters of the embedding. The output head has as many."""
        return self.vocabulary * self.hidden

    def in_group(self, tensor: int) -> ModelSize:
        """Sizes of one rank's activations in a tensor group: some heads and a part of the MLP.

        Args:
            tensor: ranks of the group.
        """
        return replace(
            self,
            intermediate=self.intermediate // tensor,
            heads=self.heads // tensor,
            queries=self.queries // tensor,
            keys=self.keys // tensor,
        )


@dataclass(frozen=True)
class _Family:
    """Defaults of a model family, and how it differs from the common decoder.

    Attributes:
        tied: head and embedding are tied if the file does not say.
        norms: norms per layer of the width of the residual stream.
        head_dim: head size if the file does not say. None: hidden size divided by heads.
        head_norms: each query head and key head has a norm.
        qkv_bias: q, k and v always have a bias.
        attention_bias: `attention_bias` in the file adds a bias to q, k, v and o.
        grouped: the file must give `num_key_value_heads`. Otherwise its default is all heads.
    """

    tied: bool = False
    norms: int = 2
    head_dim: int | None = None
    head_norms: bool = False
    qkv_bias: bool = False
    attention_bias: bool = True
    grouped: bool = True


_FAMILIES = {
    "llama": _Family(grouped=False),
    "smollm3": _Family(tied=True),
    "mistral": _Family(attention_bias=False),
    "qwen2": _Family(qkv_bias=True, attention_bias=False),
    "qwen3": _Family(head_dim=128, head_norms=True),
    "qwen3_moe": _Family(head_norms=True),
    "phi3": _Family(attention_bias=False, grouped=False),
    "gemma": _Family(tied=True, head_dim=256),
    "gemma2": _Family(tied=True, norms=4, head_dim=256),
    "gemma3_text": _Family(tied=True, norms=4, head_dim=256, head_norms=True),
}


def model_size(config: object) -> ModelSize | None:
    """Sizes of the model that a config.json describes. None if they are not known."""
    if not isinstance(config, Mapping):
        return None
    try:
        if config.get("model_type") == "gpt2":
            return _gpt2(config)
        family = _FAMILIES.get(str(config.get("model_type")))
        return None if family is None else _decoder(config, family)
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        # A size is absent, null, 0 or not a number.
        return None


def rough_size(config: Mapping[str, Any], parameters: int) -> ModelSize:
    """Sizes of any loaded model, from fields that most architectures share.

    Args:
        config: the model's configuration.
        parameters: parameters counted on the module.
    """
    exact = model_size(config)
    if exact is not None:
        return replace(exact, parameters=parameters)
    hidden, heads = config.get("hidden_size") or 0, config.get("num_attention_heads") or 0
    head = config.get("head_dim") or hidden // max(1, heads)
    return ModelSize(
        parameters=parameters,
        layers=config.get("num_hidden_layers") or 0,
        hidden=hidden,
        intermediate=config.get("intermediate_size") or 4 * hidden,
        heads=heads,
        queries=head * heads,
        keys=head * (config.get("num_key_value_heads") or heads),
        vocabulary=config.get("vocab_size") or 1,
        tied=bool(config.get("tie_word_embeddings")),
        experts=expert_size(config),
    )


_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_EXPERT_CHOICES = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k")


def expert_size(config: Mapping[str, Any]) -> ExpertSize | None:
    """Expert layers of a model, from the fields that most families share.

    None if there are none, or if the fields are missing. A family that does not say which layers
    have experts is taken to have them in all layers.
    """
    count, top_k = (
        next((n for name in names if isinstance(n := config.get(name), int)), 0)
        for names in (_EXPERT_COUNTS, _EXPERT_CHOICES)
    )
    layers = config.get("num_hidden_layers") or 0
    sparse = sum(_sparse(config, layer) for layer in range(layers))
    if not (count and top_k and sparse):
        return None
    hidden, inner, dense = (
        value if isinstance(value := config.get(name), int) else 0
        for name in ("hidden_size", "moe_intermediate_size", "intermediate_size")
    )
    return ExpertSize(sparse, count, top_k, sparse * count * 3 * hidden * (inner or dense))


def _decoder(config: Mapping[str, Any], family: _Family) -> ModelSize:
    hidden, heads, layers, vocabulary = (
        int(config[key])
        for key in ("hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size")
    )
    pairs = int(
        config["num_key_value_heads"]
        if family.grouped
        else config.get("num_key_value_heads") or heads
    )
    head = int(config.get("head_dim") or family.head_dim or hidden // heads)
    queries, keys = heads * head, pairs * head
    attention = 2 * hidden * (queries + keys)
    if family.qkv_bias:
        attention += queries + 2 * keys
    elif family.attention_bias and config.get("attention_bias"):
        attention += queries + 2 * keys + hidden
    attention += 2 * head * family.head_norms + family.norms * hidden
    mlps = sum(_mlp(config, layer) for layer in range(layers))
    tied = bool(config.get("tie_word_embeddings", family.tied))
    return ModelSize(
        parameters=vocabulary * hidden * (1 if tied else 2) + layers * attention + mlps + hidden,
        layers=layers,
        hidden=hidden,
        intermediate=_width(config),
        heads=heads,
        queries=queries,
        keys=keys,
        vocabulary=vocabulary,
        head_norms=family.head_norms,
        tied=tied,
        linears=_linears(config, queries, keys),
        experts=expert_size(config),
    )


def _linears(config: Mapping[str, Any], queries: int, keys: int) -> tuple[LinearModule, ...] | None:
    """Linear modules of all layers. None for a mixture of experts, whose experts are stacked."""
    hidden, inner = int(config["hidden_size"]), int(config["intermediate_size"])
    layers = int(config["num_hidden_layers"])
    if config["model_type"] == "qwen3_moe":
        return None
    sizes = [("q_proj", hidden, queries), ("k_proj", hidden, keys), ("v_proj", hidden, keys)]
    sizes += [("o_proj", queries, hidden), ("gate_proj", hidden, inner), ("up_proj", hidden, inner)]
    if config["model_type"] == "phi3":
        sizes = [("qkv_proj", hidden, queries + 2 * keys), ("o_proj", queries, hidden)]
        sizes += [("gate_up_proj", hidden, 2 * inner)]
    sizes.append(("down_proj", inner, hidden))
    return tuple(LinearModule(name, i, o, layers) for name, i, o in sizes)


def _mlp(config: Mapping[str, Any], layer: int) -> int:
    """Parameters of one layer's MLP: gate, up and down projection.

    A sparse layer has all experts and the router.
    """
    hidden, inner = int(config["hidden_size"]), int(config["intermediate_size"])
    if config["model_type"] == "qwen3_moe" and _sparse(config, layer):
        # transformers 5 writes the second name
        experts, each = (
            int(config.get("num_experts") or config["num_local_experts"]),
            int(config["moe_intermediate_size"]),
        )
        return experts * hidden * (1 + 3 * each)
    bias = (
        2 * inner + hidden
        if config.get("mlp_bias") and config["model_type"] in ("llama", "smollm3")
        else 0
    )
    return 3 * hidden * inner + bias


def _sparse(config: Mapping[str, Any], layer: int) -> bool:
    """True if the layer has experts, in a model that has some."""
    dense = layer < int(config.get("first_k_dense_replace") or 0)
    if dense or layer in (config.get("mlp_only_layers") or ()):
        return False
    return (layer + 1) % int(config.get("decoder_sparse_step") or 1) == 0


def _width(config: Mapping[str, Any]) -> int:
    if config["model_type"] == "qwen3_moe":
        return int(config["num_experts_per_tok"]) * int(config["moe_intermediate_size"])
    return int(config["intermediate_size"])


def _gpt2(config: Mapping[str, Any]) -> ModelSize | None:
    hidden, layers, vocabulary, places, heads = (
        int(config[key]) for key in ("n_embd", "n_layer", "vocab_size", "n_positions", "n_head")
    )
    inner = int(config.get("n_inner") or 4 * hidden)
    layer = (
        4 * hidden
        + hidden * (3 * hidden + 3)
        + hidden * (hidden + 1)
        + inner * (hidden + 1)
        + hidden * (inner + 1)
    )
    embeddings = (
        vocabulary if config.get("tie_word_embeddings", True) else 2 * vocabulary
    ) + places
    return ModelSize(
        parameters=embeddings * hidden + layers * layer + 2 * hidden,
        layers=layers,
        hidden=hidden,
        intermediate=inner,
        heads=heads,
        queries=hidden,
        keys=hidden,
        vocabulary=vocabulary,
        tied=bool(config.get("tie_word_embeddings", True)),
        linears=(
            LinearModule("c_attn", hidden, 3 * hidden, layers),
            LinearModule("c_proj", hidden, hidden, layers),
            LinearModule("c_fc", hidden, inner, layers),
            LinearModule("c_proj", inner, hidden, layers),
        ),
    )
