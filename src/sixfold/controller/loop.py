"""The loop: seven steps, in this order, and nothing else.

    1 rollout      tasks        -> groups of K trajectories       (log-probs captured as sampled)
    2 environment  groups       -> groups with rewards
    3 reference    batch        -> batch with ref_logp            (may begin while 2 is at work)
    4 algorithm    batch        -> advantages and weights
    5 trainer      batch, loss  -> one optimizer step
    6 sync         version      -> fresh weights in the sampler
    7 log          metrics      -> disk, screen

Every role is a Protocol; the controller is built with them and runs as well with six fakes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from ..algorithm.base import Algorithm
from ..batch import Batch, Metrics, collate
from ..environment.base import EnvironmentRole
from ..reference.base import Reference
from ..rollout.base import Rollout
from ..sync.base import WeightSync
from ..trainer.base import TrainerRole
from ..types import Group, Task


@dataclass
class Controller:
    """The six roles, wired. tasks: the tasks of a step. seed: of a step's sampling. log: takes what a step made. device: where batches live."""

    rollout: Rollout
    environment: EnvironmentRole
    reference: Reference
    algorithm: Algorithm
    trainer: TrainerRole
    sync: WeightSync
    tasks: Callable[[int], Sequence[Task]]
    seed: Callable[[int], int]
    log: Callable[[int, Sequence[Group], Batch, Metrics], None]
    on_phase: Callable[[str], None] = lambda phase: None
    device: str = "cpu"
    steps_done: int = 0
    _seconds: Metrics = field(default_factory=dict)

    def step(self) -> Metrics:
        """One step of the loop; gives its metrics, timings included."""
        started, number = time.perf_counter(), self.steps_done + 1
        with self._phase("rollout"):
            groups = self.rollout.generate(self.tasks(number), self.seed(number))
        self.reference.start(groups)
        with self._phase("environment"):
            self.environment.score(groups)
        with self._phase("batch"):
            batch = collate(groups).to(self.device)
        with self._phase("reference"):
            batch = self.reference.score(batch)
        with self._phase("algorithm"):
            batch = self.algorithm.compute_advantages(batch)
        with self._phase("trainer"):
            trained = self.trainer.train_step(batch, self.algorithm.compute_loss)
        with self._phase("sync"):
            self.sync.sync(self.trainer.version)
        self.steps_done = number
        metrics: Metrics = {**self.rollout.stats(), **trained, **self._seconds, "time/total_s": time.perf_counter() - started}
        self.on_phase("log")
        self.log(number, groups, batch, metrics)
        return metrics

    def run(self, until: Callable[[int, Metrics], bool]) -> None:
        """Step until `until(step, metrics)` says so."""
        metrics = self.step()
        while not until(self.steps_done, metrics):
            metrics = self.step()

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        self.on_phase(name)
        started = time.perf_counter()
        yield
        self._seconds[f"time/{name}_s"] = time.perf_counter() - started
