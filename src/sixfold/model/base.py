"""Contracts between a model and what runs it: engine and trainer.

The engine knows no model class. It is given a `LanguageModel`; the trainer lays out rows with a `Layout`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from ..kernels.attention import AttentionLayer
from ..kernels.cpu.body_kernels import Compile, CompiledAttention


class Layout(Protocol):
    """How the tokens of one forward are arranged, and how they attend to one another."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, kernel: AttentionLayer) -> Tensor:
        """q [1, heads, N, D], k and v [1, kv_heads, N, D] -> [1, N, heads, D]."""
        ...


@runtime_checkable
class CompiledLayout(Layout, Protocol):
    """A layout that may have a C function which attends."""

    def compiled(self, q: Tensor, k: Tensor, v: Tensor, kernels: Sequence[AttentionLayer]) -> CompiledAttention | None:
        """For layers whose queries, keys and values are like these. None where there is no such function."""
        ...


class Adapter(Protocol):
    """Low-rank additions to the linear modules of one model."""

    @property
    def layers(self) -> Mapping[str, tuple[Tensor, Tensor]]:
        """Module name -> (down [r, in], up [out, r]). The module's output for x grows by up @ down @ x."""
        ...


class LayerAdditions(Protocol):
    """What one forward pass adds to the outputs of some linear modules."""

    @property
    def layers(self) -> Sequence[str]:
        """Names of the modules."""
        ...

    def add(self, layer: str, x: Tensor, y: Tensor) -> None:
        """Add to y [N, out] in place, the output of module `layer` for the input x [N, in]."""
        ...


class Body(Protocol):
    """A causal LM in two halves. In every attention layer the first calls the layout's `attend`."""

    def hidden(self, tokens: Tensor, positions: Tensor, layout: Layout, additions: LayerAdditions | None = None) -> Tensor:
        """tokens, positions [N] -> [N, hidden]."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden] -> float32 [N, V]."""
        ...

    @property
    def steady(self) -> bool:
        """Whether the bits of a row do not depend on the number of rows."""
        ...

    def ready(self) -> Body:
        """The body to run a forward pass on: itself, or the plain module if the module has changed since."""
        ...

    def refresh(self) -> None:
        """Drop all copies of weights: they may have changed in a way that PyTorch does not see."""
        ...

    def release(self) -> None:
        """Free the memory of copies of weights until the next forward pass."""
        ...

    def footing(self) -> object | None:
        """Fingerprint of everything that a CUDA graph of `hidden` depends on; None if it cannot be captured.

        A captured graph is valid while the fingerprint does not change.
        """
        ...


class ModuleBody(Body, Protocol):
    """The two halves of a Hugging Face module."""

    @property
    def module(self) -> nn.Module:
        """The whole model, which holds the weights."""
        ...

    def scaled(self, logits: Tensor) -> Tensor:
        """Scaling and soft cap that the architecture applies after the head's product."""
        ...


class LanguageModel(Body, Protocol):
    """What the engine runs."""

    @property
    def module(self) -> nn.Module:
        """The whole model, which holds the weights."""
        ...

    def body(self, build: Compile | None) -> Body:
        """The fastest implementation of this model.

        Args:
            build: compiles a C file; None if there is no compiler.
        """
        ...

    def lowered(self, dtype: torch.dtype) -> Body:
        """This model on a copy of its weights in `dtype`, for use under autocast."""
        ...
