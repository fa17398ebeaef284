"""Held-out evaluation. `evaluate` runs a model; `statistics` computes intervals and tests."""
