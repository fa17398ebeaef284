"""Sizes of language models: what the arithmetic of time and memory needs.

architectures.toml has public models and their sources.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

from . import checks
from .memory import kv_bytes_per_token, latent_bytes_per_token
from .roofline import expert_share


@dataclass(frozen=True)
class Architecture:
    """Sizes of a decoder-only transformer.

    Attributes:
        params_b: parameters in 1e9, embeddings included.
        active_b: parameters in 1e9 that one token uses, embeddings included.
        layers: number of layers.
        hidden: width of the residual stream.
        heads: attention heads per layer.
        kv_heads: key and value heads per layer.
        head_size: size of one query and key head.
        vocab: rows of the embedding.
        tied: the output head is the embedding.
        experts: routed experts per layer; 0 for a dense model.
        experts_per_token: routed experts that one token uses.
        attention_layers: layers with softmax attention; 0 means all of them.
        value_size: size of one value head; 0 means `head_size`.
        latent: width of compressed keys and values (multi-head latent attention); 0 without it.
        rotary: width of the shared rotary key that is cached beside them.

    Raises:
        UserError: if a size is out of range.
    """

    name: str
    params_b: float
    active_b: float
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    vocab: int
    tied: bool = False
    experts: int = 0
    experts_per_token: int = 0
    attention_layers: int = 0
    value_size: int = 0
    latent: int = 0
    rotary: int = 0

    def __post_init__(self) -> None:
        checks.positive(params_b=self.params_b, active_b=self.active_b)
        at_least_1 = ["layers", "hidden", "heads", "head_size", "vocab"]
        at_least_1 += ["latent", "rotary"] if self.latent else ["kv_heads"]
        at_least_1 += ["experts", "experts_per_token"] if self.experts else []
        checks.whole(**{name: getattr(self, name) for name in at_least_1})
        checks.whole(0, attention_layers=self.attention_layers, value_size=self.value_size)
        if self.experts:
            checks.share(**{"per_token / experts": self.experts_per_token / self.experts})

    @property
    def matmul_params(self) -> float:
        """Parameters in matrix products of one token: the active ones without the embedding."""
        return self.active_b * 1e9 - (0 if self.tied else self.vocab * self.hidden)

    @property
    def expert_params(self) -> float:
        """Parameters of all routed experts, from the difference of total and active counts."""
        if not self.experts:
            return 0.0
        idle_share = 1 - self.experts_per_token / self.experts
        return (self.params_b - self.active_b) * 1e9 / idle_share

    @property
    def mlp_width(self) -> float:
        """Width of the gated MLP that one token uses, summed over its experts."""
        attention = 2 * self.hidden * (self.heads + self.kv_heads) * self.head_size
        tables = self.vocab * self.hidden * (1 if self.tied else 2)
        layer = (self.active_b * 1e9 - tables) / self.layers - attention
        return max(layer / (3 * self.hidden), float(self.hidden))

    @property
    def softmax_layers(self) -> int:
        """Layers whose cost grows with the context."""
        return self.attention_layers or self.layers

    def attention_flops(self, context: float) -> float:
        """Forward FLOPs per token of causal attention in sequences of `context` tokens."""
        width = self.heads * (self.head_size + (self.value_size or self.head_size))
        return self.softmax_layers * context * width

    def kv_bytes(self) -> int:
        """Bytes of KV cache per token in bf16: all layers, keys and values."""
        layers = self.softmax_layers
        if self.latent:
            return latent_bytes_per_token(
                layers=layers, latent=self.latent, rotary=self.rotary, width=2
            )
        return kv_bytes_per_token(
            layers=layers, kv_heads=self.kv_heads, head_dim=self.head_size, width=2
        )

    def read_params(self, batch: float) -> float:
        """Parameters that a decoding step of `batch` sequences reads.

        A dense model reads all of them. Of E experts with k per token, a batch of B tokens reaches
        the share 1 - (1 - k/E)^B, if the router spreads the tokens evenly.
        """
        return self.reading()(batch)

    def reading(self) -> Callable[[float], float]:
        """`read_params` as a function. All that does not depend on the batch is computed once."""
        total = self.params_b * 1e9 - (0 if self.tied else self.vocab * self.hidden)
        if not self.experts:
            return lambda batch: total
        routed = self.expert_params
        missed = 1 - expert_share(
            experts=self.experts, per_token=self.experts_per_token, tokens=1.0
        )
        return lambda batch: total - routed * missed ** max(batch, 1.0)


_FILE = resources.files("sixfold_planning") / "architectures.toml"
_TABLE = tomllib.loads(_FILE.read_text("utf-8"))
_COLUMNS = ("params_b", "layers", "hidden", "heads", "kv_heads", "vocab")


def _dense(name: str, *columns: float, **others: Any) -> Architecture:
    """A dense model with heads of size hidden / heads, from `_COLUMNS`, except for `others`."""
    sizes = dict(zip(_COLUMNS, columns, strict=True))
    head = sizes["hidden"] // sizes["heads"]
    usual = {"active_b": sizes["params_b"], "head_size": head}
    return Architecture(**{"name": name, **sizes, **usual, **others})


def _listed(name: str, row: list[Any]) -> Architecture:
    others = {key: value for table in row[len(_COLUMNS) :] for key, value in table.items()}
    return _dense(name, *row[: len(_COLUMNS)], **others)


_BY_NAME = {name: _listed(name, row) for name, row in _TABLE["models"].items()}

# Number of experts in "8x7B", parameters, unit, and active parameters in "A3B".
_SIZE = re.compile(
    r"(?<![\w.])(?:(?P<experts>\d+)x)?(?P<size>\d+(?:\.\d+)?)\s*(?P<unit>[bBmMT])(?![a-z])"
    r"(?:[-_ ]*A(?P<active>\d+(?:\.\d+)?)B)?"
)
_UNITS = {"M": 1e-3, "B": 1.0, "T": 1e3}


def size_in_name(model: str) -> tuple[float, float] | None:
    """Parameters and active parameters in 1e9 from a name such as `Foo-30B-A3B`.

    None if the name has no size, more than one, or experts of a size ("8x7B"), which share weights.
    """
    found = list(_SIZE.finditer(model))
    if len(found) != 1 or found[0]["experts"]:
        return None
    total = float(found[0]["size"]) * _UNITS[found[0]["unit"].upper()]
    return total, float(found[0]["active"] or total)


def _key(name: str) -> str:
    return re.sub(r"[^a-z0-9.]", "", name.lower())


_BY_KEY = {_key(name): arch for name, arch in _BY_NAME.items()} | {
    alias: _BY_NAME[name] for alias, name in _TABLE["aliases"].items()
}


def public_names() -> list[str]:
    return list(_BY_NAME)


def find(model: str) -> Architecture | None:
    """The public architecture whose name occurs in `model`, or None. Spelling is normalised."""
    key = _key(model)
    hits = [name for name in _BY_KEY if name in key]
    return _BY_KEY[max(hits, key=len)] if hits else None


def nearest_public(params_b: float) -> Architecture:
    """The public dense model with the nearest number of parameters, in 1e9.

    A model whose name has that very size comes first: a "32B" is Qwen3-32B, not LLaMA-33B.
    """
    # The weights of the GPT models in the table, which are of papers, are not public.
    dense = [
        arch for arch in _BY_NAME.values() if not arch.experts and not arch.name.startswith("GPT-")
    ]

    def distance(arch: Architecture) -> tuple[bool, float]:
        named = size_in_name(arch.name) == (params_b, params_b)
        return not named, abs(math.log(arch.params_b / params_b))

    return min(dense, key=distance)


def with_sizes(arch: Architecture, params_b: float | None, active_b: float | None) -> Architecture:
    """The architecture with the parameter counts that a publication gives."""
    if params_b is not None and active_b is not None and active_b < 0.5 * params_b:
        arch = arch if arch.experts else mixture_of_size(params_b, active_b)
    total = params_b or arch.params_b
    active = active_b or (arch.active_b if params_b is None or arch.experts else params_b)
    return replace(arch, params_b=total, active_b=min(active, total))


def dense_of_size(params_b: float) -> Architecture:
    """A dense Llama-like model of about `params_b` 1e9 parameters.

    The depth grows with the cube root of the size: the nearest Llama shape is scaled so that
    12 * layers * hidden^2 gives the count. Heads have 128 values, and 8 of them hold keys.
    """
    layers = max(8, round(32 * (params_b / 7.0) ** (1 / 3)))
    hidden = max(512, round((params_b * 1e9 / (12 * layers)) ** 0.5 / 128) * 128)
    return _dense(f"dense {params_b:g}B", params_b, layers, hidden, hidden // 128, 8, 64000)


def mixture_of_size(params_b: float, active_b: float) -> Architecture:
    """A mixture of experts of about that size, in 1e9 parameters, of 128 experts with 8 per token.

    Layers and heads are those of a dense model whose size is the geometric mean of both counts.
    That gives the attention of Qwen3-30B-A3B, GLM-4.5-Air and DeepSeek-V3 within 30 %.
    """
    shape = dense_of_size((params_b * active_b) ** 0.5)
    return replace(
        shape, name=f"mixture of {params_b:g}B", params_b=params_b, active_b=active_b,
        experts=128, experts_per_token=8,
    )  # fmt: skip
