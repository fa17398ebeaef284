"""LoRA adapters: load them by name, assign them to rows of a forward pass, add their outputs.

The bits of a row do not depend on the other rows (see `model_runner.py`). So an adapter's products
have at least MIN_ROWS rows, and its rank is zero-padded to a multiple of MIN_ROWS: the CPU kernels
for few rows or few columns round differently.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import count

import torch
import torch.nn.functional as F
from torch import Tensor

from ..model.base import Adapter
from .weight_stages import count_bytes, stage

MIN_ROWS = 16


@dataclass(frozen=True, eq=False)
class LoadedAdapter:
    """An adapter whose weights are ready to use.

    Attributes:
        number: prefix cache space of the adapter, from 1. Numbers are never reused, so a name can
            be loaded again with other weights.
        layers: layer name -> (down [rank, in], up [out, rank]), with the rank padded.
    """

    name: str
    number: int
    layers: Mapping[str, tuple[Tensor, Tensor]]


class Adapters:
    """Loaded adapters by name, and the default adapter for requests that name none.

    A request keeps a reference to its adapter. Unloading removes the name, and requests in flight
    keep the weights.

    Args:
        dtype: dtype of the products. Adapters are cast once, when loaded. None: keep their own
            dtype.
    """

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self._dtype = dtype
        self._loaded: dict[str, LoadedAdapter] = {}
        self._running: LoadedAdapter | None = None
        self._numbers = count(1)

    @property
    def names(self) -> list[str]:
        """Names of the loaded adapters, in the order of loading."""
        return list(self._loaded)

    def load(self, name: str, adapter: Adapter) -> None:
        """Load an adapter.

        Raises:
            ValueError: if the name is empty or taken.
        """
        if not name or name in self._loaded:
            raise ValueError(
                f"adapter '{name}' is already loaded. Use another name"
                if name
                else "the adapter's name is empty. Give it a name"
            )
        self._loaded[name] = self._ready(name, adapter)

    @stage("broadcast")
    def run(self, adapter: Adapter) -> None:
        """Replace the default adapter, which serves all requests that name none."""
        self._running = self._ready("", adapter)
        size = sum(t.nbytes for pair in self._running.layers.values() for t in pair)
        count_bytes("broadcast", size)

    def of(self, name: str | None) -> LoadedAdapter | None:
        """Adapter of a request.

        Args:
            name: name of a loaded adapter. None: the default adapter, or None if there is none.

        Raises:
            ValueError: if no adapter of this name is loaded.
        """
        return self._running if name is None else self._get(name)

    def _ready(self, name: str, adapter: Adapter) -> LoadedAdapter:
        """Copy an adapter's matrices, pad their rank, and give the copy a new number."""
        layers = {}
        for layer, (down, up) in adapter.layers.items():
            short = -len(down) % MIN_ROWS
            padded = F.pad(down, (0, 0, 0, short)), F.pad(up, (0, short))
            layers[layer] = (
                (padded[0].to(self._dtype), padded[1].to(self._dtype)) if self._dtype else padded
            )
        return LoadedAdapter(name, next(self._numbers), layers)

    def _get(self, name: str) -> LoadedAdapter:
        if name not in self._loaded:
            hint = "".join(
                f" Did you mean '{close}'?" for close in get_close_matches(name, self._loaded, n=1)
            )
            raise ValueError(f"no adapter '{name}' is loaded.{hint}")
        return self._loaded[name]


Owners = Iterable[tuple[LoadedAdapter | None, int]]
"""Runs of consecutive rows in a batch, as (adapter or None, row count). Rows after the last run are
padding."""


def rows_by_adapter(owners: Owners) -> list[tuple[LoadedAdapter, list[int]]]:
    rows: dict[LoadedAdapter, list[int]] = {}
    start = 0
    for owner, many in owners:
        if owner is not None:
            rows.setdefault(owner, []).extend(range(start, start + many))
        start += many
    return list(rows.items())


@dataclass(frozen=True)
class _Part:
    """One adapter in one layer.

    Attributes:
        down: [rank, in] weights.
        up: [out, rank] weights.
        rows: [n] rows that use the adapter.
        padded: `rows`, with the last one repeated up to MIN_ROWS.
    """

    down: Tensor
    up: Tensor
    rows: Tensor
    padded: Tensor


class Additions:
    """Adds the outputs of adapters to the layers of one forward pass.

    Args:
        owned: adapters, each with the rows [n] that use it.
        tokens: number of rows of the forward pass.
    """

    def __init__(self, owned: Sequence[tuple[LoadedAdapter, Tensor]], tokens: int) -> None:
        self._tokens = tokens
        self._parts: dict[str, list[_Part]] = {}
        for adapter, rows in owned:
            padded = torch.cat([rows, rows[-1:].expand(max(0, MIN_ROWS - len(rows)))])
            for name, (down, up) in adapter.layers.items():
                self._parts.setdefault(name, []).append(_Part(down, up, rows, padded))

    @property
    def layers(self) -> list[str]:
        return list(self._parts)

    def add(self, layer: str, x: Tensor, y: Tensor) -> None:
        """Add up @ (down @ x) to y in place, for the rows of each adapter.

        Args:
            layer: name of the layer. Layers without an adapter are ignored.
            x: [tokens, in] input of the layer.
            y: [tokens, out] output of the layer.

        Raises:
            RuntimeError: if x does not have one row per token of the forward pass.
        """
        for part in self._parts.get(layer, ()):
            if len(x) != self._tokens:
                raise RuntimeError(
                    f"layer '{layer}' got {len(x)} rows, but the forward pass has {self._tokens}:"
                    " their adapters are unknown"
                )
            whole = len(part.rows) == self._tokens >= MIN_ROWS
            difference = F.linear(F.linear(x if whole else x[part.padded], part.down), part.up).to(
                y.dtype
            )
            if whole:
                y.add_(difference)
            else:
                y.index_add_(0, part.rows, difference[: len(part.rows)])
