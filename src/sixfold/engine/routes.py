"""Record the experts that compute each token of a mixture of experts.

The KV cache holds the record, one entry per slot. So the entries of a token are always beside its
keys and values: in a cached prefix, a shared prompt, a copied block or a block in host memory. A
token that is computed again gets the experts of its last computation. When a sequence ends, its
block table gives the slots of its entries.
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
    """A layout whose tokens have slots in a KV cache. This holds for all layouts of the engine."""

    @property
    def cache(self) -> KVCache:
        """The KV cache."""
        ...

    @property
    def slots(self) -> Tensor:
        """Slot of each token in the cache, [N]."""
        ...


class ModuleBody(Body, Protocol):
    """A body with the module that it runs."""

    @property
    def module(self) -> nn.Module:
        """The module that computes hidden states and logits."""
        ...


class RecordedModel:
    """A model whose forward passes record the chosen experts in the KV cache.

    CUDA graphs are not used: a replayed graph would not run the Python code that records.
    """

    def __init__(self, model: LanguageModel, routers: WatchedRouters) -> None:
        self._model = model
        self._body: ModuleBody = model
        self._routers = routers

    @property
    def module(self) -> nn.Module:
        return self._model.module

    def body(self, build: Compile | None) -> Body:
        """Return this object, which runs layers in PyTorch.

        The compiled kernels do not support layers with experts.
        """
        return self

    def lowered(self, dtype: torch.dtype, build: Compile | None) -> Body:
        """As `LanguageModel.lowered`. The returned body records too."""
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
        """As `Body.hidden`. Writes the experts of each token to the token's slot."""
        with self._routers.watch(self._body.module) as record:
            hidden = self._body.hidden(tokens, positions, layout, additions)
        _write(layout, record.choices(), self._routers.experts)  # type: ignore[arg-type]
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        return self._body.logits(hidden)

    @property
    def steady(self) -> bool:
        return self._body.steady

    def ready(self) -> Body:
        """As `Body.ready`. The returned body records too."""
        ready = self._body.ready()
        if ready is self._body:
            return self
        other = RecordedModel(self._model, self._routers)
        other._body = ready  # type: ignore[assignment]
        return other

    def refresh(self) -> None:
        self._body.refresh()

    def release(self) -> None:
        self._body.release()

    def graph_fingerprint(self) -> object | None:
        """None: the forward pass cannot be captured."""
        return None


def _write(layout: CachedLayout, choices: Tensor, experts: int) -> None:
    """Write the experts of N tokens into the KV cache.

    Args:
        layout: has the cache and the slot of each token.
        choices: [N, layers, k] experts of each token.
        experts: experts per layer.
    """
    cache, flat = layout.cache, choices.flatten(1)
    if cache.routes is None:
        dtype = torch.uint8 if experts <= 256 else torch.int16
        shape = (1, cache.blocks + 1, cache.block_size, *choices.shape[1:])
        cache.routes = torch.zeros(shape, dtype=dtype, device=choices.device)
    rows = cache.routes.view(-1, flat.shape[1])
    rows.index_copy_(0, layout.slots, flat.to(rows.dtype))


def with_routes(cache: KVCache, ended: list[Sequence]) -> list[Sequence]:
    """Fill in `Sequence.routes` if the cache records experts. Returns the sequences.

    Args:
        ended: sequences that have ended, but still hold their blocks.
    """
    if cache.routes is not None:
        for sequence in ended:
            sequence.routes = _routes(cache, cache.routes, sequence)
    return ended


def _routes(cache: KVCache, recorded: Tensor, sequence: Sequence) -> Routes:
    """Read the experts of all tokens of a sequence but the last, which was never computed."""
    *_, layers, top_k = recorded.shape
    at = np.arange(sequence.length - 1)
    slots = np.asarray(sequence.blocks)[at // cache.block_size] * cache.block_size
    chosen = recorded.view(-1, layers, top_k)
    rows = chosen[torch.from_numpy(slots + at % cache.block_size).to(chosen.device)].cpu()
    width = rows.element_size()
    return Routes(layers, top_k, width, rows.numpy().astype(f"<u{width}", copy=False).tobytes())
