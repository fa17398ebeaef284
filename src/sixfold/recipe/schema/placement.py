"""Settings of placement: which processes sample."""

from __future__ import annotations

from typing import Literal

from .base import Section, knob


class LocalPlacement(Section):
    """Trainer and sampler share a process."""

    kind: Literal["local"] = "local"


class ProcessPlacement(Section):
    """Samplers have processes of their own on this machine."""

    kind: Literal["processes"] = "processes"
    samplers: int = knob(1, "number of processes that sample", ge=1, le=64)
    threads: int = knob(1, "CPU threads of each process that samples", ge=1)
    restarts: int = knob(
        3,
        "times in a run that a process that died or hangs is replaced; its requests are sampled"
        " again",
        ge=0,
    )


Placement = LocalPlacement | ProcessPlacement
