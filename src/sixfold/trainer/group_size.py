"""Check that the size of a group of ranks divides what the group has to divide."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ..errors import UserError


def check_group_size(setting: str, value: int, sizes: Mapping[str, int]) -> None:
    """Check that a group of ranks can divide all sizes.

    Args:
        setting: setting that gives the ranks per group.
        value: ranks per group.
        sizes: numbers to divide, by what they count.

    Raises:
        UserError: if the group does not divide one of them. It names the nearest value that does.
    """
    common = math.gcd(*sizes.values())
    if common % value == 0:
        return
    divisors = (t for t in range(1, common + 1) if common % t == 0)
    nearest = min(divisors, key=lambda t: abs(t - value))
    counts = ", ".join(f"{size} {name}" for name, size in sizes.items())
    what = f"the {counts}" if len(sizes) == 1 else f"all of these numbers: {counts}"
    raise UserError(
        f"{setting} = {value} must divide {what}. The nearest value that does is {nearest}"
    )
