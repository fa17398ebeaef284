"""Curriculum: the tasks that are drawn, decided again every few steps from the run's own rewards.

A task that is always solved, or never, gives no gradient, and which tasks these are changes with
the policy. Each task has a pass rate and is in one bucket:

- new: it has too few rewards to be judged, or it was held and is tested again. It is drawn.
- train: its pass rate lies between the two limits. It is drawn.
- easy: it is nearly always solved. It has left.
- hard: it is nearly never solved. It is held, and drawn again after `retest` steps.

If fewer tasks than a step needs are new or in training, held tasks and easy ones are drawn too:
those whose pass rate is nearest to 1/2, and of these the ones that were sampled longest ago.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..types import Group, Task
from .dead_letters import DeadLetters
from .mixture import least_tasks
from .stream import task_stream

NEW, TRAIN, EASY, HARD = BUCKETS = ("new", "train", "easy", "hard")
_KEPT_STEPS = 4
"""Steps whose tasks are kept: a run ahead asks for each task of a step on its own, and a step that
has begun keeps its tasks.
"""


@dataclass
class PassRate:
    """Decayed estimate of a task's pass rate.

    Attributes:
        solved: sum of the weights of solved samples.
        weight: sum of the weights of all samples with a known reward.
        step: step of the newest samples. They have the weight 1.
    """

    solved: float = 0.0
    weight: float = 0.0
    step: int = 0

    @property
    def rate(self) -> float:
        """Share of solved samples. 1/2 if there are none."""
        return self.solved / self.weight if self.weight else 0.5

    def add(self, solved: int, samples: int, step: int, half_life: float) -> None:
        """Count the samples of a step. Earlier ones, of an older policy, lose weight."""
        kept = 0.5 ** ((step - self.step) / half_life)
        self.solved = kept * self.solved + solved
        self.weight = kept * self.weight + samples
        self.step = step


@dataclass(frozen=True)
class Limits:
    """When a task changes its bucket.

    Attributes:
        every: steps between decisions.
        easy: pass rate from which a task is easy.
        hard: pass rate up to which a task is hard.
        retest: steps after its last sample at which a held task is drawn again. 0: never.
        half_life: steps in which the weight of a reward halves.
        samples: weight of a task's samples from which its pass rate counts.
    """

    every: int
    easy: float
    hard: float
    retest: int
    half_life: float
    samples: float

    def bucket(self, found: PassRate) -> str:
        """Bucket of a task that was drawn."""
        if found.weight < self.samples:
            return NEW
        if found.rate >= self.easy:
            return EASY
        return HARD if found.rate <= self.hard else TRAIN

    def is_due(self, waited: int) -> bool:
        """True if a held task is tested again after so many steps."""
        return 0 < self.retest <= waited


class Curriculum:
    """The tasks of each step, and the pass rate of every task.

    What is decided depends only on the groups that were observed. So all ranks decide the same, and
    a resumed run decides the same as an uninterrupted one.

    Args:
        tasks: all training tasks.
        per_step: prompts per step.
        seed: seed of the task orders.
        weights: source name to weight, as in `MixtureStream`.
        limits: when a task changes its bucket.
        profile: task id to (pass rate, samples) that were measured before the run.
        whole_steps: all prompts of a step come from one source.
        dead: prompts that were set aside. They are not drawn.

    Attributes:
        pool: tasks that are drawn. The list is changed in place.
        record: what the last step decided, for the run's history. None: it decided nothing.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        per_step: int,
        seed: int,
        weights: Mapping[str, float],
        limits: Limits,
        profile: Mapping[str, tuple[float, float]] | None = None,
        whole_steps: bool = False,
        dead: DeadLetters | None = None,
    ) -> None:
        self.pool = list(tasks)
        self.record: dict[str, Any] | None = None
        self._tasks, self._per_step, self._seed = tasks, per_step, seed
        self._weights, self._limits, self._whole_steps = weights, limits, whole_steps
        self._step = 0
        self._rates: dict[str, PassRate] = {}
        self._seen: dict[str, tuple[int, int]] = {}  # (solved, samples) since the last decision
        self._new: list[tuple[str, int, int]] = []  # of a step that has not ended
        self._buckets = dict.fromkeys((task.id for task in tasks), NEW)
        self._spared: set[str] = set()  # easy and hard tasks that are drawn nevertheless
        self._letters = dead or DeadLetters()
        self._dead: set[str] = set()  # when the pool was filled
        self._drawn: dict[int, list[Task]] = {}
        for name in self._buckets:
            if profile and name in profile:
                rate, samples = profile[name]
                self._rates[name] = PassRate(rate * samples, samples)
        if profile:
            self._decide()
        self._fill_pool()

    def __call__(self, step: int) -> list[Task]:
        """Tasks of a step, all different."""
        if step not in self._drawn:
            if len(self._letters.ids) > len(self._dead):
                self._fill_pool()
            if len(self._drawn) == _KEPT_STEPS:
                del self._drawn[min(self._drawn)]
            self._drawn[step] = self._stream(step)
        return self._drawn[step]

    def observe(self, groups: Sequence[Group]) -> None:
        """Take in scored groups of the current step. Failed checks do not count."""
        for group in groups:
            known = [
                t.reward.solved
                for t in group.trajectories
                if t.reward and t.reward.solved is not None
            ]
            if known:
                self._new.append((group.task.id, sum(known), len(known)))

    def observe_step(self, groups: Sequence[Group]) -> None:
        """Take in all groups of a step, and end it."""
        self.observe(groups)
        self.trained()

    def trained(self) -> None:
        """End the step, and decide again if it is time."""
        self._step += 1
        for name, solved, samples in self._new:
            rate = self._rates.setdefault(name, PassRate(step=self._step))
            rate.add(solved, samples, self._step, self._limits.half_life)
            before = self._seen.get(name, (0, 0))
            self._seen[name] = (before[0] + solved, before[1] + samples)
        self._new, self.record = [], None
        if self._step % self._limits.every == 0:
            moved, seen = self._decide(), self._seen
            self._seen = {}
            self._fill_pool()
            self.record = {
                "counts": self._counts,
                "spared": len(self._spared),
                "moved": moved,
                "seen": {task.id: seen[task.id] for task in self._tasks if task.id in seen},
            }

    def metrics(self) -> dict[str, float]:
        """Share of the tasks in each bucket, and how many are drawn."""
        total = len(self._tasks)
        shares = {f"data/{name}_frac": count / total for name, count in self._counts.items()}
        moved = len(self.record["moved"]) if self.record else 0
        pool = {"data/pool": float(len(self.pool)), "data/spared": float(len(self._spared))}
        return shares | pool | {"data/moved": float(moved)}

    def _decide(self) -> list[list[Any]]:
        """Put every task into its bucket. Returns [task, from, to, pass rate] for each move."""
        moved: list[list[Any]] = []
        for name, before in self._buckets.items():
            if (rate := self._rates.get(name)) is None:
                continue
            after = self._limits.bucket(rate) if self._is_drawn(name) else before
            if before == after == HARD and self._limits.is_due(self._step - rate.step):
                after = NEW
            if after != before:
                self._buckets[name] = after
                moved.append([name, before, after, rate.rate])
            if before == HARD and after == NEW:
                rate.solved = rate.weight = 0.0  # of a policy that is too old
        return moved

    def _is_drawn(self, name: str) -> bool:
        if name in self._dead:
            return False
        return self._buckets[name] in (NEW, TRAIN) or name in self._spared

    def _fill_pool(self) -> None:
        """Make the pool that of the buckets, with as many tasks of each source as a step needs."""
        self._spared, self._dead = set(), {*self._letters.ids}
        alive = [task for task in self._tasks if task.id not in self._dead]
        needed = least_tasks(alive, self._per_step, self._weights, self._whole_steps)
        for source, least in needed.items():
            own = [task.id for task in alive if not source or task.source == source]
            held = [name for name in own if not self._is_drawn(name)]
            missing = max(0, least - (len(own) - len(held)))
            self._spared |= set(sorted(held, key=self._distance)[:missing])
        self._update_pool()

    def _distance(self, name: str) -> tuple[float, int]:
        rate = self._rates[name]
        return abs(rate.rate - 0.5), rate.step

    def _update_pool(self) -> None:
        found = list(self._buckets.values())
        self._counts = {name: found.count(name) for name in BUCKETS}
        self.pool[:] = [task for task in self._tasks if self._is_drawn(task.id)]
        self._stream = task_stream(
            [*self.pool], self._per_step, self._seed, self._weights, self._whole_steps
        )

    def state(self) -> dict[str, Any]:
        """Everything that was observed until the last step, and the buckets."""
        return {
            "step": self._step,
            "rates": {name: [r.solved, r.weight, r.step] for name, r in self._rates.items()},
            "seen": {name: [*seen] for name, seen in self._seen.items()},
            "buckets": {n: bucket for n, bucket in self._buckets.items() if bucket != NEW},
            "spared": sorted(self._spared),
            "dead": sorted(self._dead),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned."""
        self._step, self._new = state["step"], []
        self._rates = {name: PassRate(*values) for name, values in state["rates"].items()}
        self._seen = {name: (solved, n) for name, (solved, n) in state["seen"].items()}
        self._buckets |= dict.fromkeys(self._buckets, NEW) | state["buckets"]
        self._spared, self._dead = set(state["spared"]), set(state["dead"])
        self._drawn.clear()
        self._update_pool()
