"""Sixfold: reinforcement-learning post-training for language models. Six roles around one loss."""

from .api import train
from .types import Group, Reward, Task, Trajectory

__version__ = "0.1.0"
__all__ = ["Group", "Reward", "Task", "Trajectory", "train"]
