"""Sizes of a model and the memory of a run, computed without torch."""
