"""Algorithms: advantages, losses, aggregation. `method`, `zoo` and `lineage` import no torch; the
rest does.
"""
