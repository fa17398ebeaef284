"""Definition of a solved completion, used by pre-flight, metrics and report.

A completion is solved if its score reaches full marks, `eval.solved_at`. Its score is one of:

- the value of one reward function, before its weight (`eval.metric = NAME`);
- the weighted sum that is trained on (`eval.metric = "reward"`). Full marks are then
  `eval.solved_at` times the sum of the positive weights of the rewards that apply.

The default is the verifier: a registered one if there is one, otherwise a user's reward; rewards
that verify nothing come last. Of several such rewards, the one with the largest weight decides. If
several share it, nobody can tell which one is the verifier, and the weighted sum decides. A TRL
function may say that it does not apply to a task; the next reward in that order then decides.
Rewards of steps alone, of process reward models, neither decide nor count in the sum; without any
other reward nothing says what is solved. Partial credit is not solved.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from ..errors import UserError, nearest
from .registry import REWARDS

REWARD = "reward"
"""Name of the metric that is the weighted sum of all rewards."""

TOLERANCE = 1e-6
"""Relative tolerance below full marks: a floating-point sum of 0.7, 0.2 and 0.1 is not exactly 1.
"""


@dataclass(frozen=True)
class SolvedRule:
    """Choice of the score of a completion, and the lowest score that counts as solved.

    Args:
        parts: names of the rewards that may decide, best first. Empty: the weighted sum decides.
        full: the score that counts as solved, if every reward applies.
        weights: positive weights by reward. Empty unless the sum decides.
        assumed: True if the sum decides because no reward stands out.
        decides: False if no reward can decide: no completion has a score.
    """

    parts: tuple[str, ...]
    full: float
    weights: Mapping[str, float] = field(default_factory=dict)
    assumed: bool = False
    decides: bool = True

    def score(self, value: float, parts: Mapping[str, float]) -> float | None:
        """Score of a checked completion. None if no deciding reward applies to it.

        Args:
            value: weighted sum of the rewards.
            parts: value of each reward by name, before its weight.
        """
        if not self.decides:
            return None
        if not self.parts:
            return value
        return parts.get(self.decider(parts))

    def decider(self, parts: Mapping[str, float]) -> str:
        """Name of the reward that decides. "" if the sum decides, or if no such reward applies."""
        return next((name for name in self.parts if name in parts), "")

    def solves(self, score: float, parts: Mapping[str, float]) -> bool:
        """True if `score` reaches full marks.

        Args:
            parts: value of each reward that applies. The others do not count in full marks.
        """
        applying = sum(weight for name, weight in self.weights.items() if name in parts)
        full = self.full * (applying / sum(self.weights.values()) if applying else 1.0)
        return score >= full - TOLERANCE * max(1.0, abs(full))

    def doubt(self, scores: Sequence[float]) -> str:
        """A warning line if full marks do not seem to be full marks, otherwise empty.

        Scores above them mean that partial credit counts as solved. If the sum decides only because
        no reward stands out, scores that all stay below them may mean that nothing can be solved.
        """
        most = max(scores, default=self.full)
        tolerance = TOLERANCE * max(1.0, abs(self.full))
        if most < self.full - tolerance and self.assumed:
            return (
                f"no completion counts as solved: several rewards have the same weight, so their"
                f" weighted sum decides, which reaches {most:g} of {self.full:g}. If one of them"
                f" tells what is right, name it in eval.metric ({', '.join(self.weights)}); if"
                f" {most:g} is full marks, set eval.solved_at"
            )
        if most <= self.full + tolerance:
            return ""
        return (
            f"scores reach {most:g}, but eval.solved_at counts them as solved from {self.full:g}."
            f" If {most:g} is full marks, set eval.solved_at"
        )

    @property
    def text(self) -> str:
        """The rule in words, e.g. `math >= 1`, or `0.5 * form + right >= 1.5`."""
        if not self.decides:
            return "unknown: the rewards are of steps alone"
        terms = [n if w == 1.0 else f"{w:g} * {n}" for n, w in self.weights.items()]
        score = self.parts[0] if self.parts else " + ".join(terms) if self.assumed else REWARD
        return f"{score} >= {self.full:g}"


def solved_rule(
    names: Sequence[str],
    weights: Sequence[float],
    metric: str = "",
    solved_at: float = 1.0,
    of_steps: Collection[str] = (),
) -> SolvedRule:
    """Rule for rewards with these names and weights.

    Args:
        names: one per reward, all different.
        weights: one per reward.
        metric: `eval.metric`.
        solved_at: `eval.solved_at`.
        of_steps: names of rewards that reward steps alone, whose own value is always 0.

    Raises:
        UserError: if `metric` names no reward, or one of steps.
    """
    positive = {
        name: weight
        for name, weight in zip(names, weights, strict=True)
        if weight > 0 and name not in of_steps
    }
    full = solved_at * (sum(positive.values()) or 1.0)
    if metric in of_steps:
        raise UserError(
            f"eval.metric = '{metric}' rewards steps, and does not tell what is solved. Name"
            " another reward, or remove it"
        )
    if names and not set(names) - set(of_steps):
        return SolvedRule((), full, decides=False)
    if metric == REWARD and metric not in names:
        return SolvedRule((), full, positive)
    if metric and metric not in names:
        hint = nearest(metric, [*names, REWARD])
        raise UserError(
            f"eval.metric = '{metric}' is not a reward of this run. Choose one of"
            f" {', '.join([*names, REWARD])}.{hint}"
        )

    def place(i: int) -> tuple[int, float, int]:
        verifies = REWARDS.row(names[i]).verifier if names[i] in REWARDS else None
        return {True: 0, None: 1, False: 2}[verifies], -weights[i], i

    order = sorted((i for i in range(len(names)) if names[i] not in of_steps), key=place)
    if not metric and len(order) > 1 and place(order[0])[:2] == place(order[1])[:2]:
        return SolvedRule((), full, positive, assumed=True)
    return SolvedRule((metric,) if metric else tuple(names[i] for i in order), solved_at)


def spec_name(spec: str) -> str:
    """Name that `load_reward` gives the reward of a spec, without loading it."""
    return spec if spec in REWARDS else spec.rpartition(":")[2]


def reward_labels(names: Sequence[str], specs: Sequence[str]) -> list[str]:
    """Distinct labels of rewards. Rewards with the same name get their spec, or a number.

    Args:
        specs: `environment.rewards`; empty strings for functions given from Python.
    """
    return [
        name if names.count(name) == 1 else specs[i] or f"{name} {i}"
        for i, name in enumerate(names)
    ]
