"""`Grade`: what a reward function may return instead of a number, with the reason for the value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..types import VERDICTS, Verdict

DETAIL_CHARACTERS = 300


@dataclass(frozen=True)
class Grade:
    """Value of one completion, and why it has this value.

    Attributes:
        value: the reward. None exactly if the verdict is "infrastructure_error": such a completion
            has no reward and is not trained on.
        verdict: how the check ended.
        detail: one line for people, such as the first test that failed.
        isolation: level of the sandbox that ran the check; "" if none did.

    Raises:
        ValueError: for an unknown verdict, or a value that contradicts the verdict.
    """

    value: float | None
    verdict: Verdict
    detail: str = ""
    isolation: str = ""

    def __post_init__(self) -> None:
        if self.verdict not in VERDICTS:
            raise ValueError(
                f"Grade: verdict {self.verdict!r} is unknown. Use one of {', '.join(VERDICTS)}"
            )
        if (self.value is None) != (self.verdict == "infrastructure_error"):
            raise ValueError(
                f"Grade: value {self.value!r} contradicts verdict {self.verdict!r}. The value is"
                " None exactly if the verdict is 'infrastructure_error'"
            )
        # A frozen dataclass: a detail of several lines would break tables and error messages.
        object.__setattr__(self, "detail", " ".join(self.detail.split())[:DETAIL_CHARACTERS])

    @property
    def failed(self) -> bool:
        """True if the check itself failed, so that nothing is known about the completion."""
        return self.verdict == "infrastructure_error"

    def to_record(self) -> dict[str, Any]:
        """JSON form."""
        return {
            "value": self.value,
            "verdict": self.verdict,
            "detail": self.detail,
            "isolation": self.isolation,
        }


def right_or_wrong(right: bool) -> Grade:
    """Grade of a check with only two results: 1 and "passed", or 0 and "wrong_answer"."""
    return Grade(1.0, "passed") if right else Grade(0.0, "wrong_answer")


def plain_value(value: float | Grade | None) -> float | None:
    """The number of a result. None if the reward does not apply, or if its check failed."""
    return value.value if isinstance(value, Grade) else value
