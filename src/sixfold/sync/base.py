"""Contract of the sync role: the sampler gets the trainer's weights and their version."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor
from transformers import PreTrainedModel

from ..engine.adapters import Adapter


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


class AdaptedPolicy(Protocol):
    """A policy that consists of a frozen base and a trained adapter."""

    @property
    def model(self) -> PreTrainedModel:
        """The trained module, which contains the adapter."""
        ...

    @property
    def base(self) -> PreTrainedModel:
        """The model without the adapter. It shares its weights with the trained module."""
        ...

    def adapter(self) -> Adapter:
        """The current matrices of the adapter. They contain the scale."""
        ...

    def merged(self) -> Mapping[str, Tensor]:
        """Weights of the base by name, with the current adapter merged in."""
        ...
