"""Settings of placement: which processes sample, and who starts those that train."""

from __future__ import annotations

from typing import Literal

from .base import DEVICES, Section, knob


class LocalPlacement(Section):
    """Trainer and sampler share a process."""

    kind: Literal["local"] = "local"

    @property
    def apart(self) -> bool:
        """True if samplers have processes of their own."""
        return False


_SAMPLERS = knob(
    1,
    "number of processes that sample; with several ranks, of each, or vLLM's on each machine",
    ge=1,
    le=64,
)
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
    whole_every: int = knob(
        1,
        "weight files from one that has all tensors to the next; those between have the tensors"
        " that changed. 1: each has all",
        ge=1,
    )
    devices: str = knob(
        "",
        "numbers of the GPUs of the processes, one for each, those of the first rank of this"
        " machine first, e.g. 4,5,6,7 (empty: the GPU of the rank that starts it)",
        pattern=DEVICES,
    )

    @property
    def apart(self) -> bool:
        """True if samplers have processes of their own."""
        return True


class RayPlacement(Section):
    """Samplers are actors of a Ray cluster, or ranks are, with their samplers beside them."""

    kind: Literal["ray"] = "ray"
    ranks: int = knob(
        1,
        "number of trainer ranks. 1: the trainer stays where `sixfold train` was started. More: Ray"
        " starts them, each with the samplers (0: none, it samples itself) and checks of its share"
        " of the tasks",
        ge=1,
        le=1024,
    )
    samplers: int = knob(
        1,
        "number of samplers; with several ranks, of processes beside each (0: none), or of vLLM"
        " processes on each machine",
        ge=0,
        le=64,
    )
    threads: int = _THREADS
    restarts: int = _RESTARTS
    address: str = knob(
        "",
        'address of a Ray cluster ("auto", or host:port of its head), or empty: the run starts a'
        " cluster on this machine, which ends with it",
    )

    @property
    def apart(self) -> bool:
        """True if samplers have processes of their own."""
        return self.samplers > 0


SamplersApart = ProcessPlacement | RayPlacement
Placement = LocalPlacement | SamplersApart
