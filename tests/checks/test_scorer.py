"""Every trajectory gets a reward. A failed check is recorded and affects no other. Too many failed
checks stop the run.
"""

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sixfold.checks.budget import RewardBudgetExceeded
from sixfold.checks.environment import Environment
from sixfold.checks.process import WorkerProcess
from sixfold.checks.queue import WorkerPool
from sixfold.environment.arithmetic import arithmetic_tasks
from sixfold.errors import UserError
from sixfold.types import Group, Reward, Task, Trajectory

SAMPLE = str(Path(__file__).parents[1] / "environment" / "rewards_for_tests" / "sample.py")


def trajectory(text: str, sample: int = 0) -> Trajectory:
    return Trajectory.one_turn("t", sample, [1], [7, 8], [-1.0, -1.0], [0, 0], "stop", text=text)


def group(texts: Sequence[str], task: Task | None = None) -> Group:
    return Group(
        task or Task(id="t", prompt="q", answer=1),
        [trajectory(text, k) for k, text in enumerate(texts)],
    )


def unscored(groups: Sequence[Group]) -> list[Group]:
    """The same groups before any check."""
    return [Group(g.task, [replace(t, reward=None) for t in g.trajectories]) for g in groups]


def rewards(group: Group) -> list[Reward]:
    return [t.reward for t in group.trajectories if t.reward is not None]


@pytest.mark.slow
def test_scores_land_on_their_own_trajectories() -> None:
    groups = [
        group([task.trace or "", f"#{task.answer + 1}"], task)
        for task in arithmetic_tasks(300, terms=2, digits=3, seed=0)
    ]
    with Environment(["arithmetic"], workers=2) as environment:
        environment.score(groups)
        assert all(g.rewards == [1.0, 0.0] for g in groups)
        groups = unscored(groups)
        groups[7].trajectories[0].text = "#none"
        environment.score(groups)
        assert [sum(r or 0 for r in g.rewards) for g in groups] == [
            float(i != 7) for i in range(300)
        ]


@pytest.mark.slow
def test_512_checks_share_a_process_and_four_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """A check costs one call and one line. It needs no separate process, request or system call
    (`benchmarks/reward_checks.py`).
    """
    counts: Counter[str] = Counter()

    def count(owner: type, name: str) -> None:
        original = getattr(owner, name)

        def counted(*args: Any) -> Any:
            counts[name] += 1
            return original(*args)

        monkeypatch.setattr(owner, name, counted)

    for owner, name in (
        (WorkerProcess, "send"),
        (WorkerPool, "_spawn"),
        (WorkerPool, "_take"),
        (WorkerPool, "_read"),
    ):
        count(owner, name)
    groups = [group(["x"] * 8) for _ in range(64)]
    with Environment([f"{SAMPLE}:events_since_the_last_check"]) as environment:
        environment.score(groups)
        assert (counts["_spawn"], counts["send"], counts["_take"]) == (1, 4, 1 + 512)
        assert counts["_read"] <= counts["_take"] + 1  # it wakes up only to read
        assert [r for g in groups for r in g.rewards] == [0.0] * 512
        environment.score(unscored(groups))
    assert (counts["_spawn"], counts["send"], counts["_take"]) == (1, 8, 1 + 1024)


@pytest.mark.slow
def test_rewards_are_weighted_summed_and_logged_by_name() -> None:
    g = group(["#1", "#22"])
    with Environment(
        ["arithmetic", f"{SAMPLE}:length", lambda completion, task: 10.0], weights=[1.0, 0.5, -1.0]
    ) as environment:
        environment.score([g])
    assert g.rewards == [1.0 + 0.5 * 2 - 10.0, 0.0 + 0.5 * 3 - 10.0]
    assert rewards(g)[1].parts == {"arithmetic": 0.0, "length": 3.0, "<lambda>": 10.0}


@pytest.mark.nightly
@pytest.mark.slow
def test_failures_are_outcomes_of_their_own_trajectory_only() -> None:
    texts = [
        "a",
        "hang",
        "b",
        "raise",
        "crash",
        "c",
        "exit",
        "nan",
        "inf",
        "text",
        "none",
        "spin",
        "d",
    ]
    groups = [group(texts), group(["e", "f"])]
    with Environment([f"{SAMPLE}:told"], timeout_s=0.5, error_budget=1.0, workers=2) as environment:
        environment.score(groups)
        errors = {
            t.text: t.reward.error
            for g in groups
            for t in g.trajectories
            if t.reward and t.reward.value is None
        }
        assert errors == {
            "hang": "told: timeout after 0.5 s",
            "spin": "told: timeout after 0.5 s",
            "raise": "told: ValueError: two lines",
            "crash": "told: process was killed by SIGKILL; the machine may be out of memory",
            "exit": "told: SystemExit: 3",
            "nan": "told: ValueError: returned nan",
            "inf": "told: ValueError: returned inf",
            "text": "told: TypeError: returned str, not a number",
            "none": "told: TypeError: returned NoneType, not a number",
        }
        assert [
            t.reward.value
            for g in groups
            for t in g.trajectories
            if t.reward and t.text not in errors
        ] == [1.0] * 6
        (again,) = unscored([groups[1]])
        environment.score([again])  # the pool is whole again
        assert again.rewards == [1.0, 1.0]


@pytest.mark.slow
def test_one_failing_reward_of_two_leaves_no_value_but_the_other_part() -> None:
    g = group(["raise"])
    with Environment([f"{SAMPLE}:told", f"{SAMPLE}:length"], error_budget=0.5) as environment:
        environment.score([g])
    assert (
        rewards(g)[0].value is None
        and rewards(g)[0].parts == {"length": 5.0}
        and "ValueError" in str(rewards(g)[0].error)
    )


@pytest.mark.slow
def test_the_error_budget_stops_the_run_early() -> None:
    """It stops after two failures: 64 of them would take 19 s."""
    with Environment([f"{SAMPLE}:told"], timeout_s=0.3, error_budget=0.02) as environment:
        with pytest.raises(
            RewardBudgetExceeded,
            match=r"2 of 64 reward checks failed.*2 x told: timeout after 0.3 s",
        ):
            environment.score([group(["hang"] * 64)])
        good = group(["a"])
        environment.score([good])
    assert good.rewards == [1.0]


@pytest.mark.slow
def test_trl_functions_are_called_once_a_group() -> None:
    first = group(["aab", "b"], Task(id="1", prompt="q", columns={"letter": "a"}))
    second = group(["aab", "bb"], Task(id="2", prompt="q", columns={"letter": "b"}))
    skipped = group(["x"], Task(id="3", prompt="q", columns={"letter": "?"}))
    with Environment([f"{SAMPLE}:trl_letters", f"{SAMPLE}:trl_async"]) as environment:
        environment.score([first, second, skipped])
    assert (first.rewards, second.rewards) == ([2.0 + 4, 0.0 + 2], [1.0 + 4, 2.0 + 3])
    assert rewards(skipped)[0].parts == {"trl_async": 2.0}  # None: does not apply
    (skipped,) = unscored([skipped])
    with Environment([f"{SAMPLE}:trl_letters"]) as environment:
        environment.score([skipped])
    assert (
        rewards(skipped)[0].value is None
        and rewards(skipped)[0].error == "no reward function applies"
    )


@pytest.mark.slow
def test_what_reaches_a_trl_function_in_its_process() -> None:
    g = group(["x", "y"], Task(id="1", prompt="q", answer=3, columns={"level": 2}))
    with Environment([f"{SAMPLE}:trl_record"], error_budget=1.0) as environment:
        environment.score([g])
    error = str(rewards(g)[0].error).removeprefix("trl_record: ValueError: ")
    assert json.loads(error) == [
        ["q", "q"],
        ["x", "y"],
        [[7, 8], [7, 8]],
        [
            "answer",
            "finish_reason",
            "level",
            "log_extra",
            "log_metric",
            "prompt_ids",
            "rendered_prompt",
            "trainer_state",
        ],
    ]


@pytest.mark.slow
def test_replies_of_a_stopped_score_do_not_answer_the_next() -> None:
    g = group(["a", "b"])
    with Environment([f"{SAMPLE}:told"], error_budget=0.0) as environment:
        with pytest.raises(RewardBudgetExceeded, match="1 of 64 reward checks failed"):
            environment.score([group(["raise"] * 64)])
        environment.score([g])
    assert g.rewards == [1.0, 1.0]


@pytest.mark.slow
def test_a_hanging_trl_function_costs_its_group() -> None:
    groups = [group(["x", "y"]), group(["z"])]
    with Environment(
        [f"{SAMPLE}:trl_hang"], timeout_s=0.3, error_budget=1.0, workers=2
    ) as environment:
        environment.score(groups)
    assert [r.error for g in groups for r in rewards(g)] == ["trl_hang: timeout after 0.3 s"] * 3


@pytest.mark.slow
def test_trajectories_with_a_reward_are_not_checked_again() -> None:
    """By any kind of reward. A TRL function gets only the other trajectories of the group."""
    seen: list[str] = []

    def local(completion: str, task: Task) -> float:
        seen.append(completion)
        return 1.0

    given = [Reward(0.25), Reward(None, error="told: ValueError: once"), Reward(0.0)]
    whole, half = (
        group(["raise", "b"]),
        group(["raise", "aa", "ab"], Task(id="1", prompt="q", columns={"letter": "a"})),
    )
    for trajectory, reward in zip([*whole.trajectories, half.trajectories[0]], given, strict=True):
        trajectory.reward = reward
    with Environment([local, f"{SAMPLE}:told", f"{SAMPLE}:trl_letters"]) as environment:
        environment.score([whole, half])
        assert [rewards(whole)[0], rewards(whole)[1], rewards(half)[0]] == given
        assert [r.parts for r in rewards(half)[1:]] == [
            {"local": 1.0, "told": 1.0, "trl_letters": n} for n in (2.0, 1.0)
        ]
        before = rewards(half)
        environment.score([whole, half])
    assert seen == ["aa", "ab"] and all(a is b for a, b in zip(rewards(half), before, strict=True))


@pytest.mark.slow
def test_a_step_scored_in_rounds_has_one_error_budget() -> None:
    """A quarter of the checks may fail. Checks and failures of earlier rounds count. A trajectory
    to which no reward applies is not a failure.
    """
    first, second, third = (
        group(["raise", *"abcdefg"]),
        group(["raise", "a"]),
        group(["raise", "raise"]),
    )

    async def rounds() -> None:
        scorer = environment.scorer(8)
        await scorer.finish(first)
        await scorer.finish(second)  # 2 of 10, where the round alone has 1 of 2
        await scorer.finish(second)  # nothing left to fail
        with pytest.raises(RewardBudgetExceeded, match=r"4 of 12 reward checks failed"):
            await scorer.finish(third)

    with Environment([f"{SAMPLE}:told"], error_budget=0.25) as environment:
        asyncio.run(rounds())
        with pytest.raises(RewardBudgetExceeded, match=r"1 of 2 reward checks failed"):
            environment.score(unscored([second]))
    skipped = group(["x"] * 3, Task(id="3", prompt="q", columns={"letter": "?"}))
    with Environment([f"{SAMPLE}:trl_letters"], error_budget=0.0) as environment:
        environment.score([skipped])


def test_callables_run_here_and_their_errors_are_recorded() -> None:
    def fussy(completion: str, task: Task) -> float:
        if completion == "bad":
            raise KeyError("no")
        return float(os.getpid())

    g = group(["good", "bad"])
    with Environment([fussy], error_budget=0.5) as environment:
        environment.score([g])
    assert (
        g.rewards == [float(os.getpid()), None] and rewards(g)[1].error == "fussy: KeyError: 'no'"
    )


@pytest.mark.slow
def test_named_rewards_run_in_other_processes_which_close_ends() -> None:
    groups = [group(["x"] * 8) for _ in range(8)]
    with Environment([f"{SAMPLE}:process"], workers=2) as environment:
        environment.start()
        environment.score(groups)
        pids = {int(r.value or 0) for g in groups for r in rewards(g)}
        assert os.getpid() not in pids and 1 <= len(pids) <= 2
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    environment.close()


@pytest.mark.slow
def test_processes_import_no_torch_and_start_beside_running_threads() -> None:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    g = group(["x"])
    try:
        with Environment([f"{SAMPLE}:torch_is_loaded"]) as environment:
            environment.score([g])
    finally:
        stop.set()
        thread.join()
    assert g.rewards == [0.0]


@pytest.mark.slow
def test_packages_import_no_torch() -> None:
    modules = (
        "sixfold.checks.environment, sixfold_environments.maths.answers, sixfold_environments.gym,"
        " sixfold.environment.preflight, sixfold.data.sources"
    )
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules or 'datasets' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.slow
def test_worker_ends_with_its_parent() -> None:
    code = (
        "import asyncio, os, time\n"
        "from sixfold.checks.queue import WorkerPool\n"
        f"pool = WorkerPool(['{SAMPLE}:length'], workers=1, timeout_s=1.0)\n"
        "asyncio.run(pool.rewards())\n"
        "print(pool._workers[0].child.process.pid, flush=True); os._exit(9)"
    )
    pid = int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout)
    for _ in range(100):
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return
        if stat.rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.05)
    pytest.fail(f"process {pid} is still there")


@pytest.mark.slow
def test_reward_that_cannot_be_loaded_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="unknown reward 'maths'"):
        Environment(["maths"])
    with pytest.raises(UserError, match=r"environment\.weights has 2 entries for 1 rewards"):
        Environment(["math"], weights=[1.0, 2.0])
    (tmp_path / "broken.py").write_text("import no_such_library")
    with (
        Environment([f"{tmp_path}/broken.py:f"]) as environment,
        pytest.raises(UserError, match="No module named 'no_such_library'"),
    ):
        environment.score([group(["x"])])


@pytest.mark.nightly
@pytest.mark.slow
def test_math_answers_by_algebra_in_a_process() -> None:
    tasks = [Task(id=str(i), prompt="", answer=r"\sqrt{2}") for i in range(4)]
    groups = [group([r"\boxed{\frac{2}{\sqrt{2}}}", r"\boxed{1.41421356}"], task) for task in tasks]
    with Environment(["math"]) as environment:
        environment.score(groups)
    assert [g.rewards for g in groups] == [[1.0, 0.0]] * 4


def test_a_stream_scores_each_trajectory_as_it_ends() -> None:
    """Rewards of single completions are set after `add`, those over groups after `finish`. `finish`
    adds the trajectories that were not added. A given reward stays.
    """
    seen: list[list[str]] = []

    def single(completion: str, task: Task) -> float:
        return float(len(completion))

    def whole(completions: list[str], **columns: Any) -> list[float]:
        seen.append(completions)
        return [10.0 * len(completions)] * len(completions)

    async def stream(environment: Environment, g: Group) -> list[list[float | None]]:
        scorer = environment.scorer(3)
        g.trajectories[2].reward = Reward(0.5)
        await scorer.add(g.task, g.trajectories[1])
        await scorer.add(g.task, g.trajectories[2])
        between = g.rewards
        await scorer.finish(g)
        return [between, g.rewards]

    alone, both = group(["a", "bb", "ccc"]), group(["a", "bb", "ccc"])
    with Environment([single]) as environment:
        assert asyncio.run(stream(environment, alone)) == [[None, 2.0, 0.5], [1.0, 2.0, 0.5]]
    with Environment([single, whole]) as environment:
        assert asyncio.run(stream(environment, both)) == [[None, None, 0.5], [21.0, 22.0, 0.5]]
    assert seen == [["a", "bb"]]


def test_a_scorer_has_one_error_budget_to_which_failed_episodes_count() -> None:
    def fussy(completion: str, task: Task) -> float:
        return 1.0 / len(completion)

    async def stream(texts: Sequence[str], expected: int, fail: bool) -> Group:
        g = group(texts)
        with Environment([fussy], error_budget=0.25) as environment:
            scorer = environment.scorer(expected)
            if fail:
                scorer.fail(g.trajectories[0], "the episode raised ValueError")
            for one in g.trajectories:
                await scorer.add(g.task, one)
            await scorer.finish(g)
        return g

    failed = asyncio.run(stream("aabb", 4, fail=True)).trajectories[0].reward
    assert failed == Reward.failed("the episode raised ValueError")
    asyncio.run(stream(["", "a"], 4, fail=False))
    asyncio.run(stream([*"abcdefg", "", ""], 1, fail=False))  # the added count if they are more
    for texts, expected, fail in (["", "a"], 3, False), (["a", ""], 4, True):
        with pytest.raises(RewardBudgetExceeded, match=f"of {expected} reward checks failed"):
            asyncio.run(stream(texts, expected, fail))


def test_a_failed_episode_costs_all_of_its_checks() -> None:
    """Otherwise, with three rewards, three times as many episodes could fail."""

    async def stream(episodes: int) -> None:
        g = group("a" * episodes)
        with Environment([lambda completion, task: 1.0] * 3, error_budget=0.25) as environment:
            environment.scorer(episodes).fail(g.trajectories[0], "the episode raised ValueError")

    asyncio.run(stream(4))
    with pytest.raises(RewardBudgetExceeded, match="3 of 9 reward checks cannot run"):
        asyncio.run(stream(3))


@pytest.mark.slow
def test_the_pool_serves_one_event_loop_after_another() -> None:
    """This includes calls of `score` inside a running event loop, as in a notebook."""

    async def notebook(environment: Environment) -> None:
        environment.score([first])
        scorer = environment.scorer(2)
        await scorer.finish(second)
        environment.score([third])

    first, second, third, fourth = (group(["a", "b"]) for _ in range(4))
    with Environment([f"{SAMPLE}:told"]) as environment:
        asyncio.run(notebook(environment))
        environment.score([fourth])
    assert all(g.rewards == [1.0, 1.0] for g in (first, second, third, fourth))


def test_the_sum_of_rewards_does_not_depend_on_which_check_ends_first() -> None:
    def make(value: float, pause: float) -> Any:
        async def reward(completion: str, task: Task) -> float:
            await asyncio.sleep(pause)
            return value

        return reward

    sums = []
    for pauses in (0.0, 0.02, 0.04), (0.04, 0.02, 0.0):
        made = [make(v, p) for v, p in zip((0.1, 0.2, 0.3), pauses, strict=True)]
        scored = group(["x"])
        with Environment(made) as environment:
            environment.score([scored])
        sums.append(scored.rewards)
    assert sums == [[0.1 + 0.2 + 0.3]] * 2 != [[0.3 + 0.2 + 0.1]] * 2


def test_finish_waits_for_no_add_that_still_runs() -> None:
    async def reward(completion: str, task: Task) -> float:
        await asyncio.sleep(0.1)
        return 1.0

    async def step(environment: Environment) -> None:
        scored = group(["x"])
        scorer = environment.scorer(1)
        adding = asyncio.ensure_future(scorer.add(scored.task, scored.trajectories[0]))
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="before add had returned"):
            await scorer.finish(scored)
        await adding
        assert scored.rewards == [1.0]

    with Environment([reward]) as environment:
        asyncio.run(step(environment))
