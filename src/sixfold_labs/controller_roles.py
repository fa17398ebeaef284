"""One step of the real controller on roles that give fixed samples. Imports torch."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence

from torch import full_like

from sixfold.algorithm.composed import Composed
from sixfold.algorithm.zoo import ZOO
from sixfold.batch import Batch, Loss, Metrics
from sixfold.controller.collector import Collector
from sixfold.controller.loop import Controller
from sixfold.environment.base import Scorer, Tally
from sixfold.event_loop import EventLoop
from sixfold.rollout.base import Choose
from sixfold.types import Group, Reward, Task, Trajectory

from .controller_record import ANSWER, OLD_LOGP, PROMPT, REF_LOGP, StepRecord, reward

TASK = Task("sum", PROMPT, ANSWER)


def tokens(text: str) -> list[int]:
    """One token per character."""
    return [ord(character) for character in text]


class FixedRollout:
    """Rollout that returns the same responses in every step."""

    version = 0

    def __init__(self, responses: Sequence[str]) -> None:
        self.samples = len(responses)
        self._responses = responses

    async def play(
        self,
        tasks: Sequence[Task],
        seed: int,
        scorer: Scorer | None = None,
        choose: Choose | None = None,
        on_sampled: Callable[[], None] = lambda: None,
    ) -> AsyncGenerator[Group, None]:
        """One group per task."""
        on_sampled()
        for task in tasks:
            group = Group(task, [self._trajectory(i, r) for i, r in enumerate(self._responses)])
            if scorer is not None:
                await scorer.finish(group)
            yield group

    def stats(self) -> dict[str, float]:
        return {}

    def _trajectory(self, sample: int, response: str) -> Trajectory:
        length = len(response)
        return Trajectory.one_turn(
            TASK.id,
            sample,
            tokens(PROMPT),
            tokens(response),
            [OLD_LOGP[sample] / length] * length,
            [0] * length,
            "stop",
            text=response,
        )


class LastInteger:
    """Environment and scorer that compare the last integer of a response with the answer."""

    def scorer(self, expected: int) -> LastInteger:
        return self

    async def add(self, task: Task, trajectory: Trajectory) -> None:
        trajectory.reward = Reward(reward(trajectory.text))

    async def finish(self, group: Group) -> None:
        for trajectory in group.trajectories:
            await self.add(group.task, trajectory)

    def fail(self, trajectory: Trajectory, line: str) -> None:
        trajectory.reward = Reward(None, error=line)

    def tally(self) -> Tally:
        return Tally()

    def count(self, others: Sequence[Tally]) -> None:
        pass

    def close(self) -> None:
        pass


class FixedReference:
    """Reference that gives every response the same log-prob."""

    def start(self, groups: Sequence[Group]) -> None:
        pass

    def score(self, batch: Batch) -> Batch:
        lengths = batch.mask.sum(-1, keepdim=True)
        return batch.with_(ref_logp=full_like(batch.old_logp, REF_LOGP) / lengths * batch.mask)


class CountingTrainer:
    """Trainer without a model. It computes the loss of the sampled log-probs."""

    version = 0

    def train_step(self, batch: Batch, loss: Loss) -> Metrics:
        self.version += 1
        return {"train/loss": float(loss(batch, batch.old_logp).loss)}


class NoSync:
    """Weight sync without weights."""

    def sync(self, version: int) -> None:
        pass


def controller_step(responses: tuple[str, ...]) -> StepRecord:
    """One step of the controller with GRPO of the library."""
    phases: list[str] = []
    batches: list[Batch] = []
    loop = EventLoop()

    def log(step: int, groups: Sequence[Group], batch: Batch, metrics: Metrics) -> None:
        batches.append(batch)

    try:
        Controller(
            collector=Collector(FixedRollout(responses), LastInteger(), loop),
            reference=FixedReference(),
            algorithm=Composed(ZOO["grpo"], horizon=max(map(len, responses))),
            trainer=CountingTrainer(),
            sync=NoSync(),
            tasks=lambda step: [TASK],
            seed=lambda step: step,
            log=log,
            on_phase=phases.append,
        ).step()
    finally:
        loop.close()
    (batch,) = batches
    assert batch.advantages is not None
    rows = [row[mask] for row, mask in zip(batch.advantages, batch.mask, strict=True)]
    return StepRecord(
        tuple(phases),
        batch.scores.tolist(),
        [float(row[0]) for row in rows],
        (batch.tokens.shape[0], batch.tokens.shape[1]),
    )
