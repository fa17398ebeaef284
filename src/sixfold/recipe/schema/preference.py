"""Settings of training on preferences."""

from __future__ import annotations

from typing import Literal

from .base import Real, Section, knob


class PreferenceConfig(Section):
    """Training on preferences: the loss, or a weighted sum of losses.

    None: the loss's own value (`sixfold algorithms` lists the losses). A setting that no loss of
    the list reads is refused.
    """

    losses: list[str] = knob(["dpo"], "preference losses that are summed", min_length=1)
    weights: list[Real] = knob([], "weight of each loss, in the same order (empty: 1 each)")
    beta: Real | None = knob(
        None, "scale of the margin: larger values keep the policy nearer to the reference", gt=0
    )
    label_smoothing: Real | None = knob(
        None, "probability that a label is wrong (cdpo, robust, exo, aot, cpo, simpo)", ge=0, lt=0.5
    )
    sft_weight: Real | None = knob(
        None, "weight of the cross-entropy of the better completion, per token", ge=0
    )
    target_margin: Real | None = knob(None, "margin that a pair must exceed (simpo: gamma)", ge=0)
    shift: Real | None = knob(
        None, "weight of the worse completion in the margin (dpo_shift: f)", gt=0, le=1
    )
    tail_weight: Real | None = knob(
        None,
        "weight of the tokens after the length of the pair's shorter completion (ld_dpo: alpha)",
        ge=0,
        le=1,
    )
    penalty: Real | None = knob(
        None, "weight of the fall of the better completion below the reference (dpop)", ge=0
    )
    divergence: Literal["reverse-kl", "forward-kl", "js", "alpha", "squared"] | None = knob(
        None, "divergence to the reference that replaces the KL in losses of the margin"
    )
    divergence_alpha: Real | None = knob(
        None, "alpha of the alpha divergence (0: forward KL, 1: reverse KL)", ge=0, le=1
    )
    liked_weight: Real | None = knob(None, "weight of liked completions (kto, bco)", gt=0)
    disliked_weight: Real | None = knob(None, "weight of disliked completions (kto, bco)", gt=0)
