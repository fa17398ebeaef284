"""Dynamic sampling: every slot ends mixed or the bound was reached; nothing extra where nothing is
missing; the same again after a resume.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.controller.scripted import LOOP, ScriptedRollout, collect
from tests.rollouts import EngineRollout

from sixfold.checks.budget import RewardBudgetExceeded
from sixfold.checks.environment import Environment
from sixfold.controller.collector import Collector
from sixfold.controller.dynamic_sampling import Refill, mixed
from sixfold.engine.engine import Engine
from sixfold.environment.pass_rate import degenerate_probability
from sixfold.environment.preflight import expected_refill
from sixfold.model.causal_lm import CausalLM
from sixfold.model.loading import Policy
from sixfold.renderer.renderer import Renderer
from sixfold.types import Group, Reward, SamplingParams, Task, Trajectory, Turn

Draw = Callable[[str, int], list[str]]
"""(task id, seed) -> what the policy answers, one text a sample; the answer is its own reward, "?"
makes the check fail.
"""


class Sampler(ScriptedRollout):
    """A rollout that answers by `draw` and writes down its calls; sample k of a task has k +
    1 sampled tokens.
    """

    def __init__(self, draw: Draw) -> None:
        super().__init__()
        self.draw = draw
        self.calls: list[tuple[list[str], int]] = []
        self.made: list[Group] = []
        self._stats: dict[str, float] = {}

    def episodes(self, task: Task, seed: int) -> list[Trajectory]:
        return [_trajectory(task.id, k, text) for k, text in enumerate(self.draw(task.id, seed))]

    async def play(
        self, tasks: Sequence[Task], seed: int, *options: Any
    ) -> AsyncGenerator[Group, None]:
        self.calls.append(([t.id for t in tasks], seed))
        groups = []
        async for group in super().play(tasks, seed, *options):
            groups.append(group)
            yield group
        self.made += groups
        lengths = [t.sampled_length for g in groups for t in g.trajectories]
        self._stats = {
            "rollout/tokens": float(sum(lengths)),
            "rollout/prompt_tokens": float(len(self.calls) * len(lengths)),
            "rollout/reused_frac": float(seed % 7),
            "rollout/tok_s": 1.0,
            "rollout/length_mean": sum(lengths) / len(lengths),
            "rollout/length_max": float(max(lengths)),
            "rollout/truncated_frac": 0.5 / len(self.calls),
            "rollout/preemptions": float(len(self.calls)),
            "rollout/recomputed_tokens": 10.0 * len(self.calls),
            "rollout/kv_peak_frac": (0.25, 0.75, 0.5)[len(self.calls) % 3],
            "rollout/queue_peak": float(len(tasks)),
        }

    def stats(self) -> dict[str, float]:
        return self._stats


def _trajectory(task: str, sample: int, text: str) -> Trajectory:
    n = sample + 1
    return Trajectory.one_turn(
        task, sample, [5] * 3, [5] * n, [-1.0] * n, [0] * n, "stop", text=text
    )


def _environment(checked: list[str] | None = None, error_budget: float = 1.0) -> Environment:
    def value(completion: str, task: Task) -> float:
        if checked is not None:
            checked.append(task.id)
        return float(completion)

    return Environment([value], error_budget=error_budget)


def _tasks(n: int) -> list[Task]:
    return [Task(f"t{i}", "?") for i in range(n)]


def _by_task(pattern: dict[str, list[str]]) -> Draw:
    return lambda task, seed: pattern[task]


REWARDS = st.lists(st.sampled_from(["0", "1", "?"]), min_size=3, max_size=3)


@pytest.mark.slow
@given(
    st.lists(REWARDS, min_size=1, max_size=14),
    st.integers(1, 5),
    st.integers(1, 4),
    st.integers(0, 99),
)
def test_every_slot_is_mixed_or_the_bound_was_reached(
    rewards: list[list[str]], slots: int, max_rounds: int, seed: int
) -> None:
    """For any pattern of rewards, against what the inner rollout says was sampled."""
    tasks = _tasks(len(rewards))
    sampler, checked = Sampler(_by_task({t.id: r for t, r in zip(tasks, rewards, strict=True)})), []
    refill = Refill(tasks, max_rounds)
    kept, stats = collect(sampler, _environment(checked), tasks[:slots], seed, refill=refill)

    asked = [task for call, _ in sampler.calls for task in call]
    assert len(set(asked)) == len(asked) and asked[: len(tasks[:slots])] == [
        t.id for t in tasks[:slots]
    ]
    # Each answer once, those that are dropped too. A check that fails runs once more.
    answers = {t.id: row for t, row in zip(tasks, rewards, strict=True)}
    runs = {task: 3 + answers[task].count("?") for task in asked}
    assert Counter(checked) == Counter(runs)
    first, later = (
        sampler.made[: len(kept)],
        [g for g in sampler.made[len(tasks[:slots]) :] if mixed(g)],
    )
    expected = [g if mixed(g) or not later else later.pop(0) for g in first]
    assert (
        len(kept) == len(tasks[:slots])
        and not later
        and all(a is b for a, b in zip(kept, expected, strict=True))
    )
    exhausted = len(sampler.calls) == max_rounds or len(asked) == len(tasks)
    assert all(map(mixed, kept)) or exhausted
    assert len(sampler.calls) <= max_rounds and all(
        t.reward is not None for g in kept for t in g.trajectories
    )
    assert stats["dynamic/unfilled"] == sum(not mixed(g) for g in kept)

    again = Sampler(sampler.draw)
    collect(again, _environment(), tasks[:1], seed + 1, refill=refill)
    # What came before leaves no trace.
    groups, _ = collect(again, _environment(), tasks[:slots], seed, refill=refill)
    assert _told(groups) == _told(kept)


def _told(groups: Sequence[Group]) -> list[tuple[str, list[str], list[float | None]]]:
    return [(g.task.id, [t.text for t in g.trajectories], g.rewards) for g in groups]


def test_all_mixed_at_once_is_exactly_the_inner_rollout() -> None:
    sampler, tasks = Sampler(lambda task, seed: ["0", "1"]), _tasks(50)
    refill = Refill(tasks, max_rounds=5)
    kept, stats = collect(sampler, _environment(), tasks[10:14], 77, refill=refill)
    assert sampler.calls == [(["t10", "t11", "t12", "t13"], 77)]
    assert len(kept) == 4 and all(a is b for a, b in zip(kept, sampler.made, strict=True))
    assert {k: v for k,
    v in stats.items() if k.startswith("dynamic/") and k != "dynamic/check_s"} == {
        "dynamic/rounds": 1.0, "dynamic/extra_frac": 0.0, "dynamic/kept_frac": 1.0,
        "dynamic/unfilled": 0.0, "dynamic/degenerate_frac": 0.0, "dynamic/reward_mean": 0.5,
        "dynamic/solved_frac": 0.5,
    }  # fmt: skip
    inner = sampler.stats()
    assert {k: stats[k] for k in inner if k != "rollout/tok_s"} == pytest.approx(
        {k: v for k, v in inner.items() if k != "rollout/tok_s"}, abs=1e-12
    )


def test_rounds_ask_for_what_is_missing_with_new_tasks_and_new_noise() -> None:
    """Slots 0 and 2 are degenerate; the second round mends slot 0 only, the third slot 2. Metrics
    by hand.
    """
    answers = iter([["1", "1"], ["0", "1"], ["0", "0"], ["0", "0"], ["1", "0"], ["0", "1"]])
    sampler, tasks = Sampler(lambda task, seed: next(answers)), _tasks(100)
    refill = Refill(tasks, max_rounds=10)
    kept, stats = collect(sampler, _environment(), tasks[:3], 8, refill=refill)
    assert [len(call) for call, _ in sampler.calls] == [3, 2, 1]
    seeds = [seed for _, seed in sampler.calls]
    assert seeds[0] == 8 and len(set(seeds)) == 3
    assert [g.task.id for g in kept] == [sampler.calls[1][0][1], "t1", sampler.calls[2][0][0]]
    assert (
        stats["dynamic/rounds"],
        stats["dynamic/extra_frac"],
        stats["dynamic/kept_frac"],
        stats["dynamic/unfilled"],
    ) == (3, 1.0, 0.5, 0)
    assert stats["dynamic/reward_mean"] == 5 / 12
    assert (
        stats["rollout/tokens"],
        stats["rollout/prompt_tokens"],
        stats["rollout/length_max"],
    ) == (6 * 3, 6 + 2 * 4 + 3 * 2, 2)
    assert stats["rollout/length_mean"] == 1.5
    assert stats["rollout/truncated_frac"] == pytest.approx((6 * 0.5 + 4 * 0.25 + 2 * 0.5 / 3) / 12)
    assert (stats["rollout/preemptions"], stats["rollout/recomputed_tokens"]) == (
        1 + 2 + 3,
        10 + 20 + 30,
    )
    assert (stats["rollout/kv_peak_frac"], stats["rollout/queue_peak"]) == (0.75, 3)
    shares = [seed % 7 for seed in seeds]
    assert stats["rollout/reused_frac"] == pytest.approx(
        (6 * shares[0] + 8 * shares[1] + 6 * shares[2]) / 20
    )


def test_speed_is_tokens_over_the_seconds_of_sampling_and_checks_are_timed_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [0.0]
    monkeypatch.setattr("sixfold.controller.rounds.time.perf_counter", lambda: clock[0])

    def draw(task: str, seed: int) -> list[str]:
        clock[0] += 2.0
        return ["0", "0"]

    def slow(completion: str, task: Task) -> float:
        clock[0] += 1.25
        return 0.0

    tasks = _tasks(4)
    collector = Collector(Sampler(draw), Environment([slow]), LOOP, refill=Refill(tasks, 2))
    collector.collect(tasks[:2], 0, lambda phase: None)
    stats = collector.stats()
    assert stats["dynamic/check_s"] == stats["time/environment_s"] == 8 * 1.25
    assert stats["time/rollout_s"] == 8.0
    assert stats["rollout/tok_s"] == (4 * 3) / 8.0


def test_the_bound_of_rounds_and_of_tasks() -> None:
    """Hopeless tasks: the step's own groups come back, as many as asked for, and it says so."""
    sampler, tasks = Sampler(lambda task, seed: ["0", "0"]), _tasks(100)
    kept, stats = collect(sampler, _environment(), tasks[:4], 1, refill=Refill(tasks, 3))
    assert [g.task.id for g in kept] == ["t0", "t1", "t2", "t3"] and len(sampler.calls) == 3
    assert (
        stats["dynamic/unfilled"],
        stats["dynamic/kept_frac"],
        stats["dynamic/extra_frac"],
    ) == (4, 0, 2)
    few = Sampler(sampler.draw)
    kept, _ = collect(few, _environment(), tasks[:4], 1, refill=Refill(tasks[:6], 30))
    assert len(kept) == 4
    assert sorted(task for call, _ in few.calls for task in call) == [
        "t0",
        "t1",
        "t2",
        "t3",
        "t4",
        "t5",
    ]
    with pytest.raises(ValueError, match="max_rounds must be at least 1"):
        Refill(tasks, 0)


def test_other_steps_draw_other_tasks() -> None:
    sampler, tasks = Sampler(lambda task, seed: ["0", "0"]), _tasks(1000)
    for seed in (1, 2):
        collect(sampler, _environment(), tasks[:8], seed, refill=Refill(tasks, 2))
    second, fourth = sampler.calls[1], sampler.calls[3]
    assert not set(second[0]) & set(fourth[0]) and second[1] != fourth[1]


def test_a_failed_check_makes_no_group_mixed() -> None:
    def group(*texts: str) -> Group:
        made = Group(Task("t", "?"), [_trajectory("t", k, text) for k, text in enumerate(texts)])
        _environment().score([made])
        return made

    assert not mixed(group("?", "1")) and not mixed(group("?", "?")) and not mixed(group("1"))
    assert mixed(group("?", "1", "0"))


def test_rewards_of_turns_make_a_group_mixed() -> None:
    def turns(*rewards: float) -> Group:
        made = [_trajectory("t", 1, "1") for _ in rewards]
        for trajectory, reward in zip(made, rewards, strict=True):
            trajectory.reward = Reward(1.0)
            trajectory.turns = (replace(trajectory.turns[0], reward=reward),)
        return Group(Task("t", "?"), made)

    assert mixed(turns(0.0, 0.5)) and not mixed(turns(0.5, 0.5)) and not mixed(turns(0.0, 0.0))


def test_rewards_of_steps_are_compared_in_order() -> None:
    """Steps differ in length, so equal rewards of steps are at different tokens."""

    def steps(*rewards: tuple[tuple[int, float], ...]) -> Group:
        made = [_trajectory("t", 1, "1") for _ in rewards]
        for trajectory, pairs in zip(made, rewards, strict=True):
            trajectory.reward = Reward(1.0, steps=pairs)
        return Group(Task("t", "?"), made)

    first = ((3, 0.5), (4, 1.0))
    assert not mixed(steps(first, ((2, 0.5), (5, 1.0))))
    assert mixed(steps(first, ((3, 1.0), (4, 0.5)))) and mixed(steps(first, ((3, 0.5),)))


def test_rewards_of_turns_are_compared_by_turn() -> None:
    """Replies differ in length, so equal rewards of turns are at different tokens."""

    def played(sample: int, length: int, *rewards: float) -> Trajectory:
        turns = tuple(
            Turn(1 + i * length, 1 + (i + 1) * length, reward) for i, reward in enumerate(rewards)
        )
        size = length * len(rewards)
        return Trajectory(
            "t",
            sample,
            [1] * (1 + size),
            "p" + "s" * size,
            [0.0] * (1 + size),
            [-1] + [0] * size,
            turns,
            reward=Reward(1.0),
        )

    def group(*rewards: Sequence[float]) -> Group:
        return Group(Task("t", "?"), [played(k, k + 1, *r) for k, r in enumerate(rewards)])

    assert not mixed(group((0.5, 0.0), (0.5, 0.0), (0.5,)))
    assert mixed(group((0.5, 0.0), (0.0, 0.5))) and mixed(group((0.5,), (0.25,)))


def test_the_error_budget_is_the_steps_not_the_rounds() -> None:
    """A tenth may fail: one of the second round's four checks is too many for them, not for the
    step's 36; four are too many for the step.
    """

    def draw(failing: int) -> Draw:
        late = ["?"] * failing + ["1", "0", "1", "0"][failing:]
        return lambda task, seed: (
            late
            if task not in {f"t{i}" for i in range(8)}
            else ["1", "1" if task == "t0" else "0", "1", "1"]
        )

    tasks = _tasks(20)

    def groups(failing: int) -> list[Group]:
        sampler = Sampler(draw(failing))
        sampler.samples = 4
        environment = _environment(error_budget=0.1)
        return collect(sampler, environment, tasks[:8], refill=Refill(tasks, 2))[0]

    assert all(map(mixed, groups(1)))
    with pytest.raises(RewardBudgetExceeded, match="4 of 36 reward checks failed"):
        groups(4)


def test_on_the_engine_the_metrics_are_of_everything_sampled(policy: Policy) -> None:
    """Against the engine's own counters; and a second run from the same weights gives the same
    tokens.
    """

    def even(completion: str, task: Task) -> float:
        return float(len(completion) % 2)

    def run() -> tuple[Engine, dict[str, float], list[Group]]:
        engine = Engine(CausalLM(policy.model), kv_tokens=2048, max_running=16)
        params = SamplingParams(max_tokens=5, stop_token_ids=policy.stop_token_ids)
        inner = EngineRollout(engine, Renderer(policy.tokenizer), params, samples=2)
        tasks = [Task(f"t{i}", f"{i}+{i}=") for i in range(30)]
        refill = Refill(tasks, max_rounds=4)
        kept, stats = collect(inner.driver(), Environment([even]), tasks[:6], 3, refill=refill)
        return engine, stats, kept

    (engine, stats, kept), (_, _, again) = run(), run()
    counted = engine.stats
    assert stats["dynamic/rounds"] > 1
    assert (
        stats["rollout/tokens"]
        == counted.decoded_tokens
        > sum(t.sampled_length for g in kept for t in g.trajectories)
    )
    assert stats["rollout/prompt_tokens"] == counted.prefill_tokens + counted.reused_tokens
    assert stats["rollout/reused_frac"] == pytest.approx(
        counted.reused_tokens / stats["rollout/prompt_tokens"]
    )
    trajectories = 12 * (1 + stats["dynamic/extra_frac"])
    assert stats["rollout/length_mean"] == pytest.approx(stats["rollout/tokens"] / trajectories)
    assert [[(t.tokens, t.logp) for t in g.trajectories] for g in kept] == [
        [(t.tokens, t.logp) for t in g.trajectories] for g in again
    ]


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize(
    ("solved", "samples", "max_rounds"), [(0.9, 4, 3), (0.5, 4, 2), (0.8, 8, 5)]
)
def test_the_prediction_of_what_it_costs(solved: float, samples: int, max_rounds: int) -> None:
    """Sampled from independent coins, a step of 1,000 slots costs and misses what the closed forms
    say.
    """
    tasks, slots = _tasks(1000 * max_rounds), 1000
    sampler = Sampler(
        lambda task, seed: [
            str(int(random.Random(f"{task}/{k}").random() < solved)) for k in range(samples)
        ]
    )
    refill = Refill(tasks, max_rounds)
    _, stats = collect(sampler, _environment(), tasks[:slots], refill=refill)
    q = degenerate_probability(solved, samples)
    extra, unfilled = expected_refill(q, max_rounds)
    assert stats["dynamic/extra_frac"] == pytest.approx(extra, abs=0.08)
    assert stats["dynamic/unfilled"] / slots == pytest.approx(unfilled, abs=0.04)
    assert stats["dynamic/kept_frac"] == pytest.approx(1 - q, abs=0.04)


def test_replacements_in_a_step_of_one_source_are_of_that_source() -> None:
    tasks = [Task(f"t{i}", "?", source="ab"[i % 2]) for i in range(40)]
    sampler = Sampler(lambda task, seed: ["0", "1"] if seed != 5 else ["1", "1"])
    weights = {"a": 1.0, "b": 3.0}
    for whole, expected in ((True, {"a"}), (False, {"a", "b"})):
        refill = Refill(tasks, 3, weights, whole)
        kept, _ = collect(sampler, _environment(), tasks[:16:2], 5, refill=refill)
        assert {group.task.source for group in kept} == expected
