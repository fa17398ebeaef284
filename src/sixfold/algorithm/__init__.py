"""Algorithms: advantages, losses and aggregation.

The rows, `method`, `zoo` and `lineage` import no torch; the other modules do.
"""
