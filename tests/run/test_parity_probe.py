"""Warning of a run if rounding alone fills an algorithm's clip band."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import torch

from sixfold.algorithm.zoo import ZOO
from sixfold.batch import Batch
from sixfold.run.parity_probe import noise_warning


def warning(name: str, gap: float, **changes: object) -> str:
    """For 10 sequences of 4 tokens, every other one off by `gap` nats per token."""
    mask = torch.ones(10, 4, dtype=torch.bool)
    logp = torch.zeros(10, 4)
    logp[::2] += gap
    batch = cast(Batch, SimpleNamespace(mask=mask, old_logp=torch.zeros(10, 4)))
    return noise_warning(replace(ZOO[name], **changes), logp, batch)  # type: ignore[arg-type]


def test_gspo_in_bfloat16_is_warned_with_the_measured_share() -> None:
    line = warning("gspo", 2e-3)
    assert "50%" in line and "gspo" in line and "algorithm.correction = 'decoupled'" in line


def test_no_warning_where_noise_is_inside_the_band_or_is_not_clipped() -> None:
    assert warning("gspo", 1e-5) == "", "float32"
    assert warning("grpo", 2e-3) == "", "its band is a thousand times wider"
    assert warning("gspo", 2e-3, correction="decoupled") == "", (
        "ratios are against the trainer's own log-probs"
    )
