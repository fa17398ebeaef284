"""Contracts between a model and the engine and trainer that run it.

The engine knows no model class: it receives a `LanguageModel`. The trainer arranges rows with a
`Layout`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from ..kernels.attention import AttentionLayer
from ..kernels.cpu.body_kernels import Compile, CompiledAttention


class Layout(Protocol):
    """Arrangement of the tokens of one forward pass, and the tokens that each attends to."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, kernel: AttentionLayer) -> Tensor:
        """Compute the attention of one layer.

        Args:
            q: queries [1, heads, N, D].
            k: keys [1, kv_heads, N, D].
            v: values [1, kv_heads, N, D].

        Returns:
            Output [1, N, heads, D].
        """
        ...


@runtime_checkable
class CompiledLayout(Layout, Protocol):
    """A layout that may have a C function for attention."""

    def compiled(
        self, q: Tensor, k: Tensor, v: Tensor, kernels: Sequence[AttentionLayer]
    ) -> CompiledAttention | None:
        """The C function for all layers of the model, or None if there is none.

        Args:
            q: example of the queries, [1, heads, N, D]. Every layer's must have this shape and
                memory layout.
            k: the same for the keys, [1, kv_heads, N, D].
            v: the same for the values, [1, kv_heads, N, D].
            kernels: attention parameters of each layer.
        """
        ...


class Adapter(Protocol):
    """Low-rank additions to the linear modules of one model."""

    @property
    def layers(self) -> Mapping[str, tuple[Tensor, Tensor]]:
        """Module name -> (down [r, in], up [out, r]).

        up @ (down @ x) is added to the module's output for x.
        """
        ...


class LayerAdditions(Protocol):
    """Additions to the outputs of some linear modules in one forward pass."""

    @property
    def layers(self) -> Sequence[str]:
        """Names of the modules."""
        ...

    def add(self, layer: str, x: Tensor, y: Tensor) -> None:
        """Add to the output of a module, in place.

        Args:
            layer: name of the module.
            x: input of the module, [N, in].
            y: output of the module, [N, out]. It is changed.
        """
        ...


class ChosenExperts(Protocol):
    """Record of the experts that one forward pass used."""

    def choices(self) -> Tensor:
        """Experts of each token, [N, layers with experts, k]."""
        ...


class WatchedRouters(Protocol):
    """The routers of a mixture of experts.

    Attributes:
        experts: experts per layer.
        top_k: experts per token and layer.
    """

    @property
    def names(self) -> Sequence[str]: ...

    @property
    def experts(self) -> int: ...

    @property
    def top_k(self) -> int: ...

    def watch(self, module: nn.Module) -> AbstractContextManager[ChosenExperts]:
        """Context that records the experts which the routers of `module` choose."""
        ...


class Body(Protocol):
    """A causal LM in two halves: `hidden` and `logits`.

    `hidden` calls the layout's `attend` in every attention layer.
    """

    def hidden(
        self,
        tokens: Tensor,
        positions: Tensor,
        layout: Layout,
        additions: LayerAdditions | None = None,
    ) -> Tensor:
        """Run the body of the model.

        Args:
            tokens: [N].
            positions: position of each token in its sequence, [N].
            layout: how the tokens attend to one another.
            additions: added to the outputs of linear modules; None for none.

        Returns:
            Hidden states [N, hidden].
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Run the output head: hidden states [N, hidden] -> float32 logits [N, V]."""
        ...

    @property
    def steady(self) -> bool:
        """True if the bits of a row do not depend on the number of rows."""
        ...

    def ready(self) -> Body:
        """The body for the next forward pass.

        Returns:
            This object, or the plain module if the module has changed since this object was made.
        """
        ...

    def refresh(self) -> None:
        """Drop all copies of weights. Call this after weight updates that PyTorch does not see."""
        ...

    def release(self) -> None:
        """Free the memory of weight copies until the next forward pass."""
        ...

    def graph_fingerprint(self) -> object | None:
        """Fingerprint of everything that a CUDA graph of `hidden` depends on.

        A captured graph is valid while the fingerprint does not change.

        Returns:
            None if `hidden` cannot be captured.
        """
        ...


class ModuleBody(Body, Protocol):
    """The two halves of a Hugging Face module."""

    @property
    def module(self) -> nn.Module:
        """The whole model, which holds the weights."""
        ...

    def scaled(self, logits: Tensor) -> Tensor:
        """Apply the architecture's scaling and soft cap to the output of the head, [N, V]."""
        ...


class LanguageModel(Body, Protocol):
    """The model that the engine runs."""

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

    def lowered(self, dtype: torch.dtype, build: Compile | None) -> Body:
        """This model on a copy of its weights in `dtype`, for use under autocast.

        Args:
            build: as in `body`.
        """
        ...
