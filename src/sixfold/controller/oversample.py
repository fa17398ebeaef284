"""Dynamic K: start more samples of a task than a step needs, keep the first K that ended and teach something, give up the rest.

The longest answer decides how long a rollout takes; here a group is whole as soon as K of its samples have ended and their rewards differ. What had
not ended is aborted and never reaches the loss. Short answers end first, so this favours them: a policy that thinks longer on what is hard pays for
it. Use it where the tail of lengths is noise.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..environment.base import EnvironmentRole
from ..rollout.base import StoppableRollout
from ..types import Group, Task, Trajectory
from .refill import mixed


class Oversample:
    """A rollout of K trajectories a task, scored, out of the more that `inner` starts. keep: K. Raises ValueError if inner
    starts no more than K, or for K = 1: one alone does not differ."""

    def __init__(self, inner: StoppableRollout, environment: EnvironmentRole, keep: int) -> None:
        if not 2 <= keep < inner.samples:
            raise ValueError(f"to keep {keep} samples of a task that differ takes keep >= 2 and more than that started; got {inner.samples}")
        self._inner = inner
        self._environment = environment
        self._keep = keep
        self._scored: dict[str, Group] = {}
        self._expected = 0

    def generate(self, tasks: Sequence[Task], seed: int) -> list[Group]:
        """K scored trajectories of each task, by sample index: mixed ones if the task gave any before all its samples had ended."""
        self._scored, self._expected = {}, len(tasks) * self._inner.samples
        return self._inner.generate_until(tasks, seed, self._enough)

    def stats(self) -> dict[str, float]:
        """The inner rollout's metrics; among them the share of the started samples that were kept."""
        return self._inner.stats()

    def _enough(self, task: Task, ended: Sequence[Trajectory]) -> list[Trajectory] | None:
        """Of what has ended so far, in the order in which it did: the K to keep, or None to wait for more."""
        if len(ended) < self._keep:
            return None
        self._scored[task.id] = Group(task, list(ended))
        # With all others, and of all that were started: a failed check among the first few is nothing to the error budget of the step.
        self._environment.score(list(self._scored.values()), expected=self._expected)
        kept = _first(self._keep, task, ended)
        if not mixed(Group(task, kept)) and len(ended) < self._inner.samples:
            return None
        return sorted(kept, key=lambda t: t.sample)


def _first(count: int, task: Task, ended: Sequence[Trajectory]) -> list[Trajectory]:
    """The first `count`; if those are alike, the first two of all that differ and the first of the others."""
    first = list(ended[:count])
    pairs = ([a, b] for i, b in enumerate(ended) for a in ended[:i])
    pair = None if mixed(Group(task, first)) else next((p for p in pairs if mixed(Group(task, p))), None)
    return first if pair is None else [*pair, *(t for t in ended if t is not pair[0] and t is not pair[1])][:count]
