"""Result of one check of the audit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Level = Literal["ok", "warning", "failure", "skipped"]


@dataclass(frozen=True)
class Finding:
    """Result of one check.

    Attributes:
        level: "failure" if the environment is not fit for training, "warning" if the user should
            look at it, "skipped" if the check does not apply.
        result: one line with the figures.
        details: the tasks or texts of the finding, one line each.
        remedy: what to do, or "".
    """

    check: str
    level: Level
    result: str
    details: tuple[str, ...] = ()
    remedy: str = ""

    def to_record(self) -> dict[str, Any]:
        return asdict(self)


def worst(findings: Sequence[Finding]) -> Level:
    levels = {finding.level for finding in findings}
    return next((level for level in ("failure", "warning") if level in levels), "ok")
