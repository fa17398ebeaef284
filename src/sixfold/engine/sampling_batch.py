"""Sampling parameters of a batch, as tensors on the device.

A batch stays the same for many steps, so each tensor is created and copied to the device once.
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
    """Truncation parameters of R rows.

    Attributes:
        top_k: [R, 1] number of tokens to keep; V (vocabulary size) if off.
        top_p: [R, 1] float64, probability mass that the kept tokens must reach.
        min_p: [R, 1] float64, minimum probability relative to the best token.
        largest_k: largest top_k below V; 0 if there is none.
    """

    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    largest_k: int


class SamplingBatch(list[SamplingParams]):
    """Sampling parameters of each row, with derived columns cached."""

    @cached_property
    def plain(self) -> list[bool]:
        """True for each row that is neither truncated nor penalised."""
        # Evaluate each distinct object once: a batch has many rows but few distinct parameters.
        of = {id(p): p.is_plain for p in {id(p): p for p in self}.values()}
        return [of[id(p)] for p in self]

    @cached_property
    def others(self) -> tuple[list[int], SamplingBatch]:
        """Rows that are not plain: their numbers and parameters."""
        return self._rows([not plain for plain in self.plain])

    @cached_property
    def truncating(self) -> tuple[list[int], SamplingBatch]:
        """Rows that truncate: their numbers and parameters."""
        return self._rows([p.truncates for p in self])

    @cached_property
    def alike(self) -> bool:
        """True if all rows have the same parameters."""
        return all(p is self[0] or p == self[0] for p in self)

    @cached_property
    def wants_top(self) -> list[int]:
        """Rows that request the most likely tokens (`top_logprobs`)."""
        return [b for b, p in enumerate(self) if p.top_logprobs]

    @cached_property
    def any_greedy(self) -> bool:
        """True if any row is greedy (temperature 0)."""
        return any(p.temperature == 0 for p in self)

    def greedy(self, device: torch.device) -> Tensor:
        """[B] bool, True for greedy rows."""
        return self.column(
            "greedy", device, lambda: torch.tensor([p.temperature == 0 for p in self])
        )

    def temperatures(self, device: torch.device) -> Tensor:
        """Temperatures [B]; 0 for greedy rows."""
        return self.column(
            "temperature", device, lambda: torch.tensor([p.temperature for p in self])
        )

    def divisors(self, device: torch.device) -> Tensor:
        """Divisors of the logits [B, 1]: the temperature, or 1 for greedy rows."""
        return self.column(
            "divisor", device, lambda: torch.tensor([p.temperature or 1.0 for p in self])[:, None]
        )

    def limits(self, vocabulary: int, device: torch.device) -> Limits:
        """Truncation parameters of all rows, for a vocabulary of this size."""
        tops = [min(p.top_k or vocabulary, vocabulary) for p in self]
        wide = torch.float64
        return Limits(
            self.column("top_k", device, lambda: torch.tensor(tops)[:, None]),
            self.column(
                "top_p", device, lambda: torch.tensor([p.top_p for p in self], dtype=wide)[:, None]
            ),
            self.column(
                "min_p", device, lambda: torch.tensor([p.min_p for p in self], dtype=wide)[:, None]
            ),
            max((k for k in tops if k < vocabulary), default=0),
        )

    def column(self, name: str, device: torch.device, make: Callable[[], Tensor]) -> Tensor:
        """Tensor on the device, created by `make` on the first call for each name and device."""
        key = (name, device)
        if key not in self._columns:
            self._columns[key] = on(make(), device)
        return self._columns[key]

    @cached_property
    def _columns(self) -> dict[tuple[str, torch.device], Tensor]:
        return {}

    def _rows(self, chosen: list[bool]) -> tuple[list[int], SamplingBatch]:
        rows = [b for b, wanted in enumerate(chosen) if wanted]
        return rows, self if len(rows) == len(self) else SamplingBatch(self[b] for b in rows)


def on(x: Tensor, device: torch.device) -> Tensor:
    """Copy x to the device without making the host wait. No copy if x is already there."""
    return x.to(device, non_blocking=True)


def index(rows: list[int], device: torch.device) -> Tensor:
    """Row numbers as a tensor on the device. Indexing with a list would make the host wait."""
    return on(torch.tensor(rows, dtype=torch.int64), device)
