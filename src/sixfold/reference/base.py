"""The reference role, in words: how likely were these tokens before training?"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..batch import Batch
from ..trainer.packing import PackedRow
from ..types import Group


class Scorer(Protocol):
    """Whoever fills in a field of the batch by a forward pass alone, once, before the algorithm reads it."""

    def score(self, batch: Batch) -> Batch:
        """The batch with its field filled in."""
        ...


class Reference(Protocol):
    """What the loop asks. Frozen; the same batch always gives the same answer."""

    def start(self, groups: Sequence[Group]) -> None:
        """Rollouts exist, rewards do not yet: whoever can score meanwhile may begin. Changes no value."""
        ...

    def score(self, batch: Batch) -> Batch:
        """The batch with `ref_logp` filled in; as it is where the loss needs none, or where the trainer fills it in by `scorer`."""
        ...


class KeptReference(Reference, Protocol):
    """What a run asks besides: the weights' life from its first step to its last checkpoint."""

    @property
    def scorer(self) -> Callable[[PackedRow], Tensor] | None:
        """Log-probs [S] of a packed row's scored tokens, for the trainer to ask for as it goes; None where `score` has filled them in."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """Weights as `reference/NAME`, for a checkpoint; tied ones once. Empty where nothing is kept."""
        ...

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Put a checkpoint's weights back."""
        ...

    def reset(self, policy: PreTrainedModel) -> None:
        """Copy the policy's weights in."""
        ...

    def check_apart(self, optimizer: torch.optim.Optimizer) -> None:
        """Raises RuntimeError if a weight would be trained: it requires gradients, or shares storage with one that the optimizer moves."""
        ...

    def close(self) -> None:
        """Give back processes and memory. A second call does nothing."""
        ...
