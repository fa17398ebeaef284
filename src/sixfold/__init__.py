"""Sixfold: reinforcement-learning post-training for language models. Six roles around one loss."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .types import Group, Reward, Task, Trajectory

if TYPE_CHECKING:
    from .api import train

__version__ = "0.1.0"
__all__ = ["Group", "Reward", "Task", "Trajectory", "train"]


def __getattr__(name: str) -> Any:
    # `train` on first use: `import sixfold`, which the command line does, must cost nothing.
    if name == "train":
        from .api import train

        return train
    raise AttributeError(f"module 'sixfold' has no attribute {name!r}")
