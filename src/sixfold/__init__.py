"""Sixfold: reinforcement-learning post-training for language models. Six roles around one loss."""

__version__ = "0.1.0"
