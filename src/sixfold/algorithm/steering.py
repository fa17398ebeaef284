"""Values that an algorithm adapts from step to step.

They are the weight of the KL, the weight of the entropy, and the statistics that whiten rewards.
All are measured on the samples before any update, so the numbers of a step do not depend on how it
is split.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..batch import Batch, filled
from .entropy import AdaptiveEntropy, sampled_entropy
from .kl import AdaptiveBeta, k1
from .method import Method
from .shaping import RunningWhiten

ENTROPY_STEP, HIGHEST_ENTROPY_BONUS = 1e-3, 0.1
"""Change per step and maximum of an adaptive entropy bonus. The values are Sixfold's, between
Skywork-OR1's script (1e-4, 5e-3) and TRL's defaults (5e-3, 1).
"""

KL_HORIZON = 10_000
"""Samples over which an adaptive beta changes by its error (arXiv:1909.08593 section 2.2)."""

WHITEN_CLIP = 5.0
"""Bound of whitened rewards, in standard deviations."""


class Steering:
    """The values of a method that change during a run.

    Attributes:
        beta: current KL weight; the method's own if nothing steers it.
        entropy_bonus: current entropy weight; the method's own if nothing steers it.
        steps: number of batches seen.
    """

    def __init__(self, method: Method) -> None:
        m = method
        self.steps = 0
        self.beta, self.entropy_bonus = m.beta, m.entropy_bonus
        self._beta = AdaptiveBeta(m.beta, m.kl_target, KL_HORIZON) if m.kl_target else None
        highest = max(HIGHEST_ENTROPY_BONUS, m.entropy_bonus)
        self._bonus = (
            AdaptiveEntropy(m.entropy_bonus, m.entropy_target, ENTROPY_STEP, highest)
            if m.entropy_target
            else None
        )
        self._whiten = RunningWhiten(WHITEN_CLIP) if m.whiten != "none" else None
        self._per_source = m.whiten == "source"

    def observe(self, batch: Batch, scores: Tensor) -> None:
        """Adapt to the samples of a step. scores: [B] their shaped rewards."""
        self.steps += 1
        if self._beta:
            gap = torch.where(
                batch.mask, k1(batch.old_logp, filled(batch.ref_logp, "ref_logp")), 0.0
            )
            self._beta.update(float(gap.sum() / batch.mask.sum().clamp_min(1)), len(batch.tokens))
            self.beta = self._beta.beta
        if self._bonus:
            entropy = float(sampled_entropy(batch.old_logp, batch.mask))
            self._bonus.update(entropy)
            self.entropy_bonus = self._bonus.applied(entropy)
        if self._whiten:
            self._whiten.update(scores, self._sources(batch))

    def whitened(self, batch: Batch, scores: Tensor) -> Tensor:
        """[B] scores, whitened if the method says so."""
        return self._whiten(scores, self._sources(batch)) if self._whiten else scores

    def metrics(self) -> dict[str, float]:
        """The steered values, for the log."""
        return ({"algorithm/beta": self.beta} if self._beta else {}) | (
            {"algorithm/entropy_bonus": self.entropy_bonus} if self._bonus else {}
        )

    def state(self) -> dict[str, Any]:
        """State that a resumed run needs, JSON-serialisable."""
        seen = self._whiten.state() if self._whiten else {}
        return {
            "steps": self.steps,
            "beta": self.beta,
            "entropy_bonus": self._bonus.coefficient if self._bonus else 0.0,
            "whiten": seen,
        }

    def load(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]
        if self._beta:
            self.beta = self._beta.beta = state["beta"]
        if self._bonus:
            self._bonus.coefficient = state["entropy_bonus"]
        if self._whiten:
            self._whiten.load(state["whiten"])

    def _sources(self, batch: Batch) -> Tensor:
        return filled(batch.source, "source") if self._per_source else torch.zeros_like(batch.group)
