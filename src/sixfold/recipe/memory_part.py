"""One part of the memory of a run, and sizes that several parts use. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from .schema import Recipe

WEIGHTS, GRADIENT, MOMENTS, LOWERED = 4, 4, 8, 2
"""Bytes per parameter: float32 weights, gradient, AdamW's two moments, a bfloat16 copy."""


@dataclass(frozen=True)
class Part:
    """Memory for one purpose.

    Attributes:
        name: name of the part.
        size: bytes.
        formula: how the bytes follow from sizes and settings.
        trains: allocated while the trainer works.
        samples: allocated while completions are sampled.
        early: already allocated when the KV cache is created.
        host: in host memory, not on the device.
    """

    name: str
    size: int
    formula: str
    trains: bool = True
    samples: bool = True
    early: bool = False
    host: bool = False


def number_width(recipe: Recipe) -> int:
    """Bytes per number in the matrix products of a forward pass."""
    return 2 if recipe.run.precision == "bfloat16" else 4
