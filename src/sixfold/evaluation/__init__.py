"""Held-out evaluation: `statistics` is plain arithmetic, `evaluate` runs a model."""
