"""A buffer of trained groups, of which a step trains some again beside its new ones.

The log-probs of a replayed group remain those of the weights that sampled it, so the importance
weights of `algorithm.correction` correct for its age. Draws depend on the step's seed alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from random import Random
from typing import Any

import torch

from ..batch import Batch, Metrics
from ..errors import UserError
from ..seeds import STEP_BYTES, seed_number
from ..staleness import replayed_groups
from ..types import Group, Task, Trajectory
from .collector import Collects

Log = Callable[[int, Sequence[Group], Batch, Metrics], None]
"""As `Controller.log`."""


@dataclass(frozen=True)
class Buffered:
    """A trained group.

    Attributes:
        group: the group.
        step: step that trained it as a new group.
    """

    group: Group
    step: int

    @cached_property
    def record(self) -> dict[str, Any]:
        """The group for a checkpoint, made once: several are saved with it."""
        return {
            "step": self.step,
            "task": self.group.task.id,
            "trajectories": [t.to_record() for t in self.group.trajectories],
            "greedy": self.group.greedy and self.group.greedy.to_record(),
        }


@dataclass
class ReplayBuffer:
    """Trained groups that may be trained again, oldest first.

    Attributes:
        share: share of a step's groups that are replayed.
        max_age: steps after its own in which a group may be trained again.
        gamma: a group of age a has the weight gamma^a in the draw.
        capacity: maximum number of groups. 0: no limit besides `max_age`.
        max_ratio: a group whose mean ratio is larger leaves.
        tasks: training tasks by id, to restore groups from a checkpoint.
    """

    share: float
    max_age: int
    gamma: float
    capacity: int
    max_ratio: float
    tasks: Mapping[str, Task]
    groups: list[Buffered] = field(default_factory=list)
    _steps: int = 0
    _drawn: list[Buffered] = field(default_factory=list)

    def draw(self, new: Sequence[Group], seed: int) -> list[Group]:
        """Groups to train beside the new ones of a step. No two groups of a step share a prompt.

        They are drawn without replacement, with weights gamma^age: the largest u^(1 / weight) of
        uniform u (Efraimidis and Spirakis, 2006).

        Args:
            new: groups of the step.
            seed: seed of the step.
        """
        random = Random(seed_number(f"{seed}/replay", STEP_BYTES))
        keys = [math.log(1 - random.random()) / self.gamma ** self._age(b) for b in self.groups]
        wanted = replayed_groups(self.share, len(new))
        taken, self._drawn = {group.task.prompt_key for group in new}, []
        for i in sorted(range(len(keys)), key=keys.__getitem__, reverse=True):
            prompt = self.groups[i].group.task.prompt_key
            if len(self._drawn) < wanted and prompt not in taken:
                taken.add(prompt)
                self._drawn.append(self.groups[i])
        return [b.group for b in self._drawn]

    def trained(self, groups: Sequence[Group], batch: Batch) -> dict[str, float]:
        """Take in the new groups of a step, and drop those that are too old or too far.

        Args:
            groups: groups of the step: the new ones, then those of `draw`.
            batch: batch of the step, with the trainer's log-probs from before the update.

        Returns:
            Metrics of the step.
        """
        ages = [self._age(b) for b in self._drawn]
        self._steps += 1
        new = [Buffered(group, self._steps) for group in groups[: len(groups) - len(ages)]]
        ratios = mean_ratios(batch, len(groups))
        far = [
            b for b, r in zip([*new, *self._drawn], ratios, strict=True) if not r <= self.max_ratio
        ]
        self._drawn = []
        left = [b for b in [*self.groups, *new] if not any(b is one for one in far)]
        left = [b for b in left if self._age(b) <= self.max_age]
        self.groups = left[-self.capacity :]  # all, with capacity 0
        return {
            "replay/frac": len(ages) / len(groups),
            "replay/ratio_dropped": float(len(far)),
            **({"replay/age_mean": sum(ages) / len(ages)} if ages else {}),
        }

    def before(self, log: Log) -> Log:
        """A log that calls `trained` first, so that a checkpoint of the step has its groups."""

        def logged(step: int, groups: Sequence[Group], batch: Batch, metrics: Metrics) -> None:
            metrics |= self.trained(groups, batch)
            log(step, groups, batch, metrics)

        return logged

    def _age(self, buffered: Buffered) -> int:
        """Age of a group in the next step."""
        return self._steps + 1 - buffered.step

    def state(self) -> dict[str, Any]:
        """The groups, and the number of steps."""
        return {"steps": self._steps, "groups": [b.record for b in self.groups]}

    def load(self, state: dict[str, Any]) -> None:
        """Restore the groups.

        Raises:
            UserError: if the task of one is no longer a training task.
        """
        groups = []
        for saved in state["groups"]:
            if saved["task"] not in self.tasks:
                raise UserError(
                    f"task '{saved['task']}' of the replay buffer is not among the training tasks:"
                    " the dataset has changed. Restore it ([data])"
                )
            trajectories = [Trajectory.from_record(t) for t in saved["trajectories"]]
            greedy = saved["greedy"] and Trajectory.from_record(saved["greedy"])
            group = Group(self.tasks[saved["task"]], trajectories, greedy)
            groups.append(Buffered(group, saved["step"]))
        self.groups, self._steps, self._drawn = groups, state["steps"], []


def mean_ratios(batch: Batch, count: int) -> list[float]:
    """Mean over the sampled tokens of exp(prox_logp - old_logp), for each of `count` groups."""
    if batch.prox_logp is None:
        raise ValueError("a replay buffer needs the trainer's log-probs: set a correction")
    ratios = (batch.prox_logp - batch.old_logp).exp().where(batch.mask, 0.0).double()
    sums = ratios.new_zeros(2, count)
    sums.index_add_(1, batch.group, torch.stack([ratios.sum(-1), batch.mask.sum(-1).double()]))
    total, tokens = sums.cpu()
    means: list[float] = (total / tokens.clamp(min=1)).tolist()
    return means


@dataclass
class ReplayingCollector:
    """A collector that adds replayed groups after the new ones.

    Attributes:
        inner: collects the new groups.
        buffer: gives the replayed ones.
    """

    inner: Collects
    buffer: ReplayBuffer

    def collect(
        self, tasks: Sequence[Task], seed: int, on_phase: Callable[[str], None]
    ) -> list[Group]:
        """As `Collects.collect`."""
        new = self.inner.collect(tasks, seed, on_phase)
        return [*new, *self.buffer.draw(new, seed)]

    def stats(self) -> dict[str, float]:
        """Metrics of the sampling of the new groups."""
        return self.inner.stats()
