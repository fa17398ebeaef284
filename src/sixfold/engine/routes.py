"""Record the experts that compute each token of a mixture of experts.

The record is a part of the KV cache, one entry per slot. So a cached prefix, a shared prompt, a
copied block and a block that was swapped out have their entries wherever their keys and values are.
A recomputed token gets the experts of its last computation. When a sequence ends, its entries are
read by its block table.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from ..kernels.cpu.body_kernels import Compile
from ..model.base import Body, LanguageModel, LayerAdditions, Layout, WatchedRouters
from ..types import Routes
from .kv_cache import KVCache
from .sequence import Sequence


class CachedLayout(Layout, Protocol):
    """A layout over a KV cache. Every layout of the engine is one."""

    @property
    def cache(self) -> KVCache: ...

    @property
    def slots(self) -> Tensor: ...


class ModuleBody(Body, Protocol):
    """A body that runs a module."""

    @property
    def module(self) -> nn.Module: ...


class RecordedModel:
    """A model whose forward passes record the chosen experts in the KV cache.

    CUDA graphs are not used: a captured forward pass would not run the record.

    Args:
        model: the model, which has expert layers.
        routers: its routers.
    """

    def __init__(self, model: LanguageModel, routers: WatchedRouters) -> None:
        self._model = model
        self._body: ModuleBody = model
        self._routers = routers

    @property
    def module(self) -> nn.Module:
        """The whole model, which holds the weights."""
        return self._model.module

    def body(self, build: Compile | None) -> Body:
        """This object: the compiled kernels have no expert layers."""
        return self

    def lowered(self, dtype: torch.dtype, build: Compile | None) -> Body:
        """As `LanguageModel.lowered`, with the record."""
        made = RecordedModel(self._model, self._routers)
        made._body = self._model.lowered(dtype, None)  # type: ignore[assignment]
        return made

    def hidden(
        self,
        tokens: Tensor,
        positions: Tensor,
        layout: Layout,
        additions: LayerAdditions | None = None,
    ) -> Tensor:
        """As `Body.hidden`. Records the experts of the tokens at their slots."""
        with self._routers.watch(self._body.module) as record:
            hidden = self._body.hidden(tokens, positions, layout, additions)
        _write(layout, record.choices(), self._routers.experts)  # type: ignore[arg-type]
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """As `Body.logits`."""
        return self._body.logits(hidden)

    @property
    def steady(self) -> bool:
        """As for the model."""
        return self._body.steady

    def ready(self) -> Body:
        """The recorded body for the next forward pass."""
        ready = self._body.ready()
        if ready is self._body:
            return self
        other = RecordedModel(self._model, self._routers)
        other._body = ready  # type: ignore[assignment]
        return other

    def refresh(self) -> None:
        """As `Body.refresh`."""
        self._body.refresh()

    def release(self) -> None:
        """As `Body.release`."""
        self._body.release()

    def graph_fingerprint(self) -> object | None:
        """None: the forward pass cannot be captured."""
        return None


def _write(layout: CachedLayout, choices: Tensor, experts: int) -> None:
    """Write choices [N, layers, k] at the layout's slots."""
    cache, flat = layout.cache, choices.flatten(1)
    if cache.routes is None:
        dtype = torch.uint8 if experts <= 256 else torch.int16
        shape = (1, cache.blocks + 1, cache.block_size, *choices.shape[1:])
        cache.routes = torch.zeros(shape, dtype=dtype, device=choices.device)
    rows = cache.routes.view(-1, flat.shape[1])
    rows.index_copy_(0, layout.slots, flat.to(rows.dtype))


def with_routes(cache: KVCache, ended: list[Sequence]) -> list[Sequence]:
    """The ended sequences, with their routes if the cache records them.

    They must still have their blocks.
    """
    if cache.routes is not None:
        for sequence in ended:
            sequence.routes = _routes(cache, cache.routes, sequence)
    return ended


def _routes(cache: KVCache, recorded: Tensor, sequence: Sequence) -> Routes:
    """The experts of a sequence's tokens, without the newest one."""
    *_, layers, top_k = recorded.shape
    at = np.arange(sequence.length - 1)
    slots = np.asarray(sequence.blocks)[at // cache.block_size] * cache.block_size
    chosen = recorded.view(-1, layers, top_k)
    rows = chosen[torch.from_numpy(slots + at % cache.block_size).to(chosen.device)].cpu()
    width = rows.element_size()
    return Routes(layers, top_k, width, rows.numpy().astype(f"<u{width}", copy=False).tobytes())
