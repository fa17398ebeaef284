"""The audit finds the fault in each faulty environment, and none in a sound one."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable

import pytest

from sixfold.checks.environment import Environment
from sixfold.environment.calculator import Calculator, calculator_tasks
from sixfold.environment.episode import Action, End, Observation
from sixfold.types import Task
from sixfold_environments.audit.answers import Right
from sixfold_environments.audit.audit import audit_environment
from sixfold_environments.audit.checks import Rights, check_strict, check_throughput, right_answers
from sixfold_environments.audit.finding import Finding, worst
from sixfold_environments.audit.trials import Trials

Reward = Callable[[str, Task], float]
TASKS = [Task(id=f"t{n}", prompt=f"What is {n} + 1000?", answer=n + 1000) for n in range(24)]


def boxed(text: str) -> str:
    """Content of the last box."""
    found = re.findall(r"\\boxed\{([^{}]*)\}", text)
    return found[-1].strip() if found else ""


def strict(text: str, task: Task) -> float:
    return float(boxed(text).replace(",", "").strip("*$.") == str(task.answer))


def audit(reward: Reward, tasks: list[Task] = TASKS, timeout_s: float = 5.0) -> dict[str, Finding]:
    with Environment([reward], timeout_s=timeout_s) as environment:
        found = audit_environment(
            Trials(environment),
            tasks,
            tasks,
            key=lambda task: task.prompt,
            timeout_s=timeout_s,
            workers=1,
            per_step=64,
            step_s=None,
            seed=0,
        )
        return {finding.check: finding for finding in found}


def levels(found: dict[str, Finding]) -> dict[str, str]:
    return {name: finding.level for name, finding in found.items() if finding.level != "ok"}


def test_a_sound_environment_has_no_failure_and_names_the_forms_that_it_refuses() -> None:
    found = audit(strict)
    assert levels(found) == {"format variants": "warning"}
    assert found["format variants"].result == "refused: a decimal"
    assert worst(list(found.values())) == "warning"


def accepts_all(text: str, task: Task) -> float:
    return 1.0


def contains(text: str, task: Task) -> float:
    return float(str(task.answer) in text)


def any_box(text: str, task: Task) -> float:
    return float(bool(boxed(text)))


def near(text: str, task: Task) -> float:
    answer = boxed(text)
    return float(answer.lstrip("-").isdigit() and abs(int(answer) - task.answer) <= 1)


def refuses_words(text: str, task: Task) -> float:
    return strict(text, task) if text.startswith("\\boxed") else 0.0


def recursive(text: str, task: Task) -> float:
    def depth(rest: str) -> int:
        return 1 + depth(rest[1:]) if rest.startswith(("(", "{")) else 0

    depth(boxed(text) or text.removeprefix("\\boxed{"))
    return strict(text, task)


def wrong_gold(text: str, task: Task) -> float:
    return 0.0 if task.id in ("t3", "t4") else strict(text, task)


@pytest.mark.parametrize(
    ("reward", "failing"),
    [
        (accepts_all, {"distractor", "vacuous tasks", "uninformed answers", "hard texts"}),
        (any_box, {"distractor", "uninformed answers"}),
        (contains, {"uninformed answers"}),
        (near, {"distractor"}),
        (refuses_words, {"paraphrase"}),
        (recursive, {"hard texts"}),
        (wrong_gold, {"reference answer", "paraphrase"}),
    ],
)
def test_each_fault_is_found(reward: Reward, failing: set[str]) -> None:
    found = audit(reward)
    assert failing <= {name for name, level in levels(found).items() if level == "failure"}
    for name in failing:
        assert found[name].remedy and found[name].details
    assert worst(list(found.values())) == "failure"


def test_tasks_whose_reference_answer_earns_nothing_are_named() -> None:
    finding = audit(wrong_gold)["reference answer"]
    assert [line.partition(":")[0] for line in finding.details] == ["t3", "t4"]
    assert finding.result == "solves 91.7% of 24 tasks"


def test_the_gap_to_a_stricter_verifier_is_reported() -> None:
    def bare(text: str, task: Task) -> float:
        return float(text == f"\\boxed{{{task.answer}}}")

    with Environment([strict]) as training, Environment([bare]) as stricter:
        trials = Trials(training)
        rights = right_answers(trials, TASKS)
        finding = check_strict(trials, Trials(stricter), rights)
        same = check_strict(trials, Trials(training), rights)
    assert finding.level == "warning" and len(finding.details) == 5
    assert same.level == "ok" and same.result.startswith("refuses 0.0%")


def test_a_list_of_all_frequent_answers_is_an_exploit_of_a_search_for_the_answer() -> None:
    few = [Task(id=f"t{n}", prompt=f"question {n}", answer=n % 3 + 10) for n in range(24)]
    finding = audit(contains, few)["uninformed answers"]
    assert finding.level == "failure"
    assert finding.result.endswith("the best earns 100%")
    assert all(answer in finding.details[0] for answer in ("10", "11", "12"))


def test_equal_answers_are_an_exploit_though_the_verifier_is_right() -> None:
    """A constant is right as often as its answer occurs."""
    same = [Task(id=f"t{n}", prompt=f"question {n}", answer=5 + (n % 4 == 0)) for n in range(24)]
    finding = audit(strict, same)["uninformed answers"]
    assert finding.level == "failure" and "75%" in finding.result


def test_repeated_prompts_warn_and_other_answers_fail() -> None:
    again = [*TASKS, Task(id="again", prompt=TASKS[0].prompt, answer=TASKS[0].answer)]
    assert audit(strict, again)["duplicates"].level == "warning"
    other = [*TASKS, Task(id="other", prompt=TASKS[0].prompt, answer=5)]
    finding = audit(strict, other)["duplicates"]
    assert finding.level == "failure" and finding.details == ("different answers: t0, other",)


def test_tasks_without_answers_fail() -> None:
    finding = audit(strict, [Task(id="a", prompt="q")])["reference answer"]
    assert finding.level == "failure" and "data.answer_field" in finding.remedy


def test_a_worked_solution_is_the_reference() -> None:
    tasks = [Task(id=f"t{n}", prompt=f"q{n}", trace=f"so \\boxed{{{n}}}") for n in range(4)]

    def right(text: str, task: Task) -> float:
        return float(boxed(text) == task.id[1:])

    found = audit(right, tasks)
    assert found["reference answer"].result == "solves 100.0% of 4 tasks"
    assert found["distractor"].level == "ok", "the solution of another task"


def test_failed_checks_are_reported() -> None:
    def broken(text: str, task: Task) -> float:
        raise RuntimeError("no server")

    finding = audit(broken)["reference answer"]
    assert finding.level == "failure"
    assert "the check failed: broken: RuntimeError: no server" in finding.details[0]


def test_slow_checks_warn_beside_the_time_of_a_step() -> None:
    async def slow(text: str, task: Task) -> float:
        await asyncio.sleep(0.02 if task.id == "t0" else 0)
        return 1.0

    with Environment([slow]) as environment:
        rights = Rights([], "")
        made = [
            check_throughput(
                Trials(environment),
                rights._replace(found=_rights()),
                workers=1,
                per_step=1_000_000,
                step_s=step_s,
            )
            for step_s in (None, 1e-3, 1e9)
        ]
    assert [finding.level for finding in made] == ["ok", "warning", "ok"]
    assert "environment.workers" in made[1].remedy


def _rights() -> list[Right]:
    return [Right(task, str(task.answer), str(task.answer)) for task in TASKS[:3]]


def test_episodes_are_played() -> None:
    tasks = calculator_tasks(12, numbers=3, digits=2, seed=0)
    with Environment(["arithmetic"], metric="reward") as environment:
        trials = Trials(environment, Calculator)
        right = [(task, task.trace or "") for task in tasks]
        assert trials.solved(right) == [True] * len(tasks)
        assert not any(trials.solved([(task, "c(1+1)") for task in tasks])), "endless calls"
        wrong = [(task, str(task.answer + 1)) for task in tasks]
        assert not any(trials.solved(wrong))


def test_an_episode_that_raises_or_hangs_is_a_failed_check() -> None:
    class Broken:
        def __init__(self, task: Task) -> None:
            self.task = task

        async def start(self) -> Observation:
            return Observation(text="")

        async def step(self, action: Action) -> Observation | End:
            if self.task.id == "t0":
                raise OSError("no database")
            await asyncio.sleep(60)
            return End(1.0)

    with Environment(["arithmetic"]) as environment:
        trials = Trials(environment, Broken, timeout_s=0.05)
        raised, hung = trials.rewards([(TASKS[0], ""), (TASKS[1], "")])
    assert raised.value is None and "no database" in (raised.error or "")
    assert hung.value is None and "TimeoutError" in (hung.error or "")


def test_every_episode_is_closed() -> None:
    closed: list[str] = []

    class Open:
        def __init__(self, task: Task) -> None:
            self.task = task

        async def start(self) -> Observation:
            return Observation(text="")

        async def step(self, action: Action) -> Observation | End:
            if self.task.id == "t1":
                raise OSError("no database")
            return End(1.0)

        async def close(self) -> None:
            closed.append(self.task.id)
            raise OSError("closed already")

    with Environment(["arithmetic"], metric="reward") as environment:
        ended, raised = Trials(environment, Open).rewards([(TASKS[0], ""), (TASKS[1], "")])
    assert closed == ["t0", "t1"]
    assert ended.value == 1.0 and raised.value is None
