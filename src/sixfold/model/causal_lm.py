"""A causal LM in two halves: body (tokens -> hidden states) and head (hidden states -> logits).

Because of the split, the trainer can score one chunk of positions at a time and the engine only the
last position. A [B, T, V] tensor of logits is never allocated.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..kernels.attention import AttentionLayer, causal_attention
from ..kernels.cpu.body_kernels import Compile, body_kernels
from .base import Body, LayerAdditions, Layout, ModuleBody
from .fused_decoder import fused_decoder
from .graph_validity import GraphFingerprint
from .head import LogitFinish, head_product
from .lora import added
from .lowered import LoweredBody, lower_weights


def hidden_states(
    model: PreTrainedModel, tokens: Tensor, positions: Tensor, layout: Layout
) -> Tensor:
    """Run the body on one row of N tokens.

    Args:
        model: model whose attention is `attention.attention`.
        tokens: [N].
        positions: position of each token in its sequence, [N].
        layout: how the tokens attend to one another.

    Returns:
        Hidden states [N, hidden].
    """
    output = model.base_model(
        input_ids=tokens[None], position_ids=positions[None], use_cache=False, layout=layout
    )
    return output.last_hidden_state[0]


def head_logits(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """Run the head: hidden [N, hidden] -> float32 logits [N, V].

    The architecture's scaling or soft cap is applied to the logits.
    """
    return scaled_logits(model, head_product(model.get_output_embeddings(), hidden))


def scaled_logits(model: PreTrainedModel, logits: Tensor) -> Tensor:
    """Apply the architecture's scaling or soft cap to the head's output, float32 [N, V]."""
    # vars and not to_dict(), which copies the config at every decode step
    return LogitFinish.of(vars(model.config)).apply(logits)


class CausalLM:
    """Hugging Face model as a `LanguageModel` for the engine.

    Args:
        module: the Hugging Face model, with `attn_implementation="sixfold"`.
    """

    def __init__(self, module: PreTrainedModel) -> None:
        self.module = module
        self._fingerprint: GraphFingerprint | None = None
        self._lowered: dict[torch.dtype, LoweredBody] = {}

    def hidden(
        self,
        tokens: Tensor,
        positions: Tensor,
        layout: Layout,
        additions: LayerAdditions | None = None,
    ) -> Tensor:
        """As `Body.hidden`: tokens, positions [N] -> [N, hidden]."""
        if additions is None:
            return hidden_states(self.module, tokens, positions, layout)
        with added(self.module, additions):
            return hidden_states(self.module, tokens, positions, layout)

    def body(self, build: Compile | None) -> Body:
        """The fastest implementation of `hidden` and `logits`.

        Args:
            build: compiles a C file. None: use no CPU kernels.

        Returns:
            A `FusedDecoder` if the kernels compile and support the module, otherwise this object.
        """
        kernels = None if build is None else body_kernels(build)
        return (None if kernels is None else fused_decoder(self, kernels)) or self

    def lowered(self, dtype: torch.dtype, build: Compile | None = None) -> Body:
        """Body and head on a copy of the weights in autocast's dtype. Built once per dtype.

        Args:
            build: compiles a C file. None: use no CPU kernels.

        Returns:
            A `FusedDecoder` for bfloat16 if the kernels compile and support the module, otherwise a
            `LoweredBody`, which has the same bits as autocast.
        """
        kernels = None if build is None or dtype != torch.bfloat16 else body_kernels(build)
        with torch.inference_mode(False):  # PyTorch does not count writes to tensors made in it
            fused = None if kernels is None else fused_decoder(self, kernels, half=True)
        if fused is not None:
            return fused
        if dtype not in self._lowered:
            self._lowered[dtype] = LoweredBody(self, _halves, _probe_logits, dtype)
        return self._lowered[dtype]

    def keep_only(self, dtype: torch.dtype) -> None:
        """Keep the weights of matrix products in one dtype, that of autocast (`lower_weights`)."""
        lower_weights(self, _probe_logits, dtype)

    def graph_fingerprint(self) -> tuple[object, ...] | None:
        """As `Body.graph_fingerprint` (see `graph_validity.py`).

        Returns:
            None if `hidden` cannot be captured.
        """
        if self._fingerprint is None:
            zeros = torch.zeros(2, dtype=torch.int64, device=next(self.module.parameters()).device)
            self._fingerprint = GraphFingerprint(
                self.module.base_model,
                lambda: hidden_states(self.module, zeros, zeros, Segments(((0, 2),))),
            )
        return self._fingerprint.current()

    def logits(self, hidden: Tensor) -> Tensor:
        """As `Body.logits`: [N, hidden] -> float32 [N, V]."""
        return head_logits(self.module, hidden)

    def scaled(self, logits: Tensor) -> Tensor:
        return scaled_logits(self.module, logits)

    @property
    def steady(self) -> bool:
        """False: in PyTorch's products a row's last bits may depend on the number of rows."""
        return False

    def ready(self) -> Body:
        """Return self: the module always reads its current weights."""
        return self

    def refresh(self) -> None:
        """Nothing to drop: the module holds no copies of its weights."""

    def release(self) -> None:
        """Nothing to free: the module holds no copies of its weights."""


def _halves(module: nn.Module) -> CausalLM:
    return CausalLM(cast(PreTrainedModel, module))


def _probe_logits(model: ModuleBody) -> Tensor:
    """Logits [2, V] of one forward pass on two tokens."""
    zeros = torch.zeros(2, dtype=torch.int64, device=next(model.module.parameters()).device)
    return model.logits(model.hidden(zeros, zeros, Segments(((0, 2),))))


@dataclass(frozen=True)
class Segments:
    """Layout of several sequences packed in one row. Each sequence attends only to itself.

    Attributes:
        spans: [start, stop) of each sequence.
        layers: index of each layer that called `attend`, in call order.
    """

    spans: tuple[tuple[int, int], ...]
    layers: list[int] = field(default_factory=list)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, kernel: AttentionLayer) -> Tensor:
        """Causal attention within each span. Shapes are those of `Layout.attend`."""
        self.layers.append(kernel.layer)
        out = [
            causal_attention(q[:, :, a:b], k[:, :, a:b], v[:, :, a:b], kernel)
            for a, b in self.spans
        ]
        return torch.cat(out, dim=2).transpose(1, 2).contiguous()
