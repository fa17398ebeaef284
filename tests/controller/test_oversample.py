"""Dynamic K: the first K that ended and differ are kept, the rest is given up at once and reaches
nobody.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TypeVar

import pytest
from tests.controller.scripted import ScriptedRollout, collect
from tests.rollouts import EngineRollout

from sixfold.checks.budget import RewardBudgetExceeded
from sixfold.checks.environment import Environment
from sixfold.controller.dynamic_sampling import Refill, mixed
from sixfold.controller.oversample import DynamicK
from sixfold.engine.engine import Engine
from sixfold.engine.sequence import Sequence as EngineSequence
from sixfold.model.causal_lm import CausalLM
from sixfold.model.loading import Policy
from sixfold.renderer.renderer import Renderer
from sixfold.rollout.driver import Driver
from sixfold.rollout.engine_generator import EngineGenerator
from sixfold.rollout.engine_job import Job
from sixfold.rollout.engine_thread import EngineThread
from sixfold.rollout.player import Limits, Player
from sixfold.types import Group, SamplingParams, Task, Trajectory


class Ending(ScriptedRollout):
    """Samples of every task end in a given order, one at a time, task by task; each answers with
    its reward ("?" makes the check fail).
    """

    def __init__(self, order: Sequence[int], answers: dict[str, str]) -> None:
        super().__init__()
        self.samples = len(order)
        self.order, self.answers = order, answers

    def episodes(self, task: Task, seed: int) -> list[Trajectory]:
        answer = self.answers[task.id]
        return [
            Trajectory.one_turn(task.id, k, [1], [2], [-1.0], [0], "stop", text=answer[k])
            for k in self.order
        ]

    def stats(self) -> dict[str, float]:
        return {"rollout/kept_frac": 0.5}


def reward(completion: str, task: Task) -> float:
    return float(completion)


def kept(
    order: Sequence[int], answers: str, keep: int, error_budget: float = 1.0
) -> tuple[list[int], int]:
    """Sample indices of one group, and how many samples it took."""
    inner = Ending(order, {"t": answers})
    with Environment([reward], error_budget=error_budget) as environment:
        choose = DynamicK(keep, inner.samples)
        ((group,), _) = collect(inner, environment, [Task("t", "")], choose=choose)
    assert all(t.reward is not None for t in group.trajectories)
    return [t.sample for t in group.trajectories], len(inner.ended)


@pytest.mark.parametrize(
    ("order", "answers", "keep", "expected", "asked"),
    [
        ([3, 1, 0, 2], "0100", 2, [1, 3], 2),  # the first two differ: the others are not waited for
        (
            [3, 2, 0, 1],
            "0100",
            2,
            [1, 3],
            4,
        ),  # alike until the last: it takes the place of the second
        ([0, 1, 2, 3, 4, 5], "111010", 3, [0, 1, 3], 4),
        ([0, 1, 2, 3], "1111", 2, [0, 1], 4),  # nothing to learn in any of them: the first two
        (
            [0, 1, 2, 3],
            "?110",
            2,
            [1, 3],
            4,
        ),  # a failed check is no reward: it makes no group mixed
        ([0, 1, 2, 3, 4], "?1100", 3, [0, 1, 3], 4),
        ([0, 1, 2, 3], "??11", 2, [2, 3], 4),  # so a prompt with rewards does not count as failed
    ],
)
def test_first_k_samples_with_unequal_rewards_are_kept(
    order: list[int], answers: str, keep: int, expected: list[int], asked: int
) -> None:
    assert kept(order, answers, keep) == (expected, asked)


def test_a_failed_check_among_the_first_is_measured_against_all_that_were_started() -> None:
    assert kept([0, 1, 2, 3, 4, 5, 6, 7, 8, 9], "?1" + "0" * 8, 2, error_budget=0.1) == ([1, 2], 3)
    with pytest.raises(RewardBudgetExceeded, match="2 of 10 reward checks failed"):
        kept([0, 1, 2, 3, 4, 5, 6, 7, 8, 9], "??" + "0" * 8, 2, error_budget=0.1)


@pytest.mark.parametrize("keep", [0, 1, 4, 5])
def test_dynamic_k_refuses_one_sample_or_all_samples(keep: int) -> None:
    with pytest.raises(ValueError, match="must be at least 2"):
        DynamicK(keep, 4)


class HeldEngine(Engine):
    """Waits before one of its steps until a choice has been aborted: without that, a quick engine
    would be done before the first check has its answer.
    """

    before, steps, event = 0, 0, threading.Event()

    def step(self) -> list[EngineSequence]:
        if self.steps == self.before:
            self.event.wait(60)
        self.steps += 1
        return super().step()


class AbortingThread(EngineThread):
    """Sets an event when it is told to abort."""

    def __init__(self, engine: Engine, renderer: Renderer) -> None:
        super().__init__(engine, renderer)
        self.event = threading.Event()

    def abort(self, job: Job, choice: int | None = None) -> Future[None]:
        done = super().abort(job, choice)
        self.event.set()
        return done


def steps_until(choose: DynamicK, group: Group) -> int:
    """Engine steps after which a scored group of equally old samples can be chosen from."""
    ended = sorted(group.trajectories, key=lambda t: (t.sampled_length, t.sample))
    counts = range(choose.keep, len(ended) + 1)
    return next(ended[n - 1].sampled_length for n in counts if choose(group.task, ended[:n]))


E = TypeVar("E", bound=Engine)


def test_discarded_samples_free_their_blocks_and_are_counted(policy: Policy) -> None:
    """The kept trajectories are those of a run without aborts, token for token; the others are in
    no group; the counters add up.
    """

    def long(completion: str, task: Task) -> float:
        return float(len(completion) % 2)

    tasks = [Task(f"t{i}", f"{i}+{i}=") for i in range(5)]
    params = SamplingParams(max_tokens=24, stop_token_ids=tuple(range(8, 14)))

    def engine(kind: type[E]) -> E:
        return kind(CausalLM(policy.model), kv_tokens=4096, max_running=40)

    renderer, choose = Renderer(policy.tokenizer), DynamicK(3, 8)
    everything = EngineRollout(engine(Engine), renderer, params, samples=8)
    held = engine(HeldEngine)
    thread = AbortingThread(held, renderer.copy())
    inner = Driver(
        Player(EngineGenerator(held, renderer, thread=thread), renderer, Limits(tokens=1 << 20)),
        params,
        8,
    )
    with Environment([long]) as environment:
        whole, whole_stats = collect(everything.driver(), environment, tasks, 4)
        held.before, held.event = min(steps_until(choose, group) for group in whole), thread.event
        groups, stats = collect(inner, environment, tasks, 4, choose=choose)
    assert thread.close(60)
    assert any(mixed(g) for g in groups)
    for group, full in zip(groups, whole, strict=True):
        assert len(group.trajectories) == 3
        for t in group.trajectories:
            twin = full.trajectories[t.sample]
            assert (t.tokens, t.logp, t.finish_reason) == (
                twin.tokens,
                twin.logp,
                twin.finish_reason,
            )
            assert t.finish_reason != "aborted"
    counted = held.stats
    assert counted.aborted > 0 and counted.decoded_tokens < everything.engine.stats.decoded_tokens
    assert stats["rollout/tokens"] == counted.decoded_tokens
    in_groups = sum(t.sampled_length for g in groups for t in g.trajectories)
    assert stats["rollout/dropped_tokens"] == counted.decoded_tokens - in_groups > 0
    assert stats["rollout/kept_frac"] == pytest.approx(
        15 / 40
    )  # all 40 fit into one batch, so all were begun
    assert whole_stats["rollout/kept_frac"] == 1 and whole_stats["rollout/dropped_tokens"] == 0
    assert held.scheduler.blocks.used == 0 and not held.busy


@pytest.mark.parametrize("slots", [40, 7, 1])
def test_the_choice_does_not_depend_on_slots_or_on_the_time_of_checks(
    policy: Policy, slots: int
) -> None:
    """The choice is that of all samples sorted by length, whatever ends first."""
    delays = random.Random(slots)

    async def parity(completion: str, task: Task) -> float:
        await asyncio.sleep(delays.choice((0, 0.005)))
        return float(len(completion) % 2)

    tasks = [Task(f"t{i}", f"{i}+{i}=") for i in range(5)]
    params = SamplingParams(max_tokens=24, stop_token_ids=tuple(range(8, 14)))

    def rollout(running: int) -> EngineRollout:
        engine = Engine(CausalLM(policy.model), kv_tokens=4096, max_running=running)
        return EngineRollout(engine, Renderer(policy.tokenizer), params, samples=8)

    inner, choose = rollout(slots), DynamicK(3, 8)
    with Environment([parity]) as environment:
        groups, _ = collect(inner.driver(), environment, tasks, 4, choose=choose)
        whole = rollout(40).generate(tasks, seed=4)
        environment.score(whole)
    for group, full in zip(groups, whole, strict=True):
        ordered = sorted(full.trajectories, key=lambda t: (t.sampled_length, t.sample))
        prefixes = (ordered[:count] for count in range(3, 9))
        expected = next(kept for p in prefixes if (kept := choose(group.task, p)) is not None)
        assert [t.sample for t in group.trajectories] == [t.sample for t in expected]
    assert not inner.engine.busy and inner.engine.scheduler.blocks.used == 0


def test_under_dynamic_sampling_the_kept_share_is_of_all_rounds() -> None:
    """Two of four kept by the inner rollout, and one group of three replaced: 4 tasks' worth begun
    for 3 slots.
    """
    answers = {"a": "0101", "b": "1111", "c": "0011", "d": "0110"}
    tasks = [Task(name, "") for name in "abcd"]
    with Environment([reward]) as environment:
        inner = Ending([0, 1, 2, 3], answers)
        policies = {"choose": DynamicK(2, 4), "refill": Refill(tasks, max_rounds=2)}
        groups, stats = collect(inner, environment, tasks[:3], **policies)
    assert [g.task.id for g in groups] == ["a", "d", "c"]
    assert stats["rollout/kept_frac"] == pytest.approx(6 / 16)
