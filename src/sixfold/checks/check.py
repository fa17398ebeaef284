"""One call of one reward, and its outcome."""

from __future__ import annotations

from typing import Literal, NamedTuple

from ..environment.callables import Form
from ..environment.grade import Grade
from ..environment.group_form import OtherRewards
from ..environment.rewards import RewardFunction
from ..environment.sampled import Sampled
from ..types import Task


class Check(NamedTuple):
    """One call of one reward.

    Attributes:
        completions: a single text, or all completions of a group for a TRL function.
        sampled: values that the function may ask for by parameter name.
        others: results of the other rewards, for each completion of a group.
    """

    reward: int
    task: Task
    completions: list[str]
    sampled: Sampled
    others: tuple[OtherRewards, ...] = ()


class RewardInfo(NamedTuple):
    """Description of a reward that is loaded, in this process or another one.

    Attributes:
        form: how it is called, see `callables.Form`.
        runs_async: True for an async function.
        version: version of a reward whose outcomes may be reused (`versions`). "" for others.
    """

    name: str
    form: Form
    runs_async: bool
    version: str = ""

    @classmethod
    def of(cls, function: RewardFunction) -> RewardInfo:
        return cls(function.name, function.form, function.runs_async, function.version)


Cause = Literal["", "raised", "timeout", "died"]
"""Why a check failed: the reward raised or returned no reward, it took too long, or its process
ended. "" if the check did not fail.
"""


class Outcome(NamedTuple):
    """Result of a check.

    Attributes:
        values: one number or grade per completion. None: the reward does not apply. Empty if the
            check failed.
        error: error on one line, or None.
        cause: why the check failed.
        cached: whether the outcome is that of an earlier check.
    """

    values: list[float | Grade | None]
    error: str | None
    seconds: float
    cause: Cause = ""
    cached: bool = False

    @property
    def may_succeed_again(self) -> bool:
        """True if the check or one of its grades failed, and another run may help."""
        return self.cause in ("raised", "died") or any(map(_failed, self.values))

    def completed_by(self, first: Outcome) -> Outcome:
        """This outcome, of a second run, completed with the values of the first run.

        Values of the first run are kept. So only completions whose check failed get a new value.
        """
        if not first.values:
            return self._replace(seconds=first.seconds + self.seconds)
        if not self.values:
            return first._replace(seconds=first.seconds + self.seconds)
        pairs = zip(first.values, self.values, strict=True)
        values = [new if _failed(old) else old for old, new in pairs]
        return Outcome(values, None, first.seconds + self.seconds)

    def to_record(self) -> dict[str, object]:
        """JSON form. `process` reads it."""
        values = [v.to_record() if isinstance(v, Grade) else v for v in self.values]
        return {**self._asdict(), "values": values}


def _failed(value: float | Grade | None) -> bool:
    return isinstance(value, Grade) and value.failed
