"""The reference role: a frozen model that scores samples, and several scorers as one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from ..batch import Batch
from ..checkpointable import Checkpointable
from ..trainer.packing import PackedRow
from ..types import Group


class Scorer(Protocol):
    """Fills in one field of the batch by forward passes alone, before the algorithm reads it."""

    def score(self, batch: Batch) -> Batch:
        """The batch with the field filled in."""
        ...


class Reference(Protocol):
    """Reference as the training loop uses it. It is frozen: equal batches give equal log-probs."""

    def start(self, groups: Sequence[Group]) -> None:
        """Start scoring in the background if possible. Rewards are not known yet.

        Calling it changes no result.
        """
        ...

    def score(self, batch: Batch) -> Batch:
        """The batch with `ref_logp` filled in.

        The batch is returned unchanged if the loss needs no reference, or if the trainer fills in
        `ref_logp` by `scorer`.
        """
        ...


class Scorers:
    """The reference, then the critic and the proximal pass: each fills in its own field."""

    def __init__(self, reference: Reference, others: Sequence[Scorer]) -> None:
        self._reference = reference
        self._others = others

    def start(self, groups: Sequence[Group]) -> None:
        """Start only the reference: the other scorers need the weights that this process trains."""
        self._reference.start(groups)

    def score(self, batch: Batch) -> Batch:
        for scorer in (self._reference, *self._others):
            batch = scorer.score(batch)
        return batch


class KeptReference(Reference, Checkpointable, Protocol):
    """Reference of a run: adds checkpoints and the reset of its weights.

    Its tensors are the weights, tied ones once.
    """

    @property
    def scorer(self) -> Callable[[PackedRow], Tensor] | None:
        """Log-probs [S] of a packed row's scored tokens, called by the trainer per micro-batch.

        None if `score` fills them in.
        """
        ...

    def reset(self, policy: nn.Module) -> None:
        """Copy the policy's weights into the reference."""
        ...

    def check_apart(self, optimizer: torch.optim.Optimizer) -> None:
        """Check that no reference weight can be trained.

        Raises:
            RuntimeError: if a weight requires gradients or shares storage with a weight of the
                optimizer.
        """
        ...

    def close(self) -> None:
        """Release processes and memory. A second call does nothing."""
        ...
