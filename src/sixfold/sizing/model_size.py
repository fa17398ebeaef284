"""Sizes of a model and its number of parameters, from its config.json alone. No torch.

The result is exact or an error, never a guess: the family must be one of `families.FAMILIES`, and
the file must have every size that the family does not fix.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..errors import UserError
from .families import FAMILIES
from .kv_cache import CachedNumbers
from .layers import (
    Attention,
    ExpertSize,
    LinearModule,
    Reader,
    attention_size,
    missing_fields,
    mlp_sizes,
)


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
        keys: width of all keys: key-value heads times head size.
        vocabulary: rows of the embedding.
        head_norms: queries and keys are normalised.
        tied: the head is the embedding.
        linears: linear modules of the layers, without the head. None: unknown.
        experts: expert layers. None: there are none, or their sizes are unknown.
        values: width of all values. 0: as that of the keys.
        latent: width of the compressed keys and values of latent attention. 0: there are none.
        rotary: width of the rotary key beside them.
        cached_layers: layers whose keys and values are cached. 0: all.
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
    values: int = 0
    latent: int = 0
    rotary: int = 0
    cached_layers: int = 0

    @property
    def table(self) -> int:
        """Parameters of the embedding. The output head has as many."""
        return self.vocabulary * self.hidden

    def cached(self, *, padded: bool) -> CachedNumbers:
        """What the engine's KV cache keeps of one token.

        Latent attention is cached as whole keys and values, not compressed.

        Args:
            padded: values take as many numbers as keys, as in the engine on a GPU.
        """
        layers, head = self.cached_layers or self.layers, self.queries // self.heads
        values = self.keys if padded else self.values or self.keys
        return CachedNumbers(layers * (self.keys + values), 2 * layers * (self.keys // head))

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
            values=self.values // tensor,
        )


def model_size(config: object) -> ModelSize | None:
    """Sizes of the model that a config.json describes. None if they are not known."""
    try:
        return read_size(config)
    except UserError:
        return None


def read_size(config: object) -> ModelSize:
    """Sizes of the model that a config.json describes.

    Raises:
        UserError: if the family is not known, a size is absent or invalid, or the model has parts
            that are not counted. One line that names the fields.
    """
    if not isinstance(config, Mapping):
        raise UserError("config.json must be an object with the sizes of a model")
    kind = config.get("model_type")
    family = FAMILIES.get(str(kind))
    if family is None:
        raise UserError(
            f"config.json: model_type = {kind!r} is not one whose parameters can be counted"
            " without loading the model. docs/memory.md lists those types"
        )
    reader = Reader(config, family)
    if absent := missing_fields(reader):
        raise UserError(f"config.json of a {kind} model lacks sizes: {', '.join(absent)}")
    for name, value in {**family.usual, **dict.fromkeys(family.hidden, reader.hidden)}.items():
        if config.get(name, value) != value:
            raise UserError(
                f"config.json: {name} = {config[name]!r} is not counted for model_type = {kind!r},"
                f" only {value!r}"
            )
    return _size(reader)


def _size(reader: Reader) -> ModelSize:
    family, hidden = reader.family, reader.hidden
    layers, vocabulary = reader.whole("num_hidden_layers"), reader.whole("vocab_size")
    attention, mlps = attention_size(reader), mlp_sizes(reader)
    given = reader.config.get("tie_word_embeddings")
    tied = family.tied if given is None else bool(given)
    parameters = vocabulary * hidden * (1 if tied else 2) + vocabulary * reader.has("head_bias")
    if family.positions:
        name, more = family.positions
        parameters += (reader.whole(name) + more) * hidden
    layer = attention.parameters + family.norms * family.norm * hidden + family.extra
    parameters += layers * layer + mlps.parameters + family.norm * hidden
    return ModelSize(
        parameters=parameters,
        layers=layers,
        hidden=hidden,
        intermediate=mlps.width,
        heads=attention.heads,
        queries=attention.queries,
        keys=attention.keys,
        vocabulary=vocabulary,
        head_norms=reader.has("head_norms") or reader.has("wide_norms"),
        tied=tied,
        linears=_linears(reader, attention),
        experts=mlps.experts,
        values=attention.values if family.latent else 0,
        latent=attention.latent,
        rotary=attention.rotary,
    )


def _linears(reader: Reader, attention: Attention) -> tuple[LinearModule, ...] | None:
    """Linear modules of all layers.

    None for a mixture of experts, whose experts are stacked, and for latent attention.
    """
    family, hidden = reader.family, reader.hidden
    if family.experts is not None or family.latent:
        return None
    names, inner, layers = family.names, reader.inner, reader.whole("num_hidden_layers")
    qkv = [attention.queries, attention.keys, attention.values]
    into = [inner, inner] if family.gated else [inner]
    outputs = [
        *zip(names.qkv, qkv if len(names.qkv) == 3 else [sum(qkv)], strict=True),
        *zip(names.up, into if len(names.up) == len(into) else [sum(into)], strict=True),
    ]
    sizes = [(name, hidden, width) for name, width in outputs]
    sizes.insert(len(names.qkv), (names.out, attention.queries, hidden))
    sizes.append((names.down, inner, hidden))
    return tuple(LinearModule(name, i, o, layers) for name, i, o in sizes)


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

    Exact for the families of `FAMILIES`. For others: None if there are none, or if the fields are
    missing; a file that does not say which layers have experts is taken to have them in all layers.
    """
    exact = model_size(config)
    if exact is not None:
        return exact.experts
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


def _sparse(config: Mapping[str, Any], layer: int) -> bool:
    """True if the layer has experts, in a model that has some."""
    dense = layer < int(config.get("first_k_dense_replace") or 0)
    if dense or layer in (config.get("mlp_only_layers") or ()):
        return False
    return (layer + 1) % int(config.get("decoder_sparse_step") or 1) == 0


def cached_numbers(config: dict[str, Any], *, padded: bool) -> CachedNumbers | None:
    """What the KV cache of the engine keeps of one token.

    Exact for the families of `families.FAMILIES`. For others it follows from the fields that most
    architectures share.

    Args:
        config: the model's config.json.
        padded: values take as many numbers as keys, as in the engine on a GPU.

    Returns:
        None if the fields are missing, or if the family has another kind of attention.
    """
    size = model_size(config)
    if size is not None:
        return size.cached(padded=padded)
    layers, heads, hidden = (
        config.get(key) for key in ("num_hidden_layers", "num_attention_heads", "hidden_size")
    )
    if not layers or not heads or not hidden or config.get("kv_lora_rank"):
        return None
    kv_heads = config.get("num_key_value_heads") or heads
    if not all(type(size) is int for size in (layers, heads, hidden, kv_heads)):
        return None
    width = config.get("head_dim") or hidden // heads
    vectors = 2 * layers * kv_heads
    return CachedNumbers(vectors * width, vectors) if type(width) is int else None
