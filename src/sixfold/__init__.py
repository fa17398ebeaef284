"""Sixfold: reinforcement-learning post-training for language models. Six roles around one loss."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from .types import Group, Reward, Task, Trajectory
from .version import __version__

if TYPE_CHECKING:
    from .api import train

# They warn about torchao whenever transformers imports it.
for _name in ("torchao", "torch.utils._pytree"):
    if logging.getLogger(_name).level == logging.NOTSET:
        logging.getLogger(_name).setLevel(logging.ERROR)

__all__ = ["Group", "Reward", "Task", "Trajectory", "__version__", "train"]


def __getattr__(name: str) -> Any:
    # `train` on first use: `import sixfold`, which the command line does, must cost nothing.
    if name == "train":
        from .api import train

        return train
    raise AttributeError(f"module 'sixfold' has no attribute {name!r}")
