"""Settings of the pretraining stage."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from .base import Real, Section, knob


class PretrainConfig(Section):
    """Pretraining on texts: the model predicts each token from those before it."""

    steps: int = knob(0, "number of pretraining steps", ge=0)
    examples_per_step: int = knob(32, "windows per pretraining step", ge=1)
    window: int = knob(
        0,
        "tokens of a window; the first is only read, the others are predicted (0: the model's"
        " context)",
        ge=0,
    )
    form: Literal["windows", "documents"] = knob(
        "windows",
        "windows: random windows over the documents, joined by the end-of-text token; documents:"
        " whole documents, as many as a window holds, and none attends to another (longer ones are"
        " cut into windows)",
    )
    text_field: str = knob("text", "column with the text, in sources with rows", min_length=1)
    learning_rate: Real = knob(3e-4, "AdamW learning rate", gt=0)
    warmup_steps: int = knob(100, "steps over which the learning rate rises from 0", ge=0)
    weight_decay: Real = knob(0.1, "AdamW weight decay", ge=0)
    schedule: Literal["constant", "linear", "cosine"] = knob(
        "cosine", "learning rate after the warm-up: constant, or a decay to 0 at the last step"
    )

    @model_validator(mode="after")
    def _predicts(self) -> PretrainConfig:
        """Refuse a window in which no token is predicted."""
        if self.window == 1:
            raise ValueError(
                "pretrain.window = 1 leaves no token to predict: give at least 2, or 0 for the"
                " model's context"
            )
        return self
