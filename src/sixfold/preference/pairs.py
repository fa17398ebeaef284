"""Log-probs of completions, as a preference loss reads them."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor


@dataclass(frozen=True)
class Pairs:
    """N pairs of a better and a worse completion of one prompt: tensors [N] of floats.

    Attributes:
        chosen: log-prob of the better completion under the policy: the sum over its tokens.
        rejected: the same of the worse completion.
        chosen_tokens: number of its tokens.
        rejected_tokens: the same of the worse completion.
        ref_chosen: log-prob of the better completion under the reference. None: no reference.
        ref_rejected: the same of the worse completion.
        weight: weight of the pair in the step. None: 1 each.
        chosen_head: as `chosen`, of the first min(chosen_tokens, rejected_tokens) tokens. None
            unless a loss needs it (`Settings.needs_head`).
        rejected_head: the same of the worse completion.
        ref_chosen_head: `chosen_head` under the reference.
        ref_rejected_head: `rejected_head` under the reference.
    """

    chosen: Tensor
    rejected: Tensor
    chosen_tokens: Tensor
    rejected_tokens: Tensor
    ref_chosen: Tensor | None = None
    ref_rejected: Tensor | None = None
    weight: Tensor | None = None
    chosen_head: Tensor | None = None
    rejected_head: Tensor | None = None
    ref_chosen_head: Tensor | None = None
    ref_rejected_head: Tensor | None = None

    def __len__(self) -> int:
        return len(self.chosen)

    @property
    def weights(self) -> Tensor:
        """[N] weights of the pairs."""
        return torch.ones_like(self.chosen).detach() if self.weight is None else self.weight

    def of(self, rows: Tensor) -> Pairs:
        """The pairs of these indices."""
        return _of(self, rows)

    def without_reference(self) -> Pairs:
        """The same pairs for a loss that has no reference."""
        return replace(
            self, ref_chosen=None, ref_rejected=None, ref_chosen_head=None, ref_rejected_head=None
        )


@dataclass(frozen=True)
class Unpaired:
    """N completions with a label each: tensors [N].

    Attributes:
        logp: log-prob of the completion under the policy: the sum over its tokens.
        ref_logp: the same under the reference.
        liked: bool, the label.
        weight: weight of the completion in the step. None: 1 each.
        mismatched: log-ratio to the reference of another prompt's completion after this prompt,
            from which KTO estimates the KL. None: the completions' own log-ratios are used.
    """

    logp: Tensor
    ref_logp: Tensor
    liked: Tensor
    weight: Tensor | None = None
    mismatched: Tensor | None = None

    def __len__(self) -> int:
        return len(self.logp)

    @property
    def weights(self) -> Tensor:
        """[N] weights of the completions."""
        return torch.ones_like(self.logp).detach() if self.weight is None else self.weight

    def of(self, rows: Tensor) -> Unpaired:
        """The completions of these indices."""
        return _of(self, rows)


@dataclass(frozen=True)
class Statistics:
    """What a loss needs of a whole step. None: not needed.

    Attributes:
        reference_point: KTO's estimate of the KL, or BCO's shift of the rewards.
        beta: beta of the step, where it adapts.
        mean_tokens: mean tokens of the better completions, where their cross-entropy is trained.
        factor: [N] factor of each pair, where some are left out.
        chosen_partner: [N] quantity that the pair's (or its better completion's) is compared with.
        rejected_partner: [N] the same for its worse completion.
        running: average over the steps, for the next step.
    """

    reference_point: Tensor | None = None
    beta: Tensor | None = None
    mean_tokens: Tensor | None = None
    factor: Tensor | None = None
    chosen_partner: Tensor | None = None
    rejected_partner: Tensor | None = None
    running: float | None = None

    def of(self, rows: Tensor) -> Statistics:
        """Statistics of the step for some of its rows."""
        return _of(self, rows)


Rows = TypeVar("Rows", Pairs, Unpaired, Statistics)


def _of(table: Rows, rows: Tensor) -> Rows:
    columns: dict[str, Any] = {
        f.name: value[rows]
        for f in fields(table)
        if isinstance(value := getattr(table, f.name), Tensor) and value.ndim
    }
    return replace(table, **columns)
