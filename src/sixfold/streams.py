"""Optional records per token of a sequence: kept sets of truncated sampling, and experts.

This module does not import torch.
"""

from __future__ import annotations

import base64
import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Routes:
    """Experts that computed the tokens of a sequence, in every layer with experts.

    The last token of a sequence has no entry: no forward pass has computed it.

    Attributes:
        layers: number of layers with experts.
        top_k: experts per token and layer.
        width: bytes per number: 1 for up to 256 experts, otherwise 2.
        data: unsigned little-endian numbers, by token, then layer, then choice.
    """

    layers: int
    top_k: int
    width: int
    data: bytes

    def __len__(self) -> int:
        """Number of tokens with an entry."""
        return len(self.data) // self._each

    @property
    def _each(self) -> int:
        return self.layers * self.top_k * self.width

    def cut(self, tokens: int) -> Routes:
        """The entries of the first `tokens` tokens."""
        return Routes(self.layers, self.top_k, self.width, self.data[: tokens * self._each])

    def grown(self, later: Routes) -> Routes:
        """Add entries for the tokens of a later turn.

        Tokens that have an entry keep it: the experts with which they were sampled.

        Args:
            later: entries of the whole sequence, from the later turn.
        """
        data = self.data + later.data[len(self.data) :]
        return Routes(self.layers, self.top_k, self.width, data)

    def to_record(self) -> dict[str, int | str]:
        """JSON-ready dictionary. The data are base64."""
        data = base64.b64encode(self.data).decode()
        return {"layers": self.layers, "top_k": self.top_k, "width": self.width, "data": data}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Routes:
        """Inverse of `to_record`."""
        layers, top_k, width = (int(record[name]) for name in ("layers", "top_k", "width"))
        return cls(layers, top_k, width, base64.b64decode(record["data"], validate=True))


@dataclass
class Kept:
    """Token ids that truncated sampling could have drawn, for each sampled token in order.

    The sets are ragged: token n has the next `counts[n]` entries of `ids`.

    Attributes:
        ids: int32, ascending within a token.
        counts: int32. 0 means that the token was drawn from the full distribution.
        mass: probability of the set before renormalisation.
    """

    ids: array[int] = field(default_factory=lambda: array("i"))
    counts: array[int] = field(default_factory=lambda: array("i"))
    mass: array[float] = field(default_factory=lambda: array("d"))

    def __len__(self) -> int:
        return len(self.counts)

    def add(self, ids: array[int], mass: float) -> None:
        """Append the set of one more sampled token."""
        self.ids.extend(ids)
        self.counts.append(len(ids))
        self.mass.append(mass)

    def cut(self, tokens: int) -> None:
        """Keep only the first `tokens` sampled tokens."""
        del self.ids[sum(self.counts[:tokens]) :], self.counts[tokens:], self.mass[tokens:]

    def to_record(self) -> dict[str, list[int] | list[float]]:
        """Three flat lists. With the compression of the dumps they are as small as packed bytes."""
        return {
            "ids": self.ids.tolist(),
            "counts": self.counts.tolist(),
            "mass": self.mass.tolist(),
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Sequence[Any]]) -> Kept:
        """Inverse of `to_record`. Dumps write a non-finite mass as null; it is read as NaN."""
        mass = array("d", [math.nan if m is None else m for m in record["mass"]])
        return cls(array("i", record["ids"]), array("i", record["counts"]), mass)
