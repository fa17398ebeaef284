"""Settings of training on several ranks. torchrun gives the number of ranks."""

from __future__ import annotations

from .base import Real, Section, knob


class ParallelConfig(Section):
    """Training on several ranks, which torchrun starts."""

    replicas: int = knob(
        1,
        "copies of the sharded model (HSDP); the ranks of one copy share its weights, gradients"
        " and optimizer state. Must divide the number of ranks",
        ge=1,
    )
    tensor: int = knob(
        1,
        "ranks of a tensor group, which divide every layer and compute it together (tensor"
        " parallelism). Must divide the ranks of one copy, and the heads of the model",
        ge=1,
    )
    experts: int = knob(
        1,
        "ranks of an expert group, which divide the experts of every layer among them and exchange"
        " tokens (expert parallelism). Must divide the ranks of one copy, and the experts of a"
        " layer",
        ge=1,
    )
    context: int = knob(
        1,
        "ranks of a context group, which divide the positions of each packed row (context"
        " parallelism). Must divide the ranks of one copy, or its tensor groups",
        ge=1,
    )
    timeout_s: Real = knob(1800.0, "longest wait for another rank, in seconds", gt=0)
