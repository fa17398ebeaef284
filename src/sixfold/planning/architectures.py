"""Sizes of public language models: what the arithmetic of time and memory needs.

Sources: `config.json` of each model on the Hugging Face hub, except GPT 22B to 1T (Korthikanti et
al., arXiv:2205.05198, table 3) and LLaMA (Touvron et al., arXiv:2302.13971, table 2). Parameter
counts are in 1e9 and include the embeddings.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from .kv_cache import kv_bytes_per_token, latent_bytes_per_token
from .roofline import expert_share


@dataclass(frozen=True)
class Architecture:
    """Sizes of a decoder-only transformer.

    Attributes:
        name: name of the model.
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


def _dense(
    name: str,
    params: float,
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    vocab: int,
    head_size: int = 0,
    tied: bool = False,
) -> Architecture:
    size = head_size or hidden // heads
    return Architecture(
        name, params, params, layers, hidden, heads, kv_heads, size, vocab, tied=tied
    )


_PUBLIC = (
    _dense("Llama-3.2-1B", 1.236, 16, 2048, 32, 8, 128256, tied=True),
    _dense("Llama-3.2-3B", 3.213, 28, 3072, 24, 8, 128256, tied=True),
    _dense("Llama-3-8B", 8.030, 32, 4096, 32, 8, 128256),
    _dense("Llama-3-70B", 70.554, 80, 8192, 64, 8, 128256),
    _dense("Llama-3-405B", 405.853, 126, 16384, 128, 8, 128256),
    _dense("Llama-2-7B", 6.738, 32, 4096, 32, 32, 32000),
    _dense("Llama-2-13B", 13.016, 40, 5120, 40, 40, 32000),
    _dense("Llama-2-34B", 33.74, 48, 8192, 64, 8, 32000),
    _dense("Llama-2-70B", 68.977, 80, 8192, 64, 8, 32000),
    _dense("LLaMA-7B", 6.738, 32, 4096, 32, 32, 32000),
    _dense("LLaMA-13B", 13.016, 40, 5120, 40, 40, 32000),
    _dense("LLaMA-33B", 32.529, 60, 6656, 52, 52, 32000),
    _dense("LLaMA-65B", 65.286, 80, 8192, 64, 64, 32000),
    _dense("Qwen2.5-0.5B", 0.494, 24, 896, 14, 2, 151936, tied=True),
    _dense("Qwen2.5-1.5B", 1.544, 28, 1536, 12, 2, 151936, tied=True),
    _dense("Qwen2.5-3B", 3.086, 36, 2048, 16, 2, 151936, tied=True),
    _dense("Qwen2.5-7B", 7.616, 28, 3584, 28, 4, 152064),
    _dense("Qwen2.5-14B", 14.770, 48, 5120, 40, 8, 152064),
    _dense("Qwen2.5-32B", 32.764, 64, 5120, 40, 8, 152064),
    _dense("Qwen2.5-72B", 72.706, 80, 8192, 64, 8, 152064),
    _dense("Qwen3-0.6B", 0.596, 28, 1024, 16, 8, 151936, 128, tied=True),
    _dense("Qwen3-1.7B", 1.721, 28, 2048, 16, 8, 151936, 128, tied=True),
    _dense("Qwen3-4B", 4.022, 36, 2560, 32, 8, 151936, 128, tied=True),
    _dense("Qwen3-8B", 8.191, 36, 4096, 32, 8, 151936, 128),
    _dense("Qwen3-14B", 14.768, 40, 5120, 40, 8, 151936, 128),
    _dense("Qwen3-32B", 32.762, 64, 5120, 64, 8, 151936, 128),
    # Three of four layers are linear attention.
    replace(_dense("Qwen3.5-9B", 9.0, 32, 4096, 16, 4, 248320, 256), attention_layers=8),
    _dense("Mistral-7B", 7.242, 32, 4096, 32, 8, 32000),
    _dense("GPT-22B", 22.0, 48, 6144, 64, 64, 51200, tied=True),
    _dense("GPT-175B", 175.0, 96, 12288, 96, 96, 51200, tied=True),
    _dense("GPT-530B", 530.0, 105, 20480, 128, 128, 51200, tied=True),
    _dense("GPT-1T", 1008.0, 128, 25600, 160, 160, 51200, tied=True),
    Architecture(
        "Qwen3-30B-A3B", 30.532, 3.353, 48, 2048, 32, 4, 128, 151936,
        experts=128, experts_per_token=8,
    ),
    Architecture(
        "Qwen3-235B-A22B", 235.094, 22.19, 94, 4096, 64, 4, 128, 151936,
        experts=128, experts_per_token=8,
    ),
    Architecture(
        "DeepSeek-V3", 671.026, 37.55, 61, 7168, 128, 128, 192, 129280,
        experts=256, experts_per_token=8, value_size=128, latent=512, rotary=64,
    ),
    Architecture(
        "Kimi-K2", 1026.0, 32.9, 61, 7168, 64, 64, 192, 163840,
        experts=384, experts_per_token=8, value_size=128, latent=512, rotary=64,
    ),
    Architecture(
        "GLM-4.5-Air", 106.85, 12.2, 46, 4096, 96, 8, 128, 151552,
        experts=128, experts_per_token=8,
    ),
    Architecture(
        "GLM-4.5", 352.8, 33.6, 92, 5120, 96, 8, 128, 151552,
        experts=160, experts_per_token=8,
    ),
    # 52 blocks: 6 of attention, 23 of Mamba-2, 23 of experts.
    Architecture(
        "Nemotron-3-Nano-30B-A3B", 31.6, 3.6, 52, 2688, 32, 2, 128, 131072,
        experts=128, experts_per_token=6, attention_layers=6,
    ),
    Architecture(
        "Qwen3-Coder-480B-A35B", 480.155, 35.5, 62, 6144, 96, 8, 128, 151936,
        experts=160, experts_per_token=8,
    ),
    # Three of four layers are linear attention.
    Architecture(
        "Qwen3-Next-80B-A3B", 79.7, 3.8, 48, 2048, 16, 2, 256, 151936,
        experts=512, experts_per_token=10, attention_layers=12,
    ),
    Architecture(
        "gpt-oss-20b", 20.91, 4.19, 24, 2880, 64, 8, 64, 201088,
        experts=32, experts_per_token=4,
    ),
    Architecture(
        "gpt-oss-120b", 116.8, 5.70, 36, 2880, 64, 8, 64, 201088,
        experts=128, experts_per_token=4,
    ),
    Architecture(
        "Moonlight-16B-A3B", 15.96, 2.91, 27, 2048, 16, 16, 192, 163840,
        experts=64, experts_per_token=6, value_size=128, latent=512, rotary=64,
    ),
    Architecture(
        "Mixtral-8x22B", 140.62, 39.15, 56, 6144, 48, 8, 128, 32768,
        experts=8, experts_per_token=2,
    ),
    Architecture(
        "Mixtral-8x7B", 46.703, 12.879, 32, 4096, 32, 8, 128, 32000,
        experts=8, experts_per_token=2,
    ),
)  # fmt: skip

# Other spellings -> name in the table. The longest one that occurs in a model's name is taken.
_ALIASES = {
    "qwen2.5math7b": "Qwen2.5-7B",
    "qwen2.5math1.5b": "Qwen2.5-1.5B",
    "r1distillqwen1.5b": "Qwen2.5-1.5B",
    "r1distillqwen7b": "Qwen2.5-7B",
    "r1distillqwen14b": "Qwen2.5-14B",
    "r1distillqwen32b": "Qwen2.5-32B",
    "r1distillllama8b": "Llama-3-8B",
    "r1distillllama70b": "Llama-3-70B",
    "llama3.18b": "Llama-3-8B",
    "llama3.170b": "Llama-3-70B",
    "llama3.370b": "Llama-3-70B",
    "llama3.1405b": "Llama-3-405B",
    "llama3405b": "Llama-3-405B",
    "codellama34b": "Llama-2-34B",
    "qwen330b3a": "Qwen3-30B-A3B",
    "qwen330b": "Qwen3-30B-A3B",
    "qwen3235b": "Qwen3-235B-A22B",
    "deepseekr1": "DeepSeek-V3",
    "intellect3": "GLM-4.5-Air",
    "qwq32b": "Qwen2.5-32B",
    "glm4.5355b": "GLM-4.5",
    "nemotron3nano": "Nemotron-3-Nano-30B-A3B",
}


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


_BY_NAME = {arch.name: arch for arch in _PUBLIC}
_BY_KEY = {_key(arch.name): arch for arch in _PUBLIC} | {
    alias: _BY_NAME[name] for alias, name in _ALIASES.items()
}


def public_names() -> list[str]:
    """Names of the public models in the table."""
    return list(_BY_NAME)


def find(model: str) -> Architecture | None:
    """The public architecture whose name occurs in `model`, or None. Spelling is normalised."""
    key = _key(model)
    hits = [name for name in _BY_KEY if name in key]
    return _BY_KEY[max(hits, key=len)] if hits else None


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
