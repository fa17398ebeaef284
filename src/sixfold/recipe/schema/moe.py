"""Settings of mixtures of experts."""

from __future__ import annotations

from typing import Literal

from .base import Real, Section, knob


class MoeConfig(Section):
    """Training of models with expert layers. Without such layers, leave the section out."""

    balance_loss: Real = knob(
        0.0,
        "weight of the loss that makes routers use all experts equally (0: none; usual: 0.001)",
        ge=0,
    )
    routing: Literal["free", "measure", "replay"] = knob(
        "free",
        "free: the trainer's routers choose experts; measure: also report how often they differ"
        " from the experts at sampling, which the engine records; replay: the trainer uses the"
        " recorded experts",
    )
