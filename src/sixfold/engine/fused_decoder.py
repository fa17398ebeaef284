"""The body of the common transformer (Llama, Qwen 2 and 3, Mistral and their kin), written out: PyTorch's matrix products, and between them the CPU
kernels, on the module's own weights. An update of them in place is seen at once.

A module qualifies by what it computes, not by its name: its parts have the expected shapes, and on a probe the written-out body gives the module's
own hidden states. Every other module runs as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from .cpu_kernels import CPUKernels, cpu_kernels
from .language_model import AttentionLayer, LanguageModel, Layout

STATIC_ROPE = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings whose angles depend on the position alone, not on how long the sequence is."""
TOLERANCE = 1e-4
"""Of the probe's hidden states, relative to their size: rounding is a hundred times less, a missing part many times more."""
PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
LINEARS = {"self_attn": ["q_proj", "k_proj", "v_proj", "o_proj"], "mlp": ["gate_proj", "up_proj", "down_proj"]}
OTHERS = {"self_attn": {"q_norm", "k_norm"}, "mlp": {"act_fn"}}

Weights = Mapping[str, Tensor | None]
"""A module's own parameters by name: looked up at every use, so that a parameter put in another's place counts."""


@dataclass(frozen=True)
class _Norm:
    weights: Weights
    epsilon: float

    @property
    def weight(self) -> Tensor:
        return self.weights["weight"]  # type: ignore[return-value]


@dataclass(frozen=True)
class _Layer:
    """One layer's parts, by the names that they have in the module."""

    linear: dict[str, Weights]
    before_attention: _Norm
    before_mlp: _Norm
    heads: tuple[_Norm, _Norm] | None

    def project(self, name: str, x: Tensor, out: Tensor) -> None:
        """out = x W^T + b"""
        weight, bias = self.linear[name]["weight"], self.linear[name].get("bias")
        if bias is None:
            torch.mm(x, weight.t(), out=out)  # type: ignore[union-attr]
        else:
            torch.addmm(bias, x, weight.t(), out=out)  # type: ignore[union-attr]

    def add(self, name: str, x: Tensor, to: Tensor) -> None:
        """to += x W^T + b"""
        weight, bias = self.linear[name]["weight"], self.linear[name].get("bias")
        to.addmm_(x, weight.t())  # type: ignore[union-attr]
        if bias is not None:
            to.add_(bias)


class FusedDecoder:
    """The body of a module as `_layers` describes it: tokens, positions [N] -> hidden states [N, hidden]."""

    def __init__(self, module: nn.Module, kernels: CPUKernels) -> None:
        body = module.get_submodule("model")
        self._kernels = kernels
        self._rotary = body.get_submodule("rotary_emb")
        self._embedding = body.get_submodule("embed_tokens")._parameters
        self._norm = _norm(body.get_submodule("norm"))
        self._layers = [_layer(block) for block in body.get_submodule("layers").children()]
        self._attention: list[AttentionLayer] = []
        first = self._layers[0].linear
        self._width = 2 * self._rotary.get_buffer("inv_freq").numel()
        self._heads, self._kv_heads = (_rows(first[name]) // self._width for name in ("q_proj", "k_proj"))
        self._inner = _rows(first["gate_proj"])
        self._table = (torch.empty(0), torch.empty(0))

    def hidden(self, tokens: Tensor, positions: Tensor, layout: Layout) -> Tensor:
        """As `LanguageModel.hidden`."""
        kernels, count = self._kernels, len(tokens)
        table = self._angles(int(positions.max()) + 1)
        x = self._embedding["weight"].index_select(0, tokens)  # type: ignore[union-attr]
        normed = torch.empty_like(x)
        q_width, kv_width = self._heads * self._width, self._kv_heads * self._width
        qkv = x.new_empty(count, q_width + 2 * kv_width)
        q, k, v = qkv.split((q_width, kv_width, kv_width), dim=1)
        queries, keys, values = (part.view(1, count, -1, self._width).transpose(1, 2) for part in (q, k, v))
        gate, up = x.new_empty(2, count, self._inner)
        for layer, attention in zip(self._layers, self._attention, strict=True):
            kernels.rms_norm(x, layer.before_attention.weight, layer.before_attention.epsilon, normed)
            for name, out in (("q_proj", q), ("k_proj", k), ("v_proj", v)):
                layer.project(name, normed, out)
            norms = layer.heads and (layer.heads[0].weight, layer.heads[1].weight, layer.heads[0].epsilon)
            kernels.rotate(qkv, self._heads, self._kv_heads, norms, table, positions)
            layer.add("o_proj", layout.attend(queries, keys, values, attention).view(count, q_width), x)
            kernels.rms_norm(x, layer.before_mlp.weight, layer.before_mlp.epsilon, normed)
            layer.project("gate_proj", normed, gate)
            layer.project("up_proj", normed, up)
            layer.add("down_proj", kernels.silu_mul(gate, up), x)
        return kernels.rms_norm(x, self._norm.weight, self._norm.epsilon, normed)

    def _angles(self, positions: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines [P, D / 2] of at least so many positions, as the module itself computes them."""
        if positions > len(self._table[0]):
            at = torch.arange(max(positions, 2 * len(self._table[0]), 256))
            both = self._rotary(torch.empty(0), at[None])
            self._table = tuple(t[0, :, : self._width // 2].contiguous() for t in both)  # type: ignore[assignment]
        return self._table

    def qualifies(self, model: LanguageModel, context: int) -> bool:
        """Compare with the module on two texts, the second at the end of the context; learn from it what its attention layers ask for."""
        spans = ((0, 5), (5, 13))
        positions = torch.cat([torch.arange(5), torch.arange(8) + max(0, context - 8)])
        tokens = torch.arange(1, 14) % self._embedding["weight"].shape[0]  # type: ignore[union-attr]
        probe = _Probe(spans)
        theirs = model.hidden(tokens, positions, probe)
        if [kernel.layer for kernel in probe.kernels] != list(range(len(self._layers))):
            return False
        self._attention = probe.kernels
        ours = self.hidden(tokens, positions, _Probe(spans))
        return bool((ours - theirs).abs().max() <= TOLERANCE * (1 + theirs.abs().max()))


@dataclass
class _Probe:
    """Texts one after another in a row, by the layers' own attention; keeps what each layer asked for."""

    spans: tuple[tuple[int, int], ...]
    kernels: list[AttentionLayer] = field(default_factory=list)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, kernel: AttentionLayer) -> Tensor:
        self.kernels.append(kernel)
        out = []
        for a, b in self.spans:
            at = torch.arange(b - a)
            seen = at[:, None] >= at
            if kernel.window is not None:
                seen &= at[:, None] - at < kernel.window
            out.append(kernel.attend(q[:, :, a:b], k[:, :, a:b], v[:, :, a:b], seen))
        return torch.cat(out, dim=2).transpose(1, 2).contiguous()


@torch.inference_mode()
def fused_decoder(model: LanguageModel) -> FusedDecoder | None:
    """The module's body written out; None where it is another architecture, not float32 on the CPU, or there are no kernels."""
    kernels = cpu_kernels()
    module = model.module
    if kernels is None or not _has_parts(module) or any(p.dtype != torch.float32 or p.device.type != "cpu" for p in module.parameters()):
        return None
    decoder = FusedDecoder(module, kernels)
    context = module.config.get_text_config().max_position_embeddings  # type: ignore[union-attr, operator]
    return decoder if decoder.qualifies(model, context) else None


def _has_parts(module: nn.Module) -> bool:
    """Whether every part that the written-out body uses is there, and no part that it would leave out."""
    body = module._modules.get("model")
    if body is None or set(body._modules) != {"embed_tokens", "layers", "norm", "rotary_emb"}:
        return False
    rotary, layers = body.get_submodule("rotary_emb"), list(body.get_submodule("layers").children())
    plain = vars(rotary).get("rope_type") in STATIC_ROPE and "inv_freq" in rotary._buffers
    return plain and bool(layers) and all(_layer_has_parts(block) for block in layers)


def _layer_has_parts(block: nn.Module) -> bool:
    if set(block._modules) != PARTS:
        return False
    for room, names in LINEARS.items():
        found = block.get_submodule(room)._modules
        if not set(names) <= set(found) <= set(names) | OTHERS[room] or any(type(found[name]) is not nn.Linear for name in names):
            return False
    norms = [m for name, m in block.named_modules() if name.endswith("norm")]
    heads = {"q_norm", "k_norm"} & set(block.get_submodule("self_attn")._modules)
    return len(heads) != 1 and all(set(m._parameters) == {"weight"} and "variance_epsilon" in vars(m) for m in norms)


def _layer(block: nn.Module) -> _Layer:
    attention = block.get_submodule("self_attn")
    linear: dict[str, Weights] = {name: block.get_submodule(f"{room}.{name}")._parameters for room, names in LINEARS.items() for name in names}
    heads = (_norm(attention.get_submodule("q_norm")), _norm(attention.get_submodule("k_norm"))) if "q_norm" in attention._modules else None
    return _Layer(linear, _norm(block.get_submodule("input_layernorm")), _norm(block.get_submodule("post_attention_layernorm")), heads)


def _norm(module: nn.Module) -> _Norm:
    return _Norm(module._parameters, module.variance_epsilon)  # type: ignore[arg-type]


def _rows(weights: Weights) -> int:
    return weights["weight"].shape[0]  # type: ignore[union-attr]
