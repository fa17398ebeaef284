"""The adapters that requests may ask for by name, which rows of a forward are whose, and what is added to them.

A row's bits do not depend on its company (see `model_runner.py`): an adapter's products have at least MIN_ROWS rows, and its rank is filled up with
zeros to a multiple of MIN_ROWS, since the CPU's kernels for few rows or few columns round in their own way.
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

MIN_ROWS = 16


@dataclass(frozen=True, eq=False)
class LoadedAdapter:
    """layers: as an `Adapter`'s. number: keeps its keys and values apart in the prefix cache; from 1 and never given twice, so that a name may come
    again with other weights."""

    name: str
    number: int
    layers: Mapping[str, tuple[Tensor, Tensor]]


class Adapters:
    """By name. A request holds on to its own: unloading takes the name away, not the weights of those who run with it.

    dtype: what products are computed in; adapters are cast once, not in each forward. None: their own.
    """

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self._dtype = dtype
        self._loaded: dict[str, LoadedAdapter] = {}
        self._numbers = count(1)

    @property
    def names(self) -> list[str]:
        """In the order of loading."""
        return list(self._loaded)

    def load(self, name: str, adapter: Adapter) -> None:
        """Raises ValueError for a name that is empty or taken."""
        if not name or name in self._loaded:
            raise ValueError(f"adapter '{name}' is loaded already: unload it first" if name else "an adapter needs a name")
        layers = {}
        for layer, (down, up) in adapter.layers.items():
            short = -len(down) % MIN_ROWS
            padded = F.pad(down, (0, 0, 0, short)), F.pad(up, (0, short))
            layers[layer] = (padded[0].to(self._dtype), padded[1].to(self._dtype)) if self._dtype else padded
        self._loaded[name] = LoadedAdapter(name, next(self._numbers), layers)

    def unload(self, name: str) -> None:
        """Raises ValueError for a name that is not there."""
        del self._loaded[self.get(name).name]

    def get(self, name: str) -> LoadedAdapter:
        """Raises ValueError for a name that is not there."""
        if name not in self._loaded:
            hint = "".join(f" Did you mean '{close}'?" for close in get_close_matches(name, self._loaded, n=1))
            raise ValueError(f"no adapter '{name}' is loaded.{hint}")
        return self._loaded[name]


Owners = Iterable[tuple[LoadedAdapter | None, int]]
"""Whose the next rows of a forward are, and how many; what comes after them is padding and nobody's."""


def rows_by_adapter(owners: Owners) -> list[tuple[LoadedAdapter, list[int]]]:
    """Each adapter with its rows."""
    rows: dict[LoadedAdapter, list[int]] = {}
    start = 0
    for owner, many in owners:
        if owner is not None:
            rows.setdefault(owner, []).extend(range(start, start + many))
        start += many
    return list(rows.items())


@dataclass(frozen=True)
class _Part:
    """One adapter in one layer. rows: [n] its own. padded: the same, the last repeated up to MIN_ROWS."""

    down: Tensor
    up: Tensor
    rows: Tensor
    padded: Tensor


class Additions:
    """What the adapters of one forward of `tokens` rows add to the outputs of layers, each to its own rows [n]."""

    def __init__(self, owned: Sequence[tuple[LoadedAdapter, Tensor]], tokens: int) -> None:
        self._tokens = tokens
        self._parts: dict[str, list[_Part]] = {}
        for adapter, rows in owned:
            padded = torch.cat([rows, rows[-1:].expand(max(0, MIN_ROWS - len(rows)))])
            for name, (down, up) in adapter.layers.items():
                self._parts.setdefault(name, []).append(_Part(down, up, rows, padded))

    @property
    def layers(self) -> list[str]:
        """Names of the layers that anything is added to."""
        return list(self._parts)

    def add(self, layer: str, x: Tensor, y: Tensor) -> None:
        """x [tokens, in], what the layer was given; y [tokens, out], to which up @ (down @ x) is added in place. Nothing happens for other layers."""
        for part in self._parts.get(layer, ()):
            if len(x) != self._tokens:
                raise RuntimeError(f"layer '{layer}' was given {len(x)} of {self._tokens} rows: whose they are is not known")
            whole = len(part.rows) == self._tokens >= MIN_ROWS
            difference = F.linear(F.linear(x if whole else x[part.padded], part.down), part.up).to(y.dtype)
            if whole:
                y.add_(difference)
            else:
                y.index_add_(0, part.rows, difference[: len(part.rows)])
