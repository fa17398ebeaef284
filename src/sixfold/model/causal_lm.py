"""A causal LM in two halves: the body (tokens -> hidden states) and the head (hidden states -> logits).

The split is what lets the trainer score a chunk of positions at a time, and the engine only the last one, without [B, T, V] ever existing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..kernels.attention import AttentionLayer, causal_attention
from ..kernels.cpu.body_kernels import Compile, body_kernels
from .base import Body, LayerAdditions, Layout
from .footing import Footing
from .fused_decoder import fused_decoder
from .head import head_product
from .lora import added
from .lowered import Halves, LoweredBody


def hidden_states(model: PreTrainedModel, tokens: Tensor, positions: Tensor, layout: Layout) -> Tensor:
    """Body of the model on one row of N tokens laid out by `layout`: tokens, positions [N] -> [N, hidden]."""
    output = model.base_model(input_ids=tokens[None], position_ids=positions[None], use_cache=False, layout=layout)
    return output.last_hidden_state[0]


def head_logits(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """Head of the model: hidden [N, hidden] -> float32 logits [N, V], with the scaling or soft cap that the architecture applies after it."""
    return scaled_logits(model, head_product(model.get_output_embeddings(), hidden))


def scaled_logits(model: PreTrainedModel, logits: Tensor) -> Tensor:
    """What the architecture does to its head's product, float32 [N, V]."""
    settings = vars(model.config)  # not to_dict(), which copies everything, at every decode step
    if settings.get("logits_scaling") is not None:  # Granite divides
        logits = logits / settings["logits_scaling"]
    if settings.get("logit_scale") is not None:  # Cohere multiplies
        logits = logits * settings["logit_scale"]
    cap = settings.get("final_logit_softcapping")  # Gemma 2 and 3
    return logits if cap is None else cap * torch.tanh(logits / cap)


class CausalLM:
    """The two halves of a model as the engine takes them (its `LanguageModel`). module: the Hugging Face model, whose attention is ours."""

    def __init__(self, module: PreTrainedModel) -> None:
        self.module = module
        self._footing: Footing | None = None
        self._lowered: dict[torch.dtype, LoweredBody] = {}

    def hidden(self, tokens: Tensor, positions: Tensor, layout: Layout, additions: LayerAdditions | None = None) -> Tensor:
        """tokens, positions [N] -> [N, hidden]."""
        if additions is None:
            return hidden_states(self.module, tokens, positions, layout)
        with added(self.module, additions):
            return hidden_states(self.module, tokens, positions, layout)

    def body(self, build: Compile | None) -> Body:
        """The fastest way to `hidden` and `logits`: written out on kernels that `build` compiles, where the module is of a kind that can be; else
        itself."""
        kernels = None if build is None else body_kernels(build)
        return (None if kernels is None else fused_decoder(self, kernels)) or self

    def lowered(self, dtype: torch.dtype) -> LoweredBody:
        """Body and head on weights that are in autocast's dtype already; made once for each."""
        if dtype not in self._lowered:
            self._lowered[dtype] = LoweredBody(self, _halves, _probe_logits, dtype)
        return self._lowered[dtype]

    def footing(self) -> tuple[object, ...] | None:
        """What a captured `hidden` stands on: equal for as long as it holds. None where it cannot be captured. See `footing.py`."""
        if self._footing is None:
            zeros = torch.zeros(2, dtype=torch.int64, device=next(self.module.parameters()).device)
            self._footing = Footing(self.module.base_model, lambda: hidden_states(self.module, zeros, zeros, Segments(((0, 2),))))
        return self._footing.of_now()

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden] -> float32 [N, V]."""
        return head_logits(self.module, hidden)

    def scaled(self, logits: Tensor) -> Tensor:
        """As `ModuleBody.scaled`."""
        return scaled_logits(self.module, logits)

    @property
    def steady(self) -> bool:
        """Of PyTorch's products a row's last bits may depend on how many there are."""
        return False

    def ready(self) -> Body:
        """Itself."""
        return self

    def refresh(self) -> None:
        """The module reads its weights themselves."""

    def release(self) -> None:
        """It holds no copies."""


def _halves(module: nn.Module) -> CausalLM:
    return CausalLM(cast(PreTrainedModel, module))


def _probe_logits(model: Halves) -> Tensor:
    """Logits of two tokens."""
    zeros = torch.zeros(2, dtype=torch.int64, device=next(model.module.parameters()).device)
    return model.logits(model.hidden(zeros, zeros, Segments(((0, 2),))))


@dataclass(frozen=True)
class Segments:
    """Several texts one after another in a row, each attending to itself alone. spans: their [start, stop). layers: that attended, in order."""

    spans: tuple[tuple[int, int], ...]
    layers: list[int] = field(default_factory=list)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, kernel: AttentionLayer) -> Tensor:
        """Causal attention within each span: q [1, heads, N, D] -> [1, N, heads, D]."""
        self.layers.append(kernel.layer)
        out = [causal_attention(q[:, :, a:b], k[:, :, a:b], v[:, :, a:b], kernel) for a, b in self.spans]
        return torch.cat(out, dim=2).transpose(1, 2).contiguous()
