"""The body of the common transformer (Llama, Qwen 2 and 3, Mistral and their kin), written out in the CPU kernels, on the module's own weights:
matrix products on a packed copy of them, and what stands between.

A module qualifies by what it computes, not by its name: its parts have the expected shapes, and on a probe with random weights the written-out body
gives the module's own hidden states. Every other module runs as it is; so does this one once it has changed (hooks, adapters, another dtype).

An update in place is seen at the next forward: PyTorch counts them, and the weights are packed anew. It does not count what is written through
`.data`, through NumPy or by another process: `refresh` is for those.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ..kernels.attention import AttentionLayer
from ..kernels.cpu.body_kernels import BodyKernels, CLayer, CLayers, CNorm, Packed, Rows
from .base import Body, CompiledLayout, LayerAdditions, Layout, ModuleBody

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

    def as_c(self) -> CNorm:
        return CNorm(self.weight.data_ptr(), self.epsilon)


@dataclass
class _Linear:
    """Linear layers that read the same x, as one product. paths: of each, from the top. packed: copies of their weights, made at the first use."""

    parts: list[Weights]
    paths: list[str]
    packed: Packed | None = None

    def pack(self, kernels: BodyKernels) -> Packed:
        """Copies of the layers' weights, if there are none yet as they are now."""
        if self.packed is None:
            self.packed = kernels.pack([part["weight"] for part in self.parts], [part.get("bias") for part in self.parts])  # type: ignore[misc]
        return self.packed

    def run(self, kernels: BodyKernels, x: Tensor, out: Tensor, additions: LayerAdditions | None, *, add: bool = False) -> None:
        """out = (out, if `add`, and) x W^T + b, and what is added to it"""
        kernels.product(x, self.pack(kernels), out, add=add)
        if additions is not None:
            for path, own in zip(self.paths, out.split([_rows(part) for part in self.parts], dim=1), strict=True):
                additions.add(path, x, own)


@dataclass(frozen=True)
class _Layer:
    """One layer's parts."""

    qkv: _Linear
    output: _Linear
    gate_up: _Linear
    down: _Linear
    before_attention: _Norm
    before_mlp: _Norm
    heads: tuple[_Norm, _Norm] | None

    def as_c(self, kernels: BodyKernels) -> CLayer:
        linears = (linear.pack(kernels).as_c() for linear in (self.qkv, self.output, self.gate_up, self.down))
        heads = (norm.as_c() for norm in self.heads) if self.heads else (CNorm(), CNorm())
        return CLayer(*linears, self.before_attention.as_c(), self.before_mlp.as_c(), *heads)


class FusedDecoder:
    """The body of a module and the product of its head. `ready` comes before each forward: what follows believes what it found."""

    def __init__(self, model: ModuleBody, kernels: BodyKernels) -> None:
        body, head = model.module.get_submodule("model"), model.module._modules.get("lm_head")
        watched = [*body.modules(), *([] if head is None else head.modules())]
        self._model = model
        self._kernels = kernels
        self._parts = [(module._modules, dict(module._modules)) for module in [model.module, *watched]]
        self._parameters = [module._parameters for module in watched if module._parameters]
        self._hooks = [hooks for module in watched for hooks in (module._forward_pre_hooks, module._forward_hooks)]
        self._rotary = body.get_submodule("rotary_emb")
        self._embedding = body.get_submodule("embed_tokens")._parameters
        self._norm = _norm(body.get_submodule("norm"))
        self._layers = [_layer(block, f"model.layers.{name}") for name, block in body.get_submodule("layers").named_children()]
        self._head = _Linear([head._parameters], ["lm_head"]) if type(head) is nn.Linear else None
        self._linears = [linear for layer in self._layers for linear in (layer.qkv, layer.output, layer.gate_up, layer.down)]
        self._linears += [] if self._head is None else [self._head]
        self._attention: list[AttentionLayer] = []
        first = self._layers[0]
        self._width = 2 * self._rotary.get_buffer("inv_freq").numel()
        self._heads, self._kv_heads = (_rows(part) // self._width for part in first.qkv.parts[:2])
        self._inner = _rows(first.down.parts[0], 1)
        self._table = (torch.empty(0), torch.empty(0))
        self._packed_from: tuple[list[nn.Parameter], list[tuple[int, int, int]]] = ([], [])
        self._readable = False
        self._compiled: CLayers | None = None

    @property
    def steady(self) -> bool:
        """As `Body.steady`."""
        return self._head is not None

    def ready(self) -> Body:
        """As `Body.ready`: the rest of this class believes that nothing has changed since."""
        return self if self._as_built() else self._model

    def refresh(self) -> None:
        """As `Body.refresh`. The copies go at once; the next forward makes others."""
        self._packed_from, self._compiled = ([], []), None
        for linear in self._linears:
            linear.packed = None

    def release(self) -> None:
        """As `Body.release`."""
        self.refresh()

    def footing(self) -> None:
        """It runs on the CPU, which has no graphs."""

    def hidden(self, tokens: Tensor, positions: Tensor, layout: Layout, additions: LayerAdditions | None = None) -> Tensor:
        """As `Body.hidden`."""
        rows, table = self._rows(tokens), self._angles(int(positions.max()) + 1)
        if additions is None and isinstance(layout, CompiledLayout):
            attention = layout.compiled(*self._heads_of(rows.qkv), self._attention)
            if attention is not None:
                return self._kernels.body(self._as_c(), rows, self._heads, self._kv_heads, table, positions, attention)
        return self._written_out(rows, positions, layout, table, additions)

    def logits(self, hidden: Tensor) -> Tensor:
        """As `Body.logits`."""
        if self._head is None:
            return self._model.logits(hidden)
        logits = hidden.new_empty(len(hidden), _rows(self._head.parts[0]))
        self._head.run(self._kernels, hidden, logits, None)
        return self._model.scaled(logits)

    def _as_built(self) -> bool:
        """Whether the module is still the one that was compared: nothing hooked on, no part exchanged, its weights what the kernels read."""
        return not any(self._hooks) and all(now == then for now, then in self._parts) and self._look_at_weights()

    def _look_at_weights(self) -> bool:
        """Drop the copies if a weight changed; False if the kernels cannot read the weights."""
        weights = [p for own in self._parameters for p in own.values() if p is not None]
        state = [(id(p), p.data_ptr(), -1 if p.is_inference() else p._version) for p in weights]
        if state != self._packed_from[1]:
            self._readable = all(p.dtype is torch.float32 and p.is_cpu and p.is_contiguous() and not p.is_inference() for p in weights)
            self.refresh()
            self._packed_from = (weights, state)  # held on to: the number of an object that is gone may come again
        return self._readable

    def _rows(self, tokens: Tensor) -> Rows:
        x = self._embedding["weight"].index_select(0, tokens)  # type: ignore[union-attr]
        qkv = x.new_empty(len(x), (self._heads + 2 * self._kv_heads) * self._width)
        return Rows(x, torch.empty_like(x), qkv, x.new_empty(len(x), 2 * self._inner))

    def _heads_of(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [1, heads, N, D], keys and values [1, kv_heads, N, D]."""
        widths = [heads * self._width for heads in (self._heads, self._kv_heads, self._kv_heads)]
        queries, keys, values = (part.view(1, len(qkv), -1, self._width).transpose(1, 2) for part in qkv.split(widths, dim=1))
        return queries, keys, values

    def _as_c(self) -> CLayers:
        if self._compiled is None:
            layers = [layer.as_c(self._kernels) for layer in self._layers]
            self._compiled = CLayers((CLayer * len(layers))(*layers), self._norm.as_c())
        return self._compiled

    def _written_out(
        self, rows: Rows, positions: Tensor, layout: Layout, table: tuple[Tensor, Tensor], additions: LayerAdditions | None = None
    ) -> Tensor:
        """What `BodyKernels.body` does, operation by operation, for what stands between or attends in another way: the same bits."""
        kernels, count = self._kernels, len(positions)
        x, normed, qkv, gate_up = rows.x, rows.normed, rows.qkv, rows.gate_up
        queries, keys, values = self._heads_of(qkv)
        for layer, attention in zip(self._layers, self._attention, strict=True):
            kernels.rms_norm(x, layer.before_attention.weight, layer.before_attention.epsilon, normed)
            layer.qkv.run(kernels, normed, qkv, additions)
            norms = layer.heads and (layer.heads[0].weight, layer.heads[1].weight, layer.heads[0].epsilon)
            kernels.rotate(qkv, self._heads, self._kv_heads, norms, table, positions)
            layer.output.run(kernels, layout.attend(queries, keys, values, attention).view(count, -1), x, additions, add=True)
            kernels.rms_norm(x, layer.before_mlp.weight, layer.before_mlp.epsilon, normed)
            layer.gate_up.run(kernels, normed, gate_up, additions)
            layer.down.run(kernels, kernels.silu_mul(gate_up), x, additions, add=True)
        return kernels.rms_norm(x, self._norm.weight, self._norm.epsilon, normed)

    def _angles(self, positions: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines [P, D / 2] of at least so many positions, as the module itself computes them."""
        if positions > len(self._table[0]):
            self._table = self._angles_at(torch.arange(max(positions, 2 * len(self._table[0]), 256)))
        return self._table

    def _angles_at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        cosines, sines = self._rotary(torch.empty(0), positions[None])
        half = self._width // 2
        return cosines[0, :, :half].contiguous(), sines[0, :, :half].contiguous()

    def agrees(self, context: int) -> bool:
        """Compare with the module on two texts, the second at the end of the context; learn from it what its attention layers ask for."""
        spans = ((0, 5), (5, 13))
        positions = torch.cat([torch.arange(5), torch.arange(8) + max(0, context - 8)])
        tokens = torch.arange(13) * self._embedding["weight"].shape[0] // 13  # type: ignore[union-attr]
        probe = _Probe(spans)
        theirs = self._model.hidden(tokens, positions, probe)
        if [kernel.layer for kernel in probe.kernels] != list(range(len(self._layers))):
            return False
        if any(kernel.sinks is not None for kernel in probe.kernels):  # weights: those of the probe would be kept for good
            return False
        self._attention = probe.kernels
        if not self._as_built():
            return False
        made: dict[tuple[int, ...], Packed] = {}  # all layers of a probe may have one layer's weights: one copy will do
        for linear in self._linears:
            key = tuple(id(p) for part in linear.parts for p in part.values())
            if linear is not self._head:
                linear.packed = made.get(key)
                made[key] = linear.pack(self._kernels)
        ours = self._written_out(self._rows(tokens), torch.arange(13), _Probe(spans), self._angles_at(positions))
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


class _WithWeights(nn.Module):
    """For `functional_call`: runs what it is given while the model has other weights."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, run: Callable[[], bool]) -> bool:
        return run()


@torch.no_grad()  # not inference_mode: PyTorch counts no writes to what is made there
def fused_decoder(model: ModuleBody, kernels: BodyKernels) -> FusedDecoder | None:
    """The module's body written out; None where it is another architecture, or not float32 on the CPU."""
    if not _has_parts(model.module):
        return None
    if any(p.dtype != torch.float32 or not p.is_cpu for p in model.module.parameters()):
        return None
    decoder = FusedDecoder(model, kernels)
    # The model's own weights may hide a difference: a projection that starts at zero hides all that is before it.
    blocks = list(model.module.get_submodule("model.layers").children())
    random = _random_weights(blocks[0])
    weights = {f"model.model.layers.{i}.{name}": value for i in range(len(blocks)) for name, value in random.items()}
    context = vars(model.module.config)["max_position_embeddings"]
    same = torch.func.functional_call(_WithWeights(model.module), weights, (lambda: decoder.agrees(context),))
    decoder.refresh()
    return decoder if same else None


def _random_weights(block: nn.Module) -> dict[str, Tensor]:
    """One layer's worth, by parameter name; all layers can have the same."""
    generator, made = torch.Generator().manual_seed(0), {}
    for name, p in block.named_parameters():
        value = torch.empty(p.shape)
        made[name] = value.uniform_(0.5, 1.5, generator=generator) if p.dim() == 1 else value.normal_(0, p.shape[1] ** -0.5, generator=generator)
    return made


def _has_parts(module: nn.Module) -> bool:
    """Whether every part that the written-out body uses is there, and no part that it would leave out."""
    body = module._modules.get("model")
    if body is None or set(body._modules) != {"embed_tokens", "layers", "norm", "rotary_emb"}:
        return False
    embedding, rotary, layers = body.get_submodule("embed_tokens"), body.get_submodule("rotary_emb"), list(body.get_submodule("layers").children())
    if type(embedding) is not nn.Embedding or embedding.max_norm is not None or not _is_norm(body.get_submodule("norm")):
        return False
    config = vars(module).get("config")
    limited = config is not None and "max_position_embeddings" in vars(config)
    static = vars(rotary).get("rope_type") in STATIC_ROPE and "inv_freq" in rotary._buffers
    if not (limited and static and layers and all(_layer_has_parts(block) for block in layers)):
        return False
    shapes = [{name: tuple(p.shape) for name, p in block.named_parameters()} for block in layers]
    expected = _shapes(shapes[0], embedding.weight.shape[1], 2 * rotary.get_buffer("inv_freq").numel())
    return all(layer == shapes[0] for layer in shapes) and expected.items() <= shapes[0].items()


def _layer_has_parts(block: nn.Module) -> bool:
    if set(block._modules) != PARTS:
        return False
    for room, names in LINEARS.items():
        found = block.get_submodule(room)._modules
        if not set(names) <= set(found) <= set(names) | OTHERS[room] or any(type(found[name]) is not nn.Linear for name in names):
            return False
    heads = {"q_norm", "k_norm"} & set(block.get_submodule("self_attn")._modules)
    return len(heads) != 1 and all(_is_norm(m) for name, m in block.named_modules() if name.endswith("norm"))


def _is_norm(module: nn.Module) -> bool:
    return set(module._parameters) == {"weight"} and "variance_epsilon" in vars(module)


def _shapes(layer: dict[str, tuple[int, ...]], hidden: int, width: int) -> dict[str, tuple[int, ...]]:
    """What the weights of a layer like this must be: whole heads, as wide as the rotation, and the norms over all that they stand before."""
    heads, kv_heads = (max(1, layer[f"self_attn.{name}.weight"][0] // width) for name in ("q_proj", "k_proj"))
    inner = layer["mlp.gate_proj.weight"][0]
    expected: dict[str, tuple[int, ...]] = {f"{name}.weight": (hidden,) for name in ("input_layernorm", "post_attention_layernorm")}
    expected |= {f"self_attn.{name}.weight": (n * width, hidden) for name, n in (("q_proj", heads), ("k_proj", kv_heads), ("v_proj", kv_heads))}
    expected |= {f"mlp.{name}.weight": (inner, hidden) for name in ("gate_proj", "up_proj")}
    expected |= {"self_attn.o_proj.weight": (hidden, heads * width), "mlp.down_proj.weight": (hidden, inner)}
    return expected | {name: (width,) for name in ("self_attn.q_norm.weight", "self_attn.k_norm.weight") if name in layer}


def _layer(block: nn.Module, path: str) -> _Layer:
    attention = block.get_submodule("self_attn")

    def linear(room: str, *names: str) -> _Linear:
        return _Linear([block.get_submodule(f"{room}.{name}")._parameters for name in names], [f"{path}.{room}.{name}" for name in names])

    return _Layer(
        linear("self_attn", "q_proj", "k_proj", "v_proj"),
        linear("self_attn", "o_proj"),
        linear("mlp", "gate_proj", "up_proj"),
        linear("mlp", "down_proj"),
        _norm(block.get_submodule("input_layernorm")),
        _norm(block.get_submodule("post_attention_layernorm")),
        (_norm(attention.get_submodule("q_norm")), _norm(attention.get_submodule("k_norm"))) if "q_norm" in attention._modules else None,
    )


def _norm(module: nn.Module) -> _Norm:
    return _Norm(module._parameters, module.variance_epsilon)  # type: ignore[arg-type]


def _rows(weights: Weights, dimension: int = 0) -> int:
    return weights["weight"].shape[dimension]  # type: ignore[union-attr]
