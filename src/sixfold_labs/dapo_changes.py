"""The four changes that DAPO makes to GRPO (arXiv:2503.14476), each on or off."""

from __future__ import annotations

from dataclasses import dataclass

STEPS = 200
"""Steps of a run, simulated or trained."""


@dataclass(frozen=True)
class Changes:
    """The four changes of DAPO."""

    clip_higher: bool
    dynamic_sampling: bool
    token_level: bool
    overlong_penalty: bool
