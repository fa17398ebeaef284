"""Base of generators that give prepared replies instead of sampling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from .generator import GeneratorClosed


class WithoutModel:
    """Generator without a model. A subclass implements `generate`."""

    version = -1
    """Version of tokens that no model of this run sampled."""

    async def score(self, tokens: Sequence[int], temperature: float = 1.0) -> list[float]:
        """Raise GeneratorClosed: there is no model to score with."""
        raise GeneratorClosed("prepared replies have no model")

    async def load(self, weights: Mapping[str, Tensor], version: int) -> int:
        """Raise GeneratorClosed: there is no model to load weights into."""
        raise GeneratorClosed("prepared replies have no model")

    async def sleep(self) -> None:
        """Do nothing: there is no memory to free."""

    def close(self) -> None:
        """Do nothing: there is no thread to end."""
