"""Several ranks sample ahead, each its share: whatever finishes when, all train the same groups."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from sixfold.controller.asynchronous import AsyncCollector, Observe
from sixfold.controller.curriculum import Curriculum, Limits
from sixfold.controller.dead_letters import DeadLetters
from sixfold.controller.ledger import Ledger
from sixfold.controller.schedule import ReplayLedger, ScheduledGroup, ScheduleEnds, read_schedule
from sixfold.errors import UserError
from sixfold.event_loop import BackgroundLoop
from sixfold.ranks import Ranks
from sixfold.reward import Reward
from sixfold.run.shared_groups import RankLedgers, SharedCollector, share_of
from sixfold.staleness import largest_age, window_groups
from sixfold.types import Group, Task
from tests.made_trajectories import from_mask
from tests.thread_ranks import on_threads

PER_STEP, STEPS, SIZE, STALENESS = 5, 12, 3, 2
OWN = [2, 2, 1]
"""Groups of each rank in a step."""
WINDOWS = [window_groups(own, STALENESS, 1.0) for own in OWN]


class Drawn:
    """A rollout whose groups end in an order drawn at random."""

    samples = 1

    def __init__(
        self, rng: random.Random, failing: str, rewards: Callable[[str], Sequence[float | None]]
    ) -> None:
        self._rng = rng
        self._failing = failing
        self._rewards = rewards

    async def play(self, tasks: Sequence[Task], *given: Any) -> AsyncGenerator[Group, None]:
        (task,) = tasks
        for _ in range(self._rng.randrange(40)):
            await asyncio.sleep(0)
        if task.id == self._failing:
            raise ValueError("no episode")
        yield Group(
            task,
            [
                from_mask(
                    task.id, k, [1, 2], 1, [False, True], reward=Reward(value, solved=value == 1)
                )
                for k, value in enumerate(self._rewards(task.id))
            ],
        )


class Scorers:
    """An environment that scores nothing."""

    def scorer(self, expected: int) -> None: ...


def tasks_of(step: int) -> list[Task]:
    return [Task(f"{(step - 1) * PER_STEP + i}", "") for i in range(PER_STEP)]


def ledgers(rank: int, staleness: int = STALENESS) -> RankLedgers:
    windows = WINDOWS if staleness else OWN
    made = [Ledger(own, staleness, w, STEPS) for own, w in zip(OWN, windows, strict=True)]
    return RankLedgers(made, rank)


MEASURED = {"rollout/tokens": 1.0, "rollout/tok_s": 2.0, "rollout/kept_frac": 1.0}


def collector(
    ranks: Ranks,
    own: RankLedgers,
    loop: Any,
    failing: str = "",
    rewards: Callable[[str], Sequence[float | None]] = lambda name: [0.0, 1.0],
    dead: DeadLetters | None = None,
    stream: Callable[[int], list[Task]] = tasks_of,
    observe: Observe = lambda groups: None,
    draw: int = 0,
    **more: Any,
) -> SharedCollector:
    environment: Any = Scorers()
    drawn: Any = Drawn(random.Random(ranks.rank + draw), failing, rewards)
    dead = dead or DeadLetters()
    inner = AsyncCollector(
        rollout=drawn,
        environment=environment,
        loop=loop,
        ledger=own.own,
        tasks=lambda step: stream(step)[ranks.rank :: ranks.size],
        seed=lambda step: step,
        measure=lambda groups: dict(MEASURED),
        dead=dead,
        **more,
    )
    every = {task.id: task for step in range(1, STEPS + 99) for task in tasks_of(step)}
    return SharedCollector(inner, own, every, ranks, dead, observe)


Steps = list[list[tuple[ScheduledGroup, str]]]


def test_all_ranks_train_every_group_once_and_none_too_old() -> None:
    """R-190. The state of every rank resumes all of them."""

    def work(ranks: Ranks) -> tuple[Steps, dict[str, Any], dict[str, float]]:
        own, found, loop = ledgers(ranks.rank), Steps(), BackgroundLoop()
        try:
            made = collector(ranks, own, loop)
            for step in range(1, STEPS + 1):
                if step == 6:  # a resume
                    state = own.state()
                    made.stop()
                    own = ledgers(ranks.rank)
                    own.load(state)
                    made = collector(ranks, own, loop)
                groups = made.collect(tasks_of(step), step, lambda phase: None)
                found.append([(s, g.task.id) for s, g in zip(made.scheduled, groups, strict=True)])
                made.trained()
            return found, own.state(), made.stats()
        finally:
            loop.close()

    (found, state, stats), *others = on_threads(SIZE, work)
    for other, its_state, its_stats in others:
        assert other == found and its_state == state
        assert its_stats["async/age_max"] == stats["async/age_max"]
    trained = [one.number for step in found for one, _ in step]
    assert sorted(trained) == list(range(PER_STEP * STEPS)) and trained != sorted(trained)
    bounds = [largest_age(own, STALENESS, w) for own, w in zip(OWN, WINDOWS, strict=True)]
    for ended, step in enumerate(found):
        assert [one.number % PER_STEP % SIZE for one, _ in step].count(0) == OWN[0]
        for one, task in step:
            assert task == str(one.number)
            assert 0 <= ended - one.begun <= bounds[one.number % PER_STEP % SIZE]
    assert stats["rollout/tokens"] == 3.0 and stats["async/running"] == 0.0


def test_ranks_train_the_groups_of_a_schedule_again(tmp_path: Path) -> None:
    """Whatever finishes when. Only as many ranks as the run had can."""
    file = tmp_path / "schedule.jsonl"

    def work(ranks: Ranks, replays: bool) -> Steps:
        own, found, loop = ledgers(ranks.rank), Steps(), BackgroundLoop()
        if replays:
            schedule = read_schedule(file, SIZE)
            shares = [share_of(schedule, rank, SIZE, PER_STEP) for rank in range(SIZE)]
            made = [ReplayLedger(share, n) for share, n in zip(shares, OWN, strict=True)]
            own = RankLedgers(made, ranks.rank)
        try:
            it = collector(ranks, own, loop, draw=10 * replays)
            for step in range(1, STEPS + 1):
                groups = it.collect(tasks_of(step), step, lambda phase: None)
                found.append([(s, g.task.id) for s, g in zip(it.scheduled, groups, strict=True)])
                it.trained()
            if replays:
                with pytest.raises(ScheduleEnds, match=f"after step {STEPS}"):
                    it.collect(tasks_of(STEPS + 1), STEPS + 1, lambda phase: None)
            return found
        finally:
            loop.close()

    recorded, *_ = on_threads(SIZE, partial(work, replays=False))
    lines = [
        {"step": step, "ranks": SIZE, "groups": [one.to_record() for one, _ in groups]}
        for step, groups in enumerate(recorded, 1)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert on_threads(SIZE, partial(work, replays=True)) == [recorded] * SIZE
    with pytest.raises(UserError, match=r"were 3, .*--nproc-per-node 3 -m sixfold train"):
        read_schedule(file, 1)
    del lines[0]["ranks"]
    file.write_text(json.dumps(lines[0]) + "\n")
    with pytest.raises(UserError, match=r"were 1, .*without torchrun"):
        read_schedule(file, SIZE)


def test_a_failure_on_one_rank_is_raised_on_all() -> None:
    def work(ranks: Ranks) -> None:
        loop = BackgroundLoop()
        try:
            made = collector(ranks, ledgers(ranks.rank), loop, failing="1")
            for step in range(1, 5):
                made.collect(tasks_of(step), step, lambda phase: None)
                made.trained()
        finally:
            loop.close()

    texts = [str(error) for error in on_threads(SIZE, work)]
    assert texts[1] == "no episode"
    assert texts[0] == texts[2] == "rank 1 failed: ValueError: no episode"


def test_ranks_replace_groups_that_are_not_trained() -> None:
    """Every third group has equal rewards, and every seventh prompt fails. The ranks agree on what
    they trained, skipped and set aside, also in the state that resumes them.
    """

    def rewards(name: str) -> list[float | None]:
        number = int(name)
        return [None, None] if number % 7 == 0 else [1.0, 1.0] if number % 3 == 0 else [0.0, 1.0]

    def work(ranks: Ranks) -> Any:
        own, loop, trained, letters, found = ledgers(ranks.rank), BackgroundLoop(), [], [], []
        dead = DeadLetters(2, [task for step in range(1, 60) for task in tasks_of(step)])
        try:
            made = collector(ranks, own, loop, "", rewards, dead, max_rounds=9)
            for step in range(1, STEPS + 1):
                if step == 6:  # a resume
                    state, known = own.state(), dead.state()
                    made.stop()
                    own, dead = ledgers(ranks.rank), DeadLetters(2, dead._tasks)
                    own.load(state)
                    dead.load(known)
                    made = collector(ranks, own, loop, "", rewards, dead, max_rounds=9)
                groups = made.collect(tasks_of(step), step, lambda phase: None)
                trained.append([int(group.task.id) for group in groups])
                made.trained()
                letters.append([record["task"] for record in dead.taken])
                stats = made.stats()
                found.append({k: v for k, v in stats.items() if k.startswith(("dyn", "rollout/d"))})
            return trained, letters, found, own.state(), dead.state()
        finally:
            loop.close()

    first, *others = on_threads(SIZE, work)
    assert others == [first, first]
    trained, letters, found, _, _ = first
    numbers = [number for step in trained for number in step]
    assert len(set(numbers)) == len(numbers) == STEPS * PER_STEP
    assert not [n for n in numbers if n % 3 == 0 or n % 7 == 0]
    assert [[n % PER_STEP % SIZE for n in step].count(2) for step in trained] == [1] * STEPS
    names = [int(name) for step in letters for name in step]
    assert len(set(names)) == len(names) and names and not [n for n in names if n % 7]
    assert [stats["rollout/dead_prompts"] for stats in found] == [len(step) for step in letters]
    assert all(stats["dynamic/unfilled"] == 0 for stats in found)
    assert sum(stats["dynamic/extra_frac"] for stats in found) > 0


def test_greedy_baselines_are_those_of_one_process() -> None:
    """At bound 0, and of every group at any bound."""

    def work(ranks: Ranks, staleness: int) -> Any:
        own, loop, found = ledgers(ranks.rank, staleness), BackgroundLoop(), []
        greedy: Any = Drawn(random.Random(9), "", lambda name: [float(name) / 2])
        try:
            made = collector(ranks, own, loop, greedy=greedy)
            for step in range(1, STEPS + 1):
                groups = made.collect(tasks_of(step), step, lambda phase: None)
                baselines = [g.greedy and g.greedy.total_reward for g in groups]
                found.append([(g.task.id, b) for g, b in zip(groups, baselines, strict=True)])
                made.trained()
                assert made.stats()["rollout/greedy_reward"] == fmean(baselines)
            return found
        finally:
            loop.close()

    alone = [[(task.id, float(task.id) / 2) for task in tasks_of(s)] for s in range(1, STEPS + 1)]
    assert on_threads(SIZE, partial(work, staleness=0)) == [alone] * SIZE
    first, *others = on_threads(SIZE, partial(work, staleness=STALENESS))
    assert others == [first, first] and sorted(chain(*first)) == sorted(chain(*alone))


def test_a_curriculum_draws_the_tasks_of_one_process() -> None:
    """At bound 0. At another, all ranks draw the same."""
    pool = [task for step in range(1, 6) for task in tasks_of(step)]
    limits = Limits(every=2, easy=0.9, hard=0.1, retest=3, half_life=4.0, samples=2.0)

    def rewards(name: str) -> list[float | None]:
        return [float(int(name) % 4 > 1), float(int(name) % 4 > 0)]

    def made_curriculum() -> Curriculum:
        return Curriculum(pool, PER_STEP, 0, {}, limits)

    def work(ranks: Ranks, staleness: int) -> Any:
        own, loop, found = ledgers(ranks.rank, staleness), BackgroundLoop(), []
        curriculum = made_curriculum()
        try:
            observe = curriculum.observe_step
            made = collector(ranks, own, loop, "", rewards, None, curriculum, observe)
            for step in range(1, STEPS + 1):
                groups = made.collect([*range(PER_STEP)], step, lambda phase: None)  # type: ignore[list-item]
                found.append([group.task.id for group in groups])
                made.trained()
            return found, curriculum.state()
        finally:
            loop.close()

    alone, expected = made_curriculum(), []
    drawn = Drawn(random.Random(0), "", rewards)

    async def played(task: Task) -> Group:
        return await anext(drawn.play([task]))

    for step in range(1, STEPS + 1):
        tasks = alone(step)
        expected.append([task.id for task in tasks])
        alone.observe_step([asyncio.run(played(task)) for task in tasks])
    assert len(alone.pool) < len(pool)
    found = on_threads(SIZE, partial(work, staleness=0))
    assert found == [(expected, alone.state())] * SIZE
    first, *others = on_threads(SIZE, partial(work, staleness=STALENESS))
    assert others == [first, first]


def test_a_run_without_prompts_ends_on_all_ranks() -> None:
    """All prompts fail, and each rank sets aside those that it has."""

    def turned(step: int) -> list[Task]:
        first = tasks_of(1)
        return first[step % PER_STEP :] + first[: step % PER_STEP]

    def work(ranks: Ranks) -> None:
        loop, dead = BackgroundLoop(), DeadLetters(1, tasks_of(1))
        try:
            own, rewards = ledgers(ranks.rank), lambda name: [None]
            made = collector(ranks, own, loop, "", rewards, dead, turned)
            for step in range(1, 3):
                made.collect(tasks_of(1), step, lambda phase: None)
                made.trained()
        finally:
            loop.close()

    for error in on_threads(SIZE, work):
        assert isinstance(error, UserError) and "rollout.max_failures" in str(error)


def test_a_resume_needs_as_many_ranks() -> None:
    state = ledgers(0).state()
    fewer = RankLedgers([Ledger(PER_STEP, STALENESS, 1, STEPS)], 0)
    with pytest.raises(UserError, match="resume it with 3 ranks"):
        fewer.load(state)
