"""Settings of preemption: what the engine does when KV cache blocks run out."""

from __future__ import annotations

from typing import Literal

from .base import Section, knob


class NoPreemption(Section):
    """Admit a sequence only if its longest possible completion fits, so none is preempted."""

    kind: Literal["none"] = "none"


class RecomputePreemption(Section):
    """Admit a sequence if its prompt fits; compute a preempted sequence again later."""

    kind: Literal["recompute"] = "recompute"


class SwapPreemption(Section):
    """Admit a sequence if its prompt fits; move the blocks of a preempted sequence to the host."""

    kind: Literal["swap"] = "swap"
    host_tokens: int = knob(
        0,
        "tokens of preempted sequences that host memory holds (0: as many as the KV cache);"
        " what does not fit is computed again",
        ge=0,
    )


Preemption = NoPreemption | RecomputePreemption | SwapPreemption
