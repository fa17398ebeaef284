"""One metric of `metrics.jsonl`: key, unit, meaning and formula."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Value = float | Sequence[float | None] | None
"""A metric as logged. None in a file is a number that was not finite. An absent key was not
measured in that step.
"""


@dataclass(frozen=True)
class Metric:
    """One metric.

    Attributes:
        key: name. A key that ends in `*` is a family: the run supplies the rest of the name, such
            as a reward part.
        formula: how it is computed.
        is_list: whether it is a list of numbers.
        edges: of a list, the edges of its bins. Empty: entry a counts the value a.
        timed: whether it depends on time or load without being a duration or speed.
        timed_with: setting with which it does. "": none.
    """

    key: str
    unit: str
    meaning: str
    formula: str
    is_list: bool = False
    edges: Sequence[float] = ()
    timed: bool = False
    timed_with: str = ""

    @property
    def depends_on_time(self) -> bool:
        """True if two equal runs may differ in it: durations, speeds, and what they decide."""
        return self.timed or self.unit in ("s", "tokens/s")

    @property
    def is_family(self) -> bool:
        """True if the key stands for keys that only the run knows."""
        return self.key.endswith("*")

    def matches(self, key: str) -> bool:
        """True when `key` is this metric or, for a family, a member with a non-empty name."""
        if self.is_family:
            return len(key) >= len(self.key) and key.startswith(self.key[:-1])
        return key == self.key
