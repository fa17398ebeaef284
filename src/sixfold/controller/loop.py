"""The training loop: seven steps, in this order.

    1 rollout      tasks        -> groups of K trajectories       (log-probs captured as sampled)
    2 environment  groups       -> groups with rewards            (each episode as it ends)
    3 reference    batch        -> batch with ref_logp            (may start before the batch)
    4 algorithm    batch        -> advantages and weights
    5 trainer      batch, loss  -> optimizer steps
    6 sync         version      -> new weights in the sampler
    7 log          metrics      -> disk, screen

Every role is a Protocol, so the controller also runs with six fakes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from ..algorithm.base import Algorithm
from ..batch import Batch, Metrics, collate
from ..reference.base import Reference
from ..sync.base import WeightSync
from ..trainer.base import TrainerRole
from ..types import Group, Task
from .collector import Collects


@dataclass
class Controller:
    """Runs the training loop on six roles.

    Attributes:
        collector: rollout and environment: samples and scores the groups of a step.
        reference: scores the batch before the algorithm (reference, critic, proximal forward pass).
        algorithm: computes advantages, weights and the loss.
        trainer: updates the policy.
        sync: passes new weights to the sampler.
        tasks: maps a step number to the tasks of the step.
        seed: maps a step number to its sampling seed.
        log: called with step number, groups, batch and metrics.
        on_phase: called with the name of each phase as it starts.
        device: device of the batches.
        steps_done: steps done so far.
    """

    collector: Collects
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
        """Run one step of the loop.

        Returns:
            The metrics of the step, with timings in seconds.
        """
        started, number = time.perf_counter(), self.steps_done + 1
        groups = self.collector.collect(self.tasks(number), self.seed(number), self.on_phase)
        self.reference.start(groups)
        with self._phase("batch"):
            batch = collate(groups).to(self.device)
        with self._phase("reference"):
            batch = self.reference.score(batch)
        with self._phase("algorithm"):
            batch = self.algorithm.prepare(batch)
        with self._phase("trainer"):
            trained = self.trainer.train_step(batch, self.algorithm.compute_loss)
        with self._phase("sync"):
            self.sync.sync(self.trainer.version)
        self.steps_done = number
        metrics: Metrics = {
            **self.collector.stats(),
            **trained,
            **self._seconds,
            "time/total_s": time.perf_counter() - started,
        }
        self.on_phase("log")
        self.log(number, groups, batch, metrics)
        return metrics

    def run(self, until: Callable[[int, Metrics], bool]) -> None:
        """Run steps until `until(step, metrics)` is True."""
        metrics = self.step()
        while not until(self.steps_done, metrics):
            metrics = self.step()

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        self.on_phase(name)
        started = time.perf_counter()
        yield
        self._seconds[f"time/{name}_s"] = time.perf_counter() - started
