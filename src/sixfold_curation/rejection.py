"""The state of the data after a filter: what share of the rows it rejects."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .stage import Health


def rejection_health(
    rejected: int, rows: int, what: str, figures: Mapping[str, Any], more: str = ""
) -> Health:
    """Rejection rate, with an alarm if it is 0: such a filter was probably not applied.

    Args:
        rejected: rows that the filter has dropped or changed.
        rows: rows that it has seen.
        what: what it looks for, and where.
        figures: other numbers for the report.
        more: another alarm, or "".
    """
    nothing = (
        f"none of {rows:,} rows was rejected: a filter that rejects nothing was probably not"
        f" applied. Check that {what}"
        if rows and not rejected
        else ""
    )
    return Health(
        metric="share of rejected rows",
        value=rejected / rows if rows else float("nan"),
        alarm="; ".join(text for text in (nothing, more) if text),
        figures=figures,
    )
