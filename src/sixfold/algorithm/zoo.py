"""All algorithms on one screen. Adding one: its file, its row in `table.py`, its line here."""

from __future__ import annotations

from .base import Algorithm
from .grpo import Grpo
from .reinforce import Reinforce
from .table import AlgorithmDefaults

ZOO: dict[str, type[Grpo] | type[Reinforce]] = {
    "reinforce": Reinforce,
    "grpo": Grpo,
}


def make_algorithm(defaults: AlgorithmDefaults, horizon: int) -> Algorithm:
    """The algorithm that a resolved row names. horizon: the longest completion the run allows, in tokens."""
    return ZOO[defaults.name](defaults, horizon)
