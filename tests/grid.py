"""A grid of sizes in one test."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any


def on_grid(check: Callable[..., None], **axes: Iterable[Any]) -> None:
    """Call `check` at every point of a grid. A failure names its point."""
    for values in itertools.product(*axes.values()):
        point = dict(zip(axes, values, strict=True))
        try:
            check(**point)
        except BaseException as error:
            error.add_note(f"at {point}")
            raise
