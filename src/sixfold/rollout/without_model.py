"""Base of generators that give prepared replies instead of sampling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from .generator import GeneratorClosed


class WithoutModel:
    """Generator without a model. A subclass gives its replies in `generate`."""

    version = -1
    """Version of tokens that no model of this run sampled."""

    async def score(self, tokens: Sequence[int], temperature: float = 1.0) -> list[float]:
        """Raise GeneratorClosed: prepared replies have no model."""
        raise GeneratorClosed("prepared replies have no model")

    async def load(self, weights: Mapping[str, Tensor], version: int) -> int:
        """Raise GeneratorClosed: prepared replies have no model."""
        raise GeneratorClosed("prepared replies have no model")

    async def rest(self) -> None:
        """Nothing to free."""

    def close(self) -> None:
        """Nothing to end."""
