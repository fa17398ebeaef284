"""What reward functions return: numbers, or a `Grade` with the reason for the value.

They may return tensors, arrays and numpy scalars. Neither torch nor numpy is imported: arrays of
every library have `tolist`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import index
from typing import Any, Protocol, SupportsFloat, runtime_checkable

from ..types import VERDICTS, Reward, Verdict

DETAIL_CHARACTERS = 300

MAX_REWARD = 1e15
"""Largest absolute reward.

Training computes in float32, where the square of a reward above 1e19 is infinite: the group would
look as if all its rewards were equal.
"""


@dataclass(frozen=True)
class Grade:
    """Value of one completion, and why it has this value.

    Attributes:
        value: the reward. None exactly if the verdict is "infrastructure_error": such a completion
            has no reward and is not trained on.
        verdict: how the check ended. None: the reward does not tell.
        detail: one line for people, such as the first test that failed.
        isolation: level of the sandbox that ran the check; "" if none did.
        metrics: other numbers by name. They are logged and do not count in the reward.
        steps: rewards of steps of the completion as (end, reward), in addition to `value`. `end` is
            the number of characters of the completion up to the end of the step.

    Raises:
        ValueError: for an unknown verdict, a value that contradicts the verdict, or a metric that
            is no finite number, or for a step with such a reward.
        TypeError: if the steps are no pairs of numbers.
    """

    value: float | None
    verdict: Verdict | None
    detail: str = ""
    isolation: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)
    steps: Sequence[tuple[int, float]] = ()

    def __post_init__(self) -> None:
        if self.verdict is not None and self.verdict not in VERDICTS:
            raise ValueError(
                f"Grade: verdict {self.verdict!r} is unknown. Use one of {', '.join(VERDICTS)}"
            )
        if (self.value is None) != (self.verdict == "infrastructure_error"):
            raise ValueError(
                f"Grade: value {self.value!r} contradicts verdict {self.verdict!r}. The value is"
                " None exactly if the verdict is 'infrastructure_error'"
            )
        for name, metric in self.metrics.items():
            if not (isinstance(name, str) and isinstance(metric, int | float)):
                raise ValueError(f"Grade: metrics {name!r}: {metric!r} is not a number with a name")
            if not math.isfinite(metric):
                raise ValueError(f"Grade: metrics {name!r}: {metric!r} is not finite")
        try:
            steps = tuple((index(end), checked_value(reward)) for end, reward in self.steps)
        except (TypeError, ValueError) as error:
            raise type(error)(
                f"Grade: steps {self.steps!r} are not pairs (end, reward) of numbers: {error}"
            ) from error
        object.__setattr__(self, "steps", steps)
        # A frozen dataclass: a detail of several lines would break tables and error messages.
        object.__setattr__(self, "detail", " ".join(self.detail.split())[:DETAIL_CHARACTERS])

    @property
    def failed(self) -> bool:
        """True if the check itself failed, so that nothing is known about the completion."""
        return self.verdict == "infrastructure_error"

    def to_record(self) -> dict[str, Any]:
        return {
            "value": self.value,
            "verdict": self.verdict,
            "detail": self.detail,
            "isolation": self.isolation,
            "metrics": dict(self.metrics),
            "steps": self.steps,
        }


def right_or_wrong(right: bool) -> Grade:
    """Grade of a check with only two results: 1 and "passed", or 0 and "wrong_answer"."""
    return Grade(1.0, "passed") if right else Grade(0.0, "wrong_answer")


def plain_value(value: float | Grade | None) -> float | None:
    """The number of a result. None if the reward does not apply, or if its check failed."""
    return value.value if isinstance(value, Grade) else value


def graded_value(value: Any) -> float | Grade:
    """A result of a reward: a number as a float, or a grade whose value is a float.

    Raises:
        TypeError: if it is neither.
        ValueError: if its value cannot be trained on.
    """
    if not isinstance(value, Grade):
        return checked_value(value)
    return value if value.value is None else replace(value, value=checked_value(value.value))


def checked_value(value: Any) -> float:
    """`value` as a float.

    Raises:
        TypeError: if it is not a number.
        ValueError: if it is NaN, infinite or beyond `MAX_REWARD`: no such value can be trained on.
    """
    finite = number(value)
    if not math.isfinite(finite):
        raise ValueError(f"returned {finite}")
    if abs(finite) > MAX_REWARD:
        raise ValueError(
            f"returned {finite:g}: rewards must be between -{MAX_REWARD:g} and {MAX_REWARD:g}"
        )
    return finite


@runtime_checkable
class Array(Protocol):
    """A tensor, an array, or a scalar of an array library."""

    def tolist(self) -> Any: ...


def number(value: Any) -> float:
    """One number as a float. An array must have exactly one entry.

    Raises:
        TypeError: for text, None, lists, complex numbers and arrays of several entries.
        ValueError: for an integer that is too large for a float.
    """
    plain = value.tolist() if isinstance(value, Array) else value
    if isinstance(value, Array):
        while isinstance(plain, list) and len(plain) == 1:
            plain = plain[0]
    if not isinstance(plain, SupportsFloat):
        raise TypeError(f"returned {type(value).__name__}, not a number")
    try:
        return float(plain)
    except OverflowError as error:
        raise ValueError("returned an integer that is too large for a float") from error


def entries(values: Any) -> list[Any]:
    """Entries of a list, tuple, generator, tensor, array or column of rewards.

    Raises:
        TypeError: for anything else, including text and dictionaries.
    """
    plain = values.tolist() if isinstance(values, Array) else values
    try:
        if not isinstance(plain, str | bytes | Mapping):
            return [
                (
                    entry[0]
                    if isinstance(values, Array) and isinstance(entry, list) and len(entry) == 1
                    else entry
                )
                for entry in plain
            ]
    except TypeError:
        pass
    raise TypeError(f"returned {type(values).__name__}, not a list of rewards")


def reward_given(given: Reward | Grade | float, where: str) -> Reward:
    """The reward that an environment gives, with all of its numbers as finite floats.

    Args:
        where: name of a plain number in messages.

    Raises:
        TypeError: if one of its numbers has another type.
        ValueError: if one of its numbers is not finite or too large, or if a grade has steps.
    """
    if isinstance(given, Grade):
        if given.steps:
            raise ValueError(
                "Grade.steps are for reward functions. An environment gives Observation.reward for"
                " a reply, or Reward.steps"
            )
        if given.value is None:
            failed = Reward.failed(given.detail or str(given.verdict))
            return replace(failed, isolation=given.isolation)
        return Reward(
            number_given(given.value, "Grade.value"),
            verdict=given.verdict,
            detail=given.detail,
            isolation=given.isolation,
        )
    if not isinstance(given, Reward):
        return Reward(number_given(given, where))
    if given.value is None:
        return given
    if not isinstance(given.parts, Mapping):
        raise TypeError(f"Reward.parts is of type {type(given.parts).__name__}, not a dictionary")
    parts = {n: number_given(part, f"Reward.parts[{n!r}]") for n, part in given.parts.items()}
    return replace(
        given,
        value=number_given(given.value, "Reward.value"),
        parts=parts,
        steps=tuple((index(at), number_given(step, "Reward.steps")) for at, step in given.steps),
        score=None if given.score is None else number_given(given.score, "Reward.score"),
    )


def number_given(given: object, where: str) -> float:
    """A number of an environment as a float. The errors of `checked_value` name `where`."""
    try:
        return checked_value(given)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{where}: the environment {error}. Give a finite number") from error
