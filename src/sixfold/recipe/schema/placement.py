"""Settings of placement: which processes sample."""

from __future__ import annotations

from typing import Literal

from .base import Section, knob


class LocalPlacement(Section):
    """Trainer and sampler share a process."""

    kind: Literal["local"] = "local"


_SAMPLERS = knob(1, "number of processes that sample", ge=1, le=64)
_THREADS = knob(1, "CPU threads of each process that samples", ge=1)
_RESTARTS = knob(
    3,
    "times in a run that a process that died or hangs is replaced; its requests are sampled again",
    ge=0,
)


class ProcessPlacement(Section):
    """Samplers have processes of their own on this machine."""

    kind: Literal["processes"] = "processes"
    samplers: int = _SAMPLERS
    threads: int = _THREADS
    restarts: int = _RESTARTS


class RayPlacement(Section):
    """Samplers are actors of a Ray cluster."""

    kind: Literal["ray"] = "ray"
    samplers: int = _SAMPLERS
    threads: int = _THREADS
    restarts: int = _RESTARTS
    address: str = knob(
        "",
        'address of a Ray cluster ("auto", or host:port of its head), or empty: the run starts a'
        " cluster on this machine, which ends with it",
    )


SamplersApart = ProcessPlacement | RayPlacement
Placement = LocalPlacement | SamplersApart
