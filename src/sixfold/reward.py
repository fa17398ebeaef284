"""The reward of a trajectory, and the verdicts of checks. Import both from `types`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

Verdict = Literal[
    "passed",
    "wrong_answer",
    "compile_error",
    "runtime_error",
    "timeout",
    "out_of_memory",
    "output_limit",
    "protocol_error",
    "rejected",
    "infrastructure_error",
]
"""How the check of a completion ended.

- passed: the completion is right.
- wrong_answer: it was checked, and it is wrong.
- compile_error: its code does not compile or parse.
- runtime_error: its code failed.
- timeout: its answer took too long to run or to check.
- out_of_memory: it exceeded its memory limit.
- output_limit: it wrote too much.
- protocol_error: its code broke the protocol in which it returns values.
- rejected: it was not checked, because its form is not allowed or tries to deceive.
- infrastructure_error: the check itself failed. Nothing is known about the completion.
"""

NOT_APPLICABLE = "no reward function applies"
"""Error of a trajectory for which every reward returned None. No check failed."""

VERDICTS: tuple[Verdict, ...] = get_args(Verdict)


@dataclass(frozen=True)
class Reward:
    """Result of the environment for one trajectory.

    `score` and `solved` are None if the check failed, or if no reward that decides them applies.

    Attributes:
        value: scalar used for training. None if the checker failed; a failure is recorded and never
            becomes a zero. Rewards of turns and steps are added to it.
        parts: named components, such as correctness and format.
        error: one line that says how the checker failed.
        seconds: time that the checker took.
        steps: process rewards as (index, reward). The index in `tokens` is that of the last token
            of the step. They train in addition to `value`.
        score: evaluated value: `value` or one of the parts, as set by `eval.metric`.
        solved: True if the score reaches `eval.solved_at`.
        verdict: how the check ended. "infrastructure_error" if any check failed. Otherwise that of
            the reward that decides `solved`. If their sum decides: the first verdict that is not
            "passed". None if this reward gave a plain number.
        detail: one line that explains the verdict, or "".
        isolation: level of the sandbox that ran the check, or "" if none did.
        weights: weight of each part in `value`.
        decided_by: the part that is the score. "" if the score is `value`, or if there is none.
        latency: seconds that each reward took, by name.
        reruns: number of checks that ran again after a failure.
        cached: number of results that are those of earlier checks.
    """

    value: float | None
    parts: Mapping[str, float] = field(default_factory=dict)
    error: str | None = None
    seconds: float = 0.0
    steps: tuple[tuple[int, float], ...] = ()
    score: float | None = None
    solved: bool | None = None
    verdict: Verdict | None = None
    detail: str = ""
    isolation: str = ""
    weights: Mapping[str, float] = field(default_factory=dict)
    decided_by: str = ""
    latency: Mapping[str, float] = field(default_factory=dict)
    reruns: int = 0
    cached: int = 0

    @property
    def not_applicable(self) -> bool:
        """True if no check failed and every reward returned None."""
        return self.error == NOT_APPLICABLE

    @property
    def paid_for_form(self) -> bool | None:
        """True if the deciding part earns nothing and another part earns something.

        None if no single part decides, or if the check failed.
        """
        if self.value is None or self.score is None or not self.decided_by:
            return None
        others = [n for n in self.parts if n != self.decided_by]
        earned = any(self.weights.get(n, 1.0) * self.parts[n] > 0 for n in others)
        return earned and self.score <= 0

    @classmethod
    def failed(cls, error: str) -> Reward:
        """Reward of a trajectory that cannot be scored. It has no value.

        Args:
            error: one line that says why.
        """
        return cls(None, error=error, verdict="infrastructure_error")
