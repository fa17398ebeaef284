"""Settings of training on preferences."""

from __future__ import annotations

from typing import Literal

from .base import Real, Section, knob


class PreferenceConfig(Section):
    """Training on preferences: the loss, or a weighted sum of losses.

    None: the loss's own value (`sixfold algorithms` lists the losses). A setting that no loss of
    the list reads is refused.
    """

    steps: int = knob(0, "updates of a stage of kind preference (0: preference.epochs)", ge=0)
    epochs: int = knob(
        0,
        "passes over the comparisons, in place of preference.steps (0: preference.steps decides)",
        ge=0,
    )
    examples_per_step: int = knob(
        32, "comparisons per step: prompts, each with all of its completions", ge=1
    )
    learning_rate: Real = knob(1e-4, "AdamW learning rate, 5 to 10 times below that of SFT", gt=0)
    warmup_steps: int = knob(10, "steps over which the learning rate rises from 0", ge=0)
    weight_decay: Real = knob(0.0, "AdamW weight decay", ge=0)
    schedule: Literal["constant", "linear", "cosine"] = knob(
        "constant", "learning rate after the warm-up: constant, or a decay to 0 at the last step"
    )
    reference: Literal["frozen", "cached"] = knob(
        "frozen",
        "where log-probs of the reference come from: frozen (a second model, in every step) or"
        " cached (computed once, before the first step)",
    )
    cache: str = knob(
        "",
        "folder of computed log-probs that runs share, with reference = 'cached' (empty: each run"
        " computes its own)",
    )
    losses: tuple[str, ...] = knob(("dpo",), "preference losses that are summed", min_length=1)
    weights: tuple[Real, ...] = knob((), "weight of each loss, in the same order (empty: 1 each)")
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
