"""What the engine runs, and what its layouts are asked by it. The engine knows no model: whoever makes one brings a `LanguageModel`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from ctypes import CDLL
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn


class AttentionLayer(Protocol):
    """What one attention layer asks for besides q, k, v.

    Attributes:
        layer: its index.
        scale: of the scores; None: 1 / sqrt(D).
        window: keys that a query sees at most, itself included; None: all before it.
        softcap: scores become softcap * tanh(scores / softcap).
        sinks: [H] one more score of each head, without a value, in every softmax; None: there is none.
    """

    @property
    def layer(self) -> int: ...

    @property
    def scale(self) -> float | None: ...

    @property
    def window(self) -> int | None: ...

    @property
    def softcap(self) -> float | None: ...

    @property
    def sinks(self) -> Tensor | None: ...

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """q [B, H, Q, D] over k, v [B, H_kv, S, D]; mask: True = may look, broadcast to [B, 1, Q, S] -> [B, H, Q, D]."""


class Layout(Protocol):
    """How the tokens of one forward are arranged, and how they attend to one another."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, kernel: AttentionLayer) -> Tensor:
        """q [1, heads, N, D], k and v [1, kv_heads, N, D] -> [1, N, heads, D]."""


class Adapter(Protocol):
    """Low-rank additions to a model's layers, made for that model. layers: name of a linear module -> (down [r, in], up [out, r]); its output of x
    grows by up @ down @ x."""

    @property
    def layers(self) -> Mapping[str, tuple[Tensor, Tensor]]: ...


class LayerAdditions(Protocol):
    """What one forward adds to the outputs of some layers."""

    @property
    def layers(self) -> Sequence[str]:
        """Their names."""

    def add(self, layer: str, x: Tensor, y: Tensor) -> None:
        """x [N, in] was given to the layer; y [N, out] came out, and is added to in place."""


class Body(Protocol):
    """A causal LM in two halves. In every attention layer the first calls the layout's `attend`."""

    def hidden(self, tokens: Tensor, positions: Tensor, layout: Layout, additions: LayerAdditions | None = None) -> Tensor:
        """tokens, positions [N] -> [N, hidden]."""

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden] -> float32 [N, V]."""

    @property
    def steady(self) -> bool:
        """Whether a row's numbers are the same bits however many rows there are."""

    def ready(self) -> Body:
        """What to run a forward on: itself, once it has looked whether the module is still what it stands for, or else the module."""

    def refresh(self) -> None:
        """The weights may have changed in a way that PyTorch does not see."""

    def release(self) -> None:
        """Copies of weights are not needed for now: give their memory back."""

    def footing(self) -> object | None:
        """Fingerprint of everything that a CUDA graph of `hidden` depends on: equal for as long as
        the graph holds. None where there can be none."""


class LanguageModel(Body, Protocol):
    """What the engine is given. module: holds the weights."""

    @property
    def module(self) -> nn.Module: ...

    def body(self, build: Callable[[Path], CDLL | None] | None) -> Body:
        """The fastest way to run it. build: compiles a C file, if there is a compiler."""

    def lowered(self, dtype: torch.dtype) -> Body:
        """The way to run it under autocast, on weights that have its dtype already."""
