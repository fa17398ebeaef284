"""Run the body of common transformers on the CPU kernels.

Supported are Llama, Qwen 2 and 3, Mistral and similar architectures. The kernels compute the matrix
products on packed copies of the module's weights, and all operations between the products.

A module qualifies by what it computes, not by its name. Its submodules must have the expected
shapes, and on a probe with random weights the kernels must reproduce its hidden states. All other
modules run as they are, and so does a module that changed later (hooks, adapters, another dtype).

With `half`, the packed copies are bfloat16 and the products round their inputs to bfloat16. Sums
and everything else stay float32.

PyTorch counts in-place updates of a weight, so an updated weight is packed again at the next
forward pass. PyTorch does not count writes through `.data`, through NumPy or by another process:
call `refresh` after those.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ..kernels.attention import AttentionLayer
from ..kernels.cpu.body_kernels import BodyKernels, CLayer, CLayers, Packed, Rows
from .base import Body, CompiledLayout, LayerAdditions, Layout, ModuleBody
from .decoder_layer import Linear, layer_of, norm_of, rows_of
from .decoder_parts import has_decoder_parts

TOLERANCE = 1e-4
"""Largest accepted difference of the probe's hidden states, relative to their magnitude.

Rounding is a hundred times smaller; a missing component makes a difference many times larger.
"""


class FusedDecoder:
    """A module's body and output head on the CPU kernels.

    Call `ready` before each forward pass: the other methods assume that the module has not changed
    since.

    Args:
        model: the module, whose submodules have passed `has_decoder_parts`.
    """

    def __init__(self, model: ModuleBody, kernels: BodyKernels) -> None:
        body, head = model.module.get_submodule("model"), model.module._modules.get("lm_head")
        watched = [*body.modules(), *([] if head is None else head.modules())]
        self._model = model
        self._kernels = kernels
        self._parts = [
            (module._modules, dict(module._modules)) for module in [model.module, *watched]
        ]
        self._parameters = [module._parameters for module in watched if module._parameters]
        self._hooks = [
            hooks
            for module in watched
            for hooks in (module._forward_pre_hooks, module._forward_hooks)
        ]
        self._rotary = body.get_submodule("rotary_emb")
        self._embedding = body.get_submodule("embed_tokens")._parameters
        self._norm = norm_of(body.get_submodule("norm"))
        self._layers = [
            layer_of(block, f"model.layers.{name}")
            for name, block in body.get_submodule("layers").named_children()
        ]
        self._head = Linear([head._parameters], ["lm_head"]) if type(head) is nn.Linear else None
        self._linears = [
            linear
            for layer in self._layers
            for linear in (layer.qkv, layer.output, layer.gate_up, layer.down)
        ]
        self._linears += [] if self._head is None else [self._head]
        self._attention: list[AttentionLayer] = []
        first = self._layers[0]
        self._width = 2 * self._rotary.get_buffer("inv_freq").numel()
        self._heads, self._kv_heads = (rows_of(part) // self._width for part in first.qkv.parts[:2])
        self._inner = rows_of(first.down.parts[0], 1)
        self._table = (torch.empty(0), torch.empty(0))
        self._packed_from: tuple[list[nn.Parameter], list[tuple[int, int, int]]] = ([], [])
        self._readable = False
        self._half = False
        self._compiled: CLayers | None = None

    @property
    def steady(self) -> bool:
        return self._head is not None

    def ready(self) -> Body:
        """As `Body.ready`.

        The other methods assume that the module has not changed since this call.
        """
        return self if self._as_built() else self._model

    def refresh(self) -> None:
        """As `Body.refresh`.

        The copies are freed immediately; the next forward pass makes new ones.
        """
        self._packed_from, self._compiled = ([], []), None
        for linear in self._linears:
            linear.packed = None

    def release(self) -> None:
        self.refresh()

    def use_half(self) -> None:
        """Pack the weights in bfloat16 from now on."""
        self.refresh()
        self._half = True
        for linear in self._linears:
            linear.half = True

    def graph_fingerprint(self) -> None:
        """None: the CPU has no CUDA graphs."""

    def hidden(
        self,
        tokens: Tensor,
        positions: Tensor,
        layout: Layout,
        additions: LayerAdditions | None = None,
    ) -> Tensor:
        rows, table = self._rows(tokens), self._angles(int(positions.max()) + 1)
        if additions is None and isinstance(layout, CompiledLayout):
            attention = layout.compiled(*self._heads_of(rows.qkv), self._attention)
            if attention is not None:
                return self._kernels.body(
                    self._as_c(),
                    rows,
                    self._heads,
                    self._kv_heads,
                    table,
                    positions,
                    attention,
                    self._half,
                )
        return self._written_out(rows, positions, layout, table, additions)

    def logits(self, hidden: Tensor) -> Tensor:
        if self._head is None:
            return self._model.logits(hidden)
        logits = hidden.new_empty(len(hidden), rows_of(self._head.parts[0]))
        self._head.run(self._kernels, hidden, logits, None)
        return self._model.scaled(logits)

    def _as_built(self) -> bool:
        """True if the module is unchanged since this object was made.

        It has no hooks, the same submodules, and weights that the kernels can read.
        """
        return (
            not any(self._hooks)
            and all(now == then for now, then in self._parts)
            and self._look_at_weights()
        )

    def _look_at_weights(self) -> bool:
        """Drop the packed copies if a weight changed.

        Returns False if the kernels cannot read the weights.
        """
        weights = [p for own in self._parameters for p in own.values() if p is not None]
        state = [(id(p), p.data_ptr(), -1 if p.is_inference() else p._version) for p in weights]
        if state != self._packed_from[1]:
            self._readable = all(
                p.dtype is torch.float32 and p.is_cpu and p.is_contiguous() and not p.is_inference()
                for p in weights
            )
            self.refresh()
            # Keep the parameters alive: Python reuses the id of a freed object.
            self._packed_from = (weights, state)
        return self._readable

    def _rows(self, tokens: Tensor) -> Rows:
        x = self._embedding["weight"].index_select(0, tokens)  # type: ignore[union-attr]
        qkv = x.new_empty(len(x), (self._heads + 2 * self._kv_heads) * self._width)
        return Rows(x, torch.empty_like(x), qkv, x.new_empty(len(x), 2 * self._inner))

    def _heads_of(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Views of qkv: queries [1, heads, N, D], keys and values [1, kv_heads, N, D]."""
        widths = [heads * self._width for heads in (self._heads, self._kv_heads, self._kv_heads)]
        queries, keys, values = (
            part.view(1, len(qkv), -1, self._width).transpose(1, 2)
            for part in qkv.split(widths, dim=1)
        )
        return queries, keys, values

    def _as_c(self) -> CLayers:
        if self._compiled is None:
            layers = [layer.as_c(self._kernels) for layer in self._layers]
            self._compiled = CLayers((CLayer * len(layers))(*layers), self._norm.as_c())
        return self._compiled

    def _written_out(
        self,
        rows: Rows,
        positions: Tensor,
        layout: Layout,
        table: tuple[Tensor, Tensor],
        additions: LayerAdditions | None = None,
    ) -> Tensor:
        """Compute what `BodyKernels.body` computes, one operation at a time. The bits are the same.

        Needed if additions go between the operations, or if the layout has no compiled attention.

        Args:
            rows: embedded tokens and work buffers.
            positions: position of each token in its sequence, [N].
            table: cosines and sines of the rotary embedding, [P, D / 2] each.
            additions: added to the outputs of linear layers.

        Returns:
            Hidden states [N, hidden] after the final norm.
        """
        kernels, count = self._kernels, len(positions)
        x, normed, qkv, gate_up = rows.x, rows.normed, rows.qkv, rows.gate_up
        queries, keys, values = self._heads_of(qkv)
        for layer, attention in zip(self._layers, self._attention, strict=True):
            kernels.rms_norm(
                x, layer.before_attention.weight, layer.before_attention.epsilon, normed
            )
            layer.qkv.run(kernels, normed, qkv, additions)
            norms = layer.heads and (
                layer.heads[0].weight,
                layer.heads[1].weight,
                layer.heads[0].epsilon,
            )
            kernels.rotate(qkv, self._heads, self._kv_heads, norms, table, positions)
            layer.output.run(
                kernels,
                # Under autocast, PyTorch's attention may return half precision.
                layout.attend(queries, keys, values, attention).view(count, -1).float(),
                x,
                additions,
                add=True,
            )
            kernels.rms_norm(x, layer.before_mlp.weight, layer.before_mlp.epsilon, normed)
            layer.gate_up.run(kernels, normed, gate_up, additions)
            layer.down.run(kernels, kernels.silu_mul(gate_up), x, additions, add=True)
        return kernels.rms_norm(x, self._norm.weight, self._norm.epsilon, normed)

    def _angles(self, positions: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines [P, D / 2] from the module's rotary embedding, for P >= `positions`."""
        if positions > len(self._table[0]):
            self._table = self._angles_at(
                torch.arange(max(positions, 2 * len(self._table[0]), 256))
            )
        return self._table

    def _angles_at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        cosines, sines = self._rotary(torch.empty(0), positions[None])
        half = self._width // 2
        return cosines[0, :, :half].contiguous(), sines[0, :, :half].contiguous()

    def agrees(self, context: int) -> bool:
        """Compare the hidden states of two sequences with the module's.

        The second sequence is at the end of the context. The module's attention parameters are
        recorded for later forward passes.

        Args:
            context: longest sequence of the model, in tokens.

        Returns:
            True if the hidden states agree within `TOLERANCE`.
        """
        spans = ((0, 5), (5, 13))
        positions = torch.cat([torch.arange(5), torch.arange(8) + max(0, context - 8)])
        tokens = torch.arange(13) * self._embedding["weight"].shape[0] // 13  # type: ignore[union-attr]
        probe = _Probe(spans)
        theirs = self._model.hidden(tokens, positions, probe)
        if [kernel.layer for kernel in probe.kernels] != list(range(len(self._layers))):
            return False
        # Sinks are weights: the recorded layers would keep the probe's random values.
        if any(kernel.sinks is not None for kernel in probe.kernels):
            return False
        self._attention = probe.kernels
        if not self._as_built():
            return False
        # All layers of a probe may share one layer's weights: pack them only once.
        made: dict[tuple[int, ...], Packed] = {}
        for linear in self._linears:
            key = tuple(id(p) for part in linear.parts for p in part.values())
            if linear is not self._head:
                linear.packed = made.get(key)
                made[key] = linear.pack(self._kernels)
        ours = self._written_out(
            self._rows(tokens), torch.arange(13), _Probe(spans), self._angles_at(positions)
        )
        return bool((ours - theirs).abs().max() <= TOLERANCE * (1 + theirs.abs().max()))


@dataclass
class _Probe:
    """Layout of several sequences packed in one row. It records attention parameters.

    Attributes:
        spans: [start, stop) of each sequence.
        kernels: attention parameters of each layer, in call order.
    """

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
    """Wrapper for `functional_call`: calls `run` while the model's weights are replaced."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, run: Callable[[], bool]) -> bool:
        return run()


@torch.no_grad()  # not inference_mode: PyTorch does not count writes to tensors made there
def fused_decoder(
    model: ModuleBody, kernels: BodyKernels, half: bool = False
) -> FusedDecoder | None:
    """The module on the CPU kernels; None if the kernels do not support it.

    Supported modules have the common transformer architecture and float32 weights on the CPU.

    Args:
        half: compute products in bfloat16. The probe that decides whether the kernels support the
            module still runs in float32.
    """
    if not has_decoder_parts(model.module):
        return None
    if any(p.dtype != torch.float32 or not p.is_cpu for p in model.module.parameters()):
        return None
    decoder = FusedDecoder(model, kernels)
    # Probe with random weights. The model's own may hide a difference: a projection initialized to
    # zero hides everything before it.
    blocks = list(model.module.get_submodule("model.layers").children())
    random = _random_weights(blocks[0])
    weights = {
        f"model.model.layers.{i}.{name}": value
        for i in range(len(blocks))
        for name, value in random.items()
    }
    context = vars(model.module.config)["max_position_embeddings"]
    same = torch.func.functional_call(
        _WithWeights(model.module), weights, (lambda: decoder.agrees(context),)
    )
    decoder.refresh()
    if half:
        decoder.use_half()
    return decoder if same else None


def _random_weights(block: nn.Module) -> dict[str, Tensor]:
    """Random weights of one layer, by parameter name. All layers of the probe share them."""
    generator, made = torch.Generator().manual_seed(0), {}
    for name, p in block.named_parameters():
        value = torch.empty(p.shape)
        made[name] = (
            value.uniform_(0.5, 1.5, generator=generator)
            if p.dim() == 1
            else value.normal_(0, p.shape[1] ** -0.5, generator=generator)
        )
    return made
