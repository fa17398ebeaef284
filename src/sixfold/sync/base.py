"""Contract of the sync role: the sampler gets the trainer's weights and their version."""

from __future__ import annotations

from typing import Protocol


class WeightSync(Protocol):
    """Weight sync, called after every step.

    After a sync, the sampler verifiably has the trainer's weights and stamps tokens with their
    version.
    """

    def sync(self, version: int) -> None:
        """Pass weights with number `version` to the sampler, or leave it stale on purpose.

        `version` never decreases.
        """
        ...
