"""Algorithms: advantages, losses, aggregation. `table` is importable without torch; the rest is not."""
