"""The controller with six fakes: who is called, in which order, with what; and that it does nothing
else.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path

import pytest
from tests.controller.scripted import LOOP

import sixfold.controller.loop as loop_module
from sixfold.batch import Batch, Loss, LossOutput, Metrics
from sixfold.controller.collector import Collector
from sixfold.controller.loop import Controller
from sixfold.environment.base import Scorer
from sixfold.rollout.base import Choose
from sixfold.types import Group, Reward, Task, Trajectory

SOURCE = Path(loop_module.__file__).read_text()


class Fakes:
    """All six roles, the tasks and the log in one: each call is written down and hands on something
    the next can be checked for.
    """

    samples = 2

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.version = 0
        self.needs_reference = True
        self.logged: list[tuple[int, list[str], Batch, Metrics]] = []

    def tasks(self, step: int) -> list[Task]:
        self.calls.append(f"tasks {step}")
        return [Task(f"step {step}", "?")]

    def seed(self, step: int) -> int:
        return 100 + step

    async def play(
        self,
        tasks: Sequence[Task],
        seed: int,
        scorer: Scorer | None = None,
        choose: Choose | None = None,
        on_sampled: Callable[[], None] = lambda: None,
    ) -> AsyncGenerator[Group, None]:
        assert scorer is not None
        self.calls.append(f"play {tasks[0].id} {seed}")
        made = [
            Trajectory.one_turn(t.id, k, [1], [2 + k], [-1.0], [self.version], "stop")
            for t in tasks
            for k in (0, 1)
        ]
        group = Group(tasks[0], made)
        for trajectory in made:
            await scorer.add(tasks[0], trajectory)
        on_sampled()
        await scorer.finish(group)
        yield group

    def stats(self) -> dict[str, float]:
        return {"rollout/tokens": 2.0}

    def scorer(self, expected: int) -> Fakes:
        self.calls.append(f"scorer {expected}")
        return self

    async def add(self, task: Task, trajectory: Trajectory) -> None:
        self.calls.append(f"check {trajectory.sample}")

    async def finish(self, group: Group) -> None:
        self.calls.append("finish")
        for t in group.trajectories:
            t.reward = Reward(float(t.sample))

    def start(self, groups: Sequence[Group]) -> None:
        self.calls.append("start")
        assert all(t.reward is not None for g in groups for t in g.trajectories)

    def score(self, batch: Batch) -> Batch:
        self.calls.append("reference")
        assert batch.scores.tolist() == [0.0, 1.0] and batch.ref_logp is None
        return batch.with_(ref_logp=batch.old_logp + 1)

    def prepare(self, batch: Batch) -> Batch:
        self.calls.append("advantages")
        assert batch.ref_logp is not None and batch.weights is None
        return batch.with_(advantages=batch.old_logp, weights=batch.mask.float())

    def compute_loss(self, batch: Batch, logp: object) -> LossOutput:
        raise AssertionError("the controller calls no loss; the trainer does")

    def train_step(self, batch: Batch, loss: Loss) -> Metrics:
        self.calls.append("train")
        assert batch.weights is not None and loss == self.compute_loss
        self.version += 1
        return {"train/loss": 0.5}

    def sync(self, version: int) -> None:
        self.calls.append(f"sync {version}")

    def log(self, step: int, groups: Sequence[Group], batch: Batch, metrics: Metrics) -> None:
        self.calls.append(f"log {step}")
        self.logged.append((step, [g.task.id for g in groups], batch, metrics))

    def on_phase(self, phase: str) -> None:
        self.calls.append(f"({phase})")

    def controller(self, **changes: object) -> Controller:
        parts = dict(
            collector=Collector(self, self, LOOP),  # type: ignore[arg-type]
            reference=self,
            algorithm=self,
            trainer=self,
            sync=self,
            tasks=self.tasks,
            seed=self.seed,
            log=self.log,
        )
        return Controller(**{**parts, **changes})  # type: ignore[arg-type]


def test_the_seven_steps_in_order() -> None:
    fakes = Fakes()
    fakes.controller().step()
    steps = [
        "tasks 1",
        "scorer 2",
        "play step 1 101",
        "check 0",
        "check 1",
        "finish",
        "start",
        "reference",
        "advantages",
        "train",
        "sync 1",
        "log 1",
    ]
    assert fakes.calls == steps


def test_each_phase_is_announced_before_it_begins() -> None:
    fakes = Fakes()
    fakes.controller(on_phase=fakes.on_phase).step()
    assert fakes.calls == [
        "tasks 1", "scorer 2", "(rollout)", "play step 1 101", "check 0", "check 1",
        "(environment)", "finish", "start", "(batch)", "(reference)", "reference",
        "(algorithm)", "advantages", "(trainer)", "train", "(sync)", "sync 1", "(log)", "log 1",
    ]  # fmt: skip


def test_metrics_of_rollout_trainer_and_clock_flow_into_the_log() -> None:
    fakes = Fakes()
    metrics = fakes.controller().step()
    step, tasks, batch, logged = fakes.logged[0]
    assert (step, tasks) == (1, ["step 1"]) and logged == metrics
    assert (
        batch.weights is not None and batch.ref_logp is not None
    )  # the batch as the trainer had it
    assert metrics["rollout/tokens"] == 2.0 and metrics["train/loss"] == 0.5
    phases = [
        f"time/{name}_s"
        for name in ("rollout", "environment", "batch", "reference", "algorithm", "trainer", "sync")
    ]
    assert set(metrics) == {"rollout/tokens", "train/loss", "time/total_s", *phases}
    times = [metrics[name] for name in phases]
    assert all(t >= 0 for t in times) and sum(times) <= metrics["time/total_s"] < 5  # type: ignore[operator,arg-type]


def test_timings_tell_which_role_was_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(loop_module.time, "perf_counter", lambda: clock[0])

    class Slow(Fakes):
        def train_step(self, batch: Batch, loss: Loss) -> Metrics:
            clock[0] += 7.0
            return super().train_step(batch, loss)

        def sync(self, version: int) -> None:
            clock[0] += 2.0

    metrics = Slow().controller().step()
    assert (
        metrics["time/trainer_s"],
        metrics["time/sync_s"],
        metrics["time/rollout_s"],
        metrics["time/total_s"],
    ) == (7.0, 2.0, 0.0, 9.0)


def test_steps_go_on_from_those_done_before() -> None:
    fakes = Fakes()
    controller = fakes.controller(steps_done=41)
    controller.step()
    assert controller.steps_done == 42
    assert fakes.calls[0] == "tasks 42" and fakes.calls[-1] == "log 42"


def test_run_stops_where_it_is_told_to() -> None:
    fakes = Fakes()
    asked: list[tuple[int, Metrics]] = []

    def until(step: int, metrics: Metrics) -> bool:
        asked.append((step, metrics))
        return step == 3

    controller = fakes.controller()
    controller.run(until)
    assert [step for step, _ in asked] == [1, 2, 3] and controller.steps_done == 3
    assert [call for call in fakes.calls if call.startswith("sync")] == [
        "sync 1",
        "sync 2",
        "sync 3",
    ]
    assert asked[-1][1] is fakes.logged[-1][3]


@pytest.mark.parametrize("role", ["play", "train_step", "sync", "log"])
def test_error_in_a_role_ends_the_run_unchanged(role: str) -> None:
    class Broken(Exception):
        pass

    def fail(*args: object) -> None:
        raise Broken(role)

    fakes = Fakes()
    setattr(fakes, role, fail)
    controller = fakes.controller()
    with pytest.raises(Broken):
        controller.run(lambda step, metrics: False)
    assert controller.steps_done == (
        1 if role == "log" else 0
    )  # only a step that reached the sampler counts


def test_the_loop_is_short() -> None:
    assert len(SOURCE.splitlines()) <= 120


def test_the_loop_holds_only_verbs() -> None:
    """Code, not comments: no parameter, gradient, logit or reward is named, and nothing is computed
    from a tensor.
    """
    names = {
        token.string
        for token in tokenize.generate_tokens(io.StringIO(SOURCE).readline)
        if token.type == tokenize.NAME
    }
    forbidden = [
        "backward",
        "parameters",
        "logits",
        "reward",
        "rewards",
        "scores",
        "logp",
        "grad",
        "optimizer",
        "state_dict",
        "torch",
        "model",
    ]
    assert names.isdisjoint(forbidden)
    tree = ast.parse(SOURCE)
    arithmetic = {
        ast.unparse(n)
        for n in ast.walk(tree)
        if isinstance(n, ast.BinOp) and not isinstance(n.op, ast.BitOr)
    }
    assert arithmetic == {"self.steps_done + 1", "time.perf_counter() - started"}
    imported = {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.level}
    assert imported == {
        "algorithm.base",
        "batch",
        "collector",
        "reference.base",
        "sync.base",
        "trainer.base",
        "types",
    }
