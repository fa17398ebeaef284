"""Parameters and widths of one layer's attention and MLP, from a config.json. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import UserError
from .families import Experts, Family, is_set


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
        parameters: parameters of all routed experts of all layers. Routers do not count.
    """

    layers: int
    count: int
    top_k: int
    parameters: int = 0

    @property
    def record(self) -> int:
        """Bytes that record which experts one token used, as in `engine/routes.py`."""
        return self.layers * self.top_k * (1 if self.count <= 256 else 2)


@dataclass(frozen=True)
class Reader:
    """Fields of a config.json, by the names that Llama's file has.

    Attributes:
        config: the file.
        family: family of the model.
    """

    config: Mapping[str, Any]
    family: Family

    def whole(self, *names: str, least: int = 1) -> int:
        """The first of these fields that the file has.

        Raises:
            UserError: if none of them is a whole number of at least `least`.
        """
        fields = [self.family.of(name) for name in names]
        name = next((n for n in fields if self.config.get(n) is not None), fields[0])
        value = self.config.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise UserError(
                f"config.json: {name} = {value!r} must be a whole number of at least {least}"
            )
        return value

    def optional(self, name: str, default: int) -> int:
        """The field, or `default` if the file does not have it or if it is null."""
        name = self.family.of(name)
        return default if self.config.get(name) is None else self.whole(name, least=0)

    def numbers(self, name: str) -> Sequence[int]:
        """A list of numbers, empty if the file does not have it.

        Raises:
            UserError: if the field is not a list.
        """
        value = self.config.get(name)
        if value is not None and not isinstance(value, list):
            raise UserError(f"config.json: {name} = {value!r} must be a list of numbers")
        return value or []

    def share(self, whole: str, parts: str) -> int:
        """One field divided by another.

        Raises:
            UserError: if a field is not a size, or the first is not a multiple of the second.
        """
        size, count = self.whole(whole), self.whole(parts)
        if size % count:
            raise UserError(
                f"config.json: {self.family.of(whole)} = {size} must be a multiple of"
                f" {self.family.of(parts)} = {count}"
            )
        return size // count

    def has(self, part: str) -> bool:
        """True if the model has a part that only some models of the family have.

        Args:
            part: name of a yes-or-no attribute of `Family`.
        """
        return is_set(getattr(self.family, part), self.config)

    @property
    def hidden(self) -> int:
        """Width of the residual stream."""
        return self.whole("hidden_size")

    @property
    def inner(self) -> int:
        """Width of a dense MLP."""
        if self.family.of("intermediate_size") == "n_inner":
            return self.optional("intermediate_size", 4 * self.hidden)
        return self.whole("intermediate_size")


def missing_fields(reader: Reader) -> list[str]:
    """Fields that the family needs and the file does not have, in the family's names."""
    family, experts = reader.family, reader.family.experts
    needed = ["hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size"]
    if experts is None or experts.layers != "all" or experts.width == "intermediate_size":
        needed.append("intermediate_size")
    if family.latent:
        needed += ["kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"]
    elif family.pairs == "given":
        needed.append("num_key_value_heads")
    if family.positions:
        needed.append(family.positions[0])
    if experts is not None:
        count = next((n for n in experts.count if reader.config.get(n) is not None), None)
        needed += [count or experts.count[0], experts.top_k, experts.width]
        needed += [name for name in (experts.shared, experts.shared_width) if name]
        if experts.layers == "first":
            needed.append("first_k_dense_replace")
    fields = [family.of(name) for name in dict.fromkeys(needed)]
    absent = [n for n in fields if n != "n_inner" and reader.config.get(n) is None]
    if family.latent and "q_lora_rank" not in reader.config:  # null stands for no compression
        absent.append("q_lora_rank")
    return absent


@dataclass(frozen=True)
class Attention:
    """Attention of one layer.

    Attributes:
        heads: query heads.
        queries: width of all queries.
        keys: width of all keys.
        values: width of all values.
        pairs: key-value heads.
        parameters: parameters, with the norms of queries and keys.
        latent: width of the compressed keys and values; 0 without latent attention.
        rotary: width of the shared rotary key beside them.
    """

    heads: int
    queries: int
    keys: int
    values: int
    pairs: int
    parameters: int
    latent: int = 0
    rotary: int = 0


def attention_size(reader: Reader) -> Attention:
    """Sizes of the attention of one layer.

    Raises:
        UserError: if a field is not a size.
    """
    if reader.family.latent:
        return _latent_attention(reader)
    family, hidden = reader.family, reader.hidden
    heads = reader.whole("num_attention_heads")
    if family.fixed_heads:
        head = family.head_dim or reader.share("hidden_size", "num_attention_heads")
    else:
        head = (
            reader.optional("head_dim", 0)
            or family.head_dim
            or reader.share("hidden_size", "num_attention_heads")
        )
    pairs = _pairs(reader, heads)
    queries, keys = heads * head, pairs * head
    parameters = 2 * hidden * (queries + keys)
    parameters += (queries + 2 * keys) * reader.has("qkv_bias") + hidden * reader.has("out_bias")
    parameters += 2 * head * family.norm * reader.has("head_norms")
    parameters += (queries + keys) * reader.has("wide_norms") + heads * family.sinks
    return Attention(heads, queries, keys, keys, pairs, parameters)


def _pairs(reader: Reader, heads: int) -> int:
    """Key-value heads."""
    rule = reader.family.pairs
    if rule == "heads":
        return heads
    if rule == "one":
        return 1 if reader.config.get("multi_query", True) else heads
    pairs = reader.optional("num_key_value_heads", heads) or heads
    if pairs != heads:
        reader.share("num_attention_heads", "num_key_value_heads")
    return pairs


def _latent_attention(reader: Reader) -> Attention:
    """Multi-head latent attention: https://arxiv.org/abs/2405.04434, section 2.1."""
    hidden, heads = reader.hidden, reader.whole("num_attention_heads")
    latent, rotary = reader.whole("kv_lora_rank"), reader.whole("qk_rope_head_dim")
    plain, value = reader.whole("qk_nope_head_dim"), reader.whole("v_head_dim")
    queries, values = heads * (plain + rotary), heads * value
    biased = reader.has("qkv_bias")
    parameters = hidden * queries
    if rank := reader.optional("q_lora_rank", 0):
        parameters = rank * (hidden + 1 + queries) + rank * biased
    parameters += (latent + rotary) * (hidden + biased) + latent
    parameters += latent * (heads * plain + values) + values * hidden
    parameters += hidden * reader.has("out_bias")
    return Attention(heads, queries, queries, values, heads, parameters, latent, rotary)


def mlp_parameters(reader: Reader, width: int, *, biased: bool) -> int:
    """Parameters of an MLP: up and down projections, and a gate if the family has one.

    Args:
        reader: the file.
        width: width of the MLP.
        biased: the projections have biases.
    """
    into = 2 if reader.family.gated else 1
    return (into + 1) * reader.hidden * width + (into * width + reader.hidden) * biased


@dataclass(frozen=True)
class Mlps:
    """MLPs of all layers.

    Attributes:
        parameters: of all layers, with routers and experts.
        width: MLP width that one token passes through, as a mean over the layers.
        experts: expert layers. None: there are none.
    """

    parameters: int
    width: int
    experts: ExpertSize | None


def mlp_sizes(reader: Reader) -> Mlps:
    """Sizes of the MLPs of all layers.

    Raises:
        UserError: if a field is not a size.
    """
    layers, experts = reader.whole("num_hidden_layers"), reader.family.experts
    sparse = 0 if experts is None else sum(_has_experts(reader, i) for i in range(layers))
    dense = layers - sparse
    inner = reader.inner if dense else 0
    parameters = dense * mlp_parameters(reader, inner, biased=reader.has("mlp_bias"))
    if experts is None or not sparse:
        return Mlps(parameters, inner, None)
    count, top_k, width = (
        reader.whole(*experts.count),
        reader.whole(experts.top_k),
        reader.whole(experts.width),
    )
    shared = _shared_width(reader, experts, width)
    routed = count * mlp_parameters(reader, width, biased=experts.biases)
    layer = routed + count * (reader.hidden + experts.router_bias)
    layer += mlp_parameters(reader, shared, biased=False) + reader.hidden * experts.shared_gate
    used = sparse * (top_k * width + shared) + dense * inner
    found = ExpertSize(sparse, count, top_k, sparse * routed)
    return Mlps(parameters + sparse * layer, -(-used // layers), found)


def _shared_width(reader: Reader, experts: Experts, width: int) -> int:
    """MLP width of the experts that every token uses.

    Args:
        reader: the file.
        experts: expert layers of the family.
        width: width of one routed expert.
    """
    if experts.shared_width:
        return reader.whole(experts.shared_width, least=0)
    return width * reader.whole(experts.shared, least=0) if experts.shared else 0


def _has_experts(reader: Reader, layer: int) -> bool:
    """True if the layer has experts."""
    config, experts = reader.config, reader.family.experts
    rule = "" if experts is None else experts.layers
    if rule == "first":
        return layer >= reader.whole("first_k_dense_replace", least=0)
    if rule == "steps":
        step = reader.optional("decoder_sparse_step", 1) or 1
        return layer not in reader.numbers("mlp_only_layers") and (layer + 1) % step == 0
    if rule == "range":
        last = config.get("moe_layer_end_index")
        ends = last is not None and last != -1 and layer > last
        inside = layer >= reader.optional("moe_layer_start_index", 1) and not ends
        return inside and (layer + 1) % (reader.optional("moe_layer_interval", 1) or 1) == 0
    if rule == "types":
        types = config.get("mlp_layer_types")
        return layer > 0 if types is None else types[layer] == "sparse"
    return True
