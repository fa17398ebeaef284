"""Rewards over a whole group see the other results; diversity and win rate by hand."""

import asyncio
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from text_groups import rewards, text_group

from sixfold.checks.environment import Environment
from sixfold.environment.callables import check_callable
from sixfold.environment.group_form import Member, diversity, win_rate
from sixfold.errors import UserError
from sixfold.types import Task

REWARDS = str(Path(__file__).parent / "rewards_for_tests" / "over_groups.py")
TASK = Task(id="t", prompt="q", answer=12)


def members(*texts: str, solved: Sequence[bool | None] = ()) -> list[Member]:
    known = solved or [True] * len(texts)
    return [Member(text, "stop", {}, right) for text, right in zip(texts, known, strict=True)]


def test_diversity_is_one_minus_the_mean_similarity_to_other_right_answers() -> None:
    # Runs of three: {abc bcd} and {abc bcx} share one of three; the wrong one is not compared.
    found = diversity(members("a b c d", "a b c x", "u v w", solved=[True, True, False]), TASK)
    assert found == [pytest.approx(2 / 3), pytest.approx(2 / 3), 0.0]


def test_equal_right_answers_earn_nothing_and_a_lone_one_everything() -> None:
    assert diversity(members("Same text here", "same text HERE"), TASK) == [0.0, 0.0]
    assert diversity(members("", ""), TASK) == [0.0, 0.0]
    assert diversity(members("a", "b", solved=[True, False]), TASK) == [1.0, 0.0]
    assert diversity(members("a", "b"), TASK) == [1.0, 1.0]


def test_diversity_gives_a_failed_check_no_value() -> None:
    failed = Member("a", "stop", {}, None, "infrastructure_error")
    assert diversity([failed, *members("b c d e")], TASK) == [None, 1.0]


def test_diversity_alone_says_what_is_missing() -> None:
    with pytest.raises(ValueError, match=r"environment\.rewards"):
        diversity(members("a", "b", solved=[None, None]), TASK)


def longer(first: str, second: str, task: Task) -> float:
    return 0.5 if len(first) == len(second) else float(len(first) > len(second))


def test_win_rate_is_the_mean_result_against_all_others() -> None:
    assert win_rate(longer)(members("aaa", "a", "aa", "a"), TASK) == pytest.approx(
        [1.0, 0.5 / 3, 2 / 3, 0.5 / 3]
    )
    assert win_rate(longer)(members("alone"), TASK) == [None]


def test_a_judge_that_prefers_a_position_decides_nothing() -> None:
    """Every pair is compared in both orders."""
    assert win_rate(lambda first, second, task: 1.0)(members("a", "b", "c"), TASK) == [0.5] * 3


def test_async_comparisons_run_concurrently() -> None:
    running, most = [0], [0]

    async def judge(first: str, second: str, task: Task) -> float:
        running[0] += 1
        most[0] = max(most[0], running[0])
        await asyncio.sleep(0.01)
        running[0] -= 1
        return longer(first, second, task)

    rate = win_rate(judge)
    assert asyncio.run(rate(members("aaa", "a", "aa"), TASK)) == [1.0, 0.0, 0.5]
    assert most[0] == 6 and rate.__name__ == "win_rate_judge"


@pytest.mark.parametrize("share", [-0.1, 1.5, float("nan"), "better"])
def test_a_comparison_must_be_a_share(share: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        win_rate(lambda first, second, task: share)(members("a", "b"), TASK)


@pytest.mark.slow
def test_rewards_over_groups_get_the_results_of_the_others() -> None:
    """Named, async and local functions. The checks of single completions have ended before."""

    def local(group: list[Member], task: Task) -> list[float]:
        return [member.parts["arithmetic"] + len(group) for member in group]

    every = ["arithmetic", "diversity", f"{REWARDS}:told", f"{REWARDS}:told_async", local]
    g = text_group(TASK, ["#12", "#13", "twelve is #12"])
    with Environment(every) as environment:
        environment.score([g])
    first, second, third = (dict(r.parts) for r in rewards(g))
    assert [r.solved for r in rewards(g)] == [True, False, True]
    assert (first["diversity"], second["diversity"], third["diversity"]) == (1.0, 0.0, 1.0)
    assert first["told"] == first["told_async"] == 1.0 * 100 + 3
    assert second["told"] == 0.0 * 100 + 3
    assert (first["local"], second["local"]) == (4.0, 3.0)
    assert {r.verdict for r in rewards(g)} == {"passed", "wrong_answer"}


@pytest.mark.slow
def test_diversity_never_decides_what_is_solved() -> None:
    def right(completion: str, task: Task) -> float:
        return float(completion == "yes")

    with Environment(["diversity", right], weights=[5.0, 1.0]) as environment:
        assert environment.solved_rule.parts[0] == "right"


@pytest.mark.parametrize(
    "reward", [lambda group: [], lambda group, task, more: [], lambda group, answer: []]
)
def test_a_function_of_groups_takes_a_group_and_a_task(reward: Any) -> None:
    with pytest.raises(UserError, match="group"):
        check_callable(reward)
    check_callable(diversity)
    check_callable(win_rate(longer))


def test_the_vote_of_the_page_pays_agreement(tmp_path: Path) -> None:
    """Self-consistency in docs/rewards.md: three of four say 12, and no answer is no vote."""
    page = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text(encoding="utf-8")
    (code,) = (c for c in re.findall(r"```python\n(.*?)```", page, re.S) if "majority" in c)
    (tmp_path / "rewards.py").write_text(code)
    group = text_group(TASK, ["=11#12", "12", "so 12.", "4"])
    silent = text_group(TASK, ["no", "none"])
    with Environment([f"{tmp_path}/rewards.py:majority"]) as environment:
        environment.score([group, silent])
    assert [r.value for r in rewards(group)] == [0.75, 0.75, 0.75, 0.0]
    assert [r.value for r in rewards(silent)] == [0.0, 0.0]
