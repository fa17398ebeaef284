"""Offset, scale and length slope of a reward model, in the config.json of its folder.

`mean` and `std` are the keys that OpenRLHF reads and writes.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from .quality import length_slope

_SMALLEST_STD = 1e-6
"""A model whose scores differ by less has no scale: it has not learned yet."""


@dataclass(frozen=True)
class Calibration:
    """What turns a score r of a completion of n tokens into a reward.

    The reward is (r - length_slope * (n - length_mean) - mean) / std.

    Attributes:
        mean: offset.
        std: scale.
        length_slope: score per token that is taken away. 0: the length does not count.
        length_mean: tokens at which nothing is taken away.
    """

    mean: float = 0.0
    std: float = 1.0
    length_slope: float = 0.0
    length_mean: float = 0.0

    def reward(self, scores: Tensor, lengths: Tensor) -> Tensor:
        """[N] rewards of scores [N] of completions with these lengths [N]."""
        return (scores - self.length_slope * (lengths - self.length_mean) - self.mean) / self.std

    def write(self, config: PreTrainedConfig) -> None:
        """Set the figures in the configuration of a model, with which they are saved."""
        for name, value in asdict(self).items():
            setattr(config, name, value)

    @classmethod
    def of(cls, config: PreTrainedConfig) -> Calibration:
        """The figures in a model's configuration. A missing one has its default.

        Raises:
            ValueError: if one is not a finite number, or the scale is not positive.
        """
        found: dict[str, Any] = {
            name: vars(config).get(name, v) for name, v in asdict(cls()).items()
        }
        for name, value in found.items():
            number = isinstance(value, int | float) and math.isfinite(value)
            if not number or (name == "std" and value <= 0):
                wanted = "a number above 0" if name == "std" else "a finite number"
                raise ValueError(f"{name} of its config.json must be {wanted}, got {value!r:.60}")
        return cls(**{name: float(value) for name, value in found.items()})


def calibrate(
    scores: Tensor, lengths: Tensor, groups: Tensor, *, normalise: bool, debias: bool
) -> Calibration:
    """Calibration that gives these scores mean 0 and standard deviation 1.

    Args:
        scores: [N] float64.
        lengths: [N] tokens of each completion, float64.
        groups: [N] number of each completion's group, from 0.
        normalise: whether there is an offset and a scale.
        debias: whether what the length explains of the scores of one prompt is taken away.
    """
    slope = length_slope(scores, lengths, groups) if debias else 0.0
    middle = float(lengths.mean()) if debias else 0.0
    if not normalise:
        return Calibration(length_slope=slope, length_mean=middle)
    rest = scores - slope * (lengths - middle)
    found = scaled(float(rest.mean()), float(torch.std(rest, correction=0)))
    return replace(found, length_slope=slope, length_mean=middle)


def scaled(mean: float, std: float) -> Calibration:
    """Calibration by the mean and the standard deviation of scores. None if they are not finite."""
    if not math.isfinite(mean + std):
        return Calibration()
    return Calibration(mean, std if std > _SMALLEST_STD * max(1.0, abs(mean)) else 1.0)
