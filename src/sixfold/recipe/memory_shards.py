"""Memory that a rank of a sharded run (FSDP2) needs in addition to its shards. No torch.

docs/memory.md explains the formulas.
"""

from __future__ import annotations

import os

from .memory_held import Holdings
from .memory_part import LOWERED, WEIGHTS, Part, number_width
from .model_size import ModelSize
from .schema import Recipe

AHEAD = 2
"""Layers that are whole at the same time: one is computed while the next one is gathered."""


def ranks_started() -> int:
    """Number of processes of the run: WORLD_SIZE, which torchrun sets, or else 1."""
    stated = os.environ.get("WORLD_SIZE", "")
    return max(1, int(stated)) if stated.isascii() and stated.isdigit() else 1


def gathered_parts(recipe: Recipe, size: ModelSize, held: Holdings) -> tuple[Part, ...]:
    """Whole weights and gradients that exist on a rank for a time, in addition to its shards.

    The root (embedding, head and last norm) is whole during a forward or backward pass. A layer is
    gathered while the layer before it is computed, in the dtype of matrix products.

    Args:
        recipe: the whole run.
        size: sizes of the policy.
        held: counts of the numbers that the run keeps.
    """
    if held.shards == 1 or held.adapter:  # of an adapter, a rank gathers little
        return ()
    width = number_width(recipe)
    tables = size.table * (1 if size.tied else 2)
    experts = size.experts.parameters if size.experts else 0
    gathered = size.parameters - tables - experts + experts // held.experts
    layer = gathered // max(1, size.layers) // held.tensor
    apart = "" if held.tensor == 1 else f", 1 / {held.tensor} of each"
    if experts and held.experts > 1:
        apart = f", with 1 / {held.experts} of the experts"
    stored = LOWERED if held.lowered == held.matrices else WEIGHTS
    weights = tables * stored + AHEAD * layer * width
    each = width + WEIGHTS  # in the dtype of products, and in float32 for the sum
    return (
        Part(
            "gathered weights",
            weights,
            f"embedding and head, {stored} bytes each; {AHEAD} layers{apart}, {width} bytes each",
            samples=False,
        ),
        Part(
            "whole gradients",
            AHEAD * layer * each,
            f"{AHEAD} layers{apart}, {each} bytes each, before each rank keeps its part of the sum",
            samples=False,
        ),
    )
