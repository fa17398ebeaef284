"""What the rows of a batch ask of the sampler, as columns on the device.

A batch stays the same for many steps, so each column is made and copied over once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..types import SamplingParams


@dataclass(frozen=True)
class Limits:
    """Truncation of R rows, [R, 1] each.

    Attributes:
        top_k: tokens kept; V where it is off.
        top_p: probability to reach, float64.
        min_p: share of the best token's probability, float64.
        largest_k: the largest top_k that cuts; 0 where none does.
    """

    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    largest_k: int


class Asked(list[SamplingParams]):
    """The parameters of each row, and what the sampler wants to know of all of them."""

    @cached_property
    def plain(self) -> list[bool]:
        """Whether a row is neither truncated nor penalised."""
        of = {id(p): p.is_plain for p in {id(p): p for p in self}.values()}  # a batch has few
        return [of[id(p)] for p in self]

    @cached_property
    def others(self) -> tuple[list[int], Asked]:
        """The rows that are not plain."""
        return self._rows([not plain for plain in self.plain])

    @cached_property
    def truncating(self) -> tuple[list[int], Asked]:
        """The rows that truncate."""
        return self._rows([p.truncates for p in self])

    @cached_property
    def alike(self) -> bool:
        """Whether all rows ask for the same."""
        return all(p is self[0] or p == self[0] for p in self)

    @cached_property
    def wants_top(self) -> list[int]:
        """Rows that ask for the likeliest tokens."""
        return [b for b, p in enumerate(self) if p.top_logprobs]

    @cached_property
    def any_greedy(self) -> bool:
        """Whether a row takes its most probable token."""
        return any(p.temperature == 0 for p in self)

    def greedy(self, device: torch.device) -> Tensor:
        """[B] bool."""
        return self.column("greedy", device, lambda: torch.tensor([p.temperature == 0 for p in self]))

    def temperatures(self, device: torch.device) -> Tensor:
        """[B]; 0 in a greedy row."""
        return self.column("temperature", device, lambda: torch.tensor([p.temperature for p in self]))

    def divisors(self, device: torch.device) -> Tensor:
        """[B, 1]: what logits are divided by; 1 in a greedy row."""
        return self.column("divisor", device, lambda: torch.tensor([p.temperature or 1.0 for p in self])[:, None])

    def limits(self, vocabulary: int, device: torch.device) -> Limits:
        """Of all rows, over logits of `vocabulary` numbers."""
        tops = [min(p.top_k or vocabulary, vocabulary) for p in self]
        wide = torch.float64
        return Limits(
            self.column("top_k", device, lambda: torch.tensor(tops)[:, None]),
            self.column("top_p", device, lambda: torch.tensor([p.top_p for p in self], dtype=wide)[:, None]),
            self.column("min_p", device, lambda: torch.tensor([p.min_p for p in self], dtype=wide)[:, None]),
            max((k for k in tops if k < vocabulary), default=0),
        )

    def column(self, name: str, device: torch.device, make: Callable[[], Tensor]) -> Tensor:
        """A tensor of the rows on the device; made once for each name."""
        key = (name, device)
        if key not in self._columns:
            self._columns[key] = on(make(), device)
        return self._columns[key]

    @cached_property
    def _columns(self) -> dict[tuple[str, torch.device], Tensor]:
        return {}

    def _rows(self, chosen: list[bool]) -> tuple[list[int], Asked]:
        rows = [b for b, wanted in enumerate(chosen) if wanted]
        return rows, self if len(rows) == len(self) else Asked(self[b] for b in rows)


def on(x: Tensor, device: torch.device) -> Tensor:
    """A copy on the device for which the host does not wait; x itself where it is there."""
    return x.to(device, non_blocking=True)


def index(rows: list[int], device: torch.device) -> Tensor:
    """Row numbers on the device. (A list as an index is a copy that the host waits for.)"""
    return on(torch.tensor(rows, dtype=torch.int64), device)
