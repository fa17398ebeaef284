"""The sync role, in words: the sampler gets the trainer's weights, with a number."""

from __future__ import annotations

from typing import Protocol


class WeightSync(Protocol):
    """Called after every step. After a sync the sampler provably has the trainer's weights and stamps tokens with their version."""

    def sync(self, version: int) -> None:
        """Bring weights numbered `version` to the sampler, or leave it stale on purpose. version never falls."""
        ...
