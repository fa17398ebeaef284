"""Cache, budget, retries and time limits of the judge's client."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.fake_judge import FakeJudge, prose

from sixfold import http_client
from sixfold.checks.environment import Environment
from sixfold.environment.grade import Grade
from sixfold.environment.rewards import reward_loop
from sixfold.errors import BudgetSpent, UserError
from sixfold.types import Group, Task, Trajectory
from sixfold_environments.judge import client
from sixfold_environments.judge.counts import judge_metrics
from sixfold_environments.judge.family import family_of, same_family
from sixfold_environments.judge.judge import Judge
from sixfold_environments.judge.reference import reference_reward
from sixfold_environments.judge.settings import ReferenceSettings

TASK = Task("capital", "What is the capital of Australia?", "Canberra")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeJudge]:
    monkeypatch.setattr(http_client, "FIRST_WAIT_S", 0.01)
    with FakeJudge() as started:
        yield started


def graded(judge: Judge, *texts: str) -> list[Grade]:
    reward = reference_reward(judge)

    async def all_of_them() -> list[Grade]:
        return list(await asyncio.gather(*(reward(text, TASK) for text in texts)))

    return asyncio.run(all_of_them())


@pytest.mark.parametrize("statuses", [[429], [500, 503], [0], [502, 0, 529]])
def test_a_request_is_sent_again_after_a_failure(fake: FakeJudge, statuses: list[int]) -> None:
    fake.statuses = list(statuses)
    judge = Judge(fake.settings())
    assert graded(judge, "Canberra")[0].value == 1.0
    metrics = judge_metrics([judge.take()])
    assert metrics["judge/retries"] == len(statuses)
    assert metrics["judge/calls"] == 1


def test_an_endpoint_that_always_fails_gives_an_infrastructure_error(fake: FakeJudge) -> None:
    fake.statuses = [500] * 9
    found = graded(Judge(fake.settings(retries=2)), "Canberra")[0]
    assert (found.value, found.verdict) == (None, "infrastructure_error")
    assert "3 attempts" in found.detail
    assert len(fake.requests) == 3


def test_the_text_of_an_exception_is_short_in_reasons(
    fake: FakeJudge, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*args: object) -> None:
        raise ValueError("long " * 1000)

    monkeypatch.setattr(client.HttpClient, "request", broken)
    found = graded(Judge(fake.settings(retries=0)), "Canberra")[0]
    assert "no answer from the judge" in found.detail and len(found.detail) < 600
    monkeypatch.setattr(client.json, "loads", lambda text: {"choices": [{"message": _Odd()}]})
    with pytest.raises(client.JudgeFailed) as failed:
        client._said(b"{}")
    assert len(str(failed.value)) < 600


class _Odd:
    def get(self, key: str) -> object:
        raise TypeError("long " * 1000)


def test_retry_after_is_respected_within_the_time_limit(fake: FakeJudge) -> None:
    fake.statuses, fake.retry_after = [429], "0.3"
    began = time.monotonic()
    assert graded(Judge(fake.settings()), "Canberra")[0].value == 1.0
    assert time.monotonic() - began >= 0.3
    fake.statuses, fake.retry_after = [429], "3600"
    began = time.monotonic()
    found = graded(Judge(fake.settings(timeout_s=5.0)), "Canberra!")[0]
    assert found.value is None and "429" in found.detail
    assert time.monotonic() - began < 4


def test_a_slow_endpoint_ends_at_the_time_limit(fake: FakeJudge) -> None:
    fake.delay_s = 3.0
    began = time.monotonic()
    settings = fake.settings(timeout_s=0.5, request_timeout_s=0.2, retries=50)
    assert graded(Judge(settings), "Canberra")[0].value is None
    assert time.monotonic() - began < 2.5


def test_a_rejected_key_is_an_error_at_once_that_does_not_contain_the_key(
    fake: FakeJudge, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", "sk-secret-123")
    fake.statuses = [401]
    judge = Judge(fake.settings(key_variable="MY_KEY"))
    with pytest.raises(UserError, match="MY_KEY") as error:
        graded(judge, "Canberra")
    assert fake.requests[0].headers["authorization"] == "Bearer sk-secret-123"
    assert len(fake.requests) == 1
    assert "secret" not in str(error.value)


def test_a_firewall_that_refuses_one_text_does_not_end_the_run(fake: FakeJudge) -> None:
    judge = Judge(fake.settings())
    graded(judge, "Canberra")
    fake.statuses = [403]
    assert graded(judge, "Sydney; DROP TABLE")[0].verdict == "infrastructure_error"


def test_an_endpoint_without_json_schemas_gets_requests_without_them(fake: FakeJudge) -> None:
    fake.refuses = ("json_schema", "json_object")
    judge = Judge(fake.settings())
    assert graded(judge, "Canberra")[0].value == 1.0
    assert graded(judge, "Sydney")[0].value == 0.0
    forms = [r.body.get("response_format", {}).get("type", "none") for r in fake.requests]
    assert forms == ["json_schema", "json_object", "none", "none"]


def test_parameters_are_adapted_to_the_endpoint(fake: FakeJudge) -> None:
    fake.refuses, fake.refusal = ('"max_tokens"',), "use max_completion_tokens instead"
    judge = Judge(fake.settings())
    assert graded(judge, "Canberra")[0].value == 1.0
    assert fake.requests[-1].body["max_completion_tokens"] == 512
    fake.refuses, fake.refusal = ('"temperature"',), "temperature is not supported"
    assert graded(judge, "Canberra!")[0].value == 1.0
    assert "temperature" not in fake.requests[-1].body
    assert "response_format" in fake.requests[-1].body


def test_an_explicit_setting_of_structured_is_not_changed(fake: FakeJudge) -> None:
    fake.refuses = ("json_schema",)
    found = graded(Judge(fake.settings(structured="schema")), "Canberra")[0]
    assert found.value is None and "400" in found.detail


def test_equal_questions_are_asked_once(fake: FakeJudge) -> None:
    judge = Judge(fake.settings())
    assert [g.value for g in graded(judge, *["Canberra"] * 5)] == [1.0] * 5
    assert [g.value for g in graded(judge, "Canberra")] == [1.0]
    assert len(fake.requests) == 1
    assert judge_metrics([judge.take()])["judge/cached_frac"] == pytest.approx(5 / 6)


def test_a_failed_question_counts_for_everyone_who_asked_it(fake: FakeJudge) -> None:
    fake.behaviour = prose
    judge = Judge(fake.settings())
    found = graded(judge, "Canberra", "Canberra")
    assert [grade.verdict for grade in found] == ["infrastructure_error"] * 2
    metrics = judge_metrics([judge.take()])
    assert (metrics["judge/failed_frac"], metrics["judge/cached_frac"]) == (1.0, 0.0)


async def arrived(fake: FakeJudge, count: int) -> None:
    """Wait until `count` requests have arrived at the endpoint."""
    while fake.most < count:
        await asyncio.sleep(0.01)


def test_a_cancelled_question_does_not_cancel_an_equal_one(fake: FakeJudge) -> None:
    fake.held = True
    reward = reference_reward(Judge(fake.settings()))

    async def both() -> Grade:
        first = asyncio.ensure_future(reward("Canberra", TASK))
        second = asyncio.ensure_future(reward("Canberra", TASK))
        await arrived(fake, 1)
        first.cancel()
        fake.held = False
        return await second

    assert asyncio.run(both()).value == 1.0
    assert len(fake.requests) == 1


def test_the_answers_to_sent_requests_are_stored_when_a_run_stops(
    fake: FakeJudge, tmp_path: Path
) -> None:
    """They cost money in any case. A question that was not sent is dropped."""
    fake.held = True
    judge = Judge(fake.settings(concurrency=2))
    judge.keep_in(tmp_path)
    reward = reference_reward(judge)

    async def stopped() -> None:
        asked = [asyncio.ensure_future(reward(f"city {i}", TASK)) for i in range(6)]
        await arrived(fake, 2)
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        fake.held = False

    asyncio.run_coroutine_threadsafe(stopped(), reward_loop()).result()
    judge.close()
    assert len(fake.requests) == 2
    assert judge.spending.spent.calls == 2
    assert len((tmp_path / "answers.jsonl").read_text().splitlines()) == 2


def test_a_resumed_run_asks_no_question_twice_and_continues_its_cost(
    fake: FakeJudge, tmp_path: Path
) -> None:
    prices = {"input_price": 10.0, "output_price": 100.0}
    before = Judge(fake.settings(**prices))
    graded(before, "Canberra")  # in memory: the trial of the rewards comes before the folder
    before.keep_in(tmp_path / "judge")
    graded(before, "Sydney")
    before.close()
    file = tmp_path / "judge" / "answers.jsonl"
    with file.open("a") as opened:
        opened.write('{"key": "cut by a cra')
    asked = len(fake.requests)
    after = Judge(fake.settings(**prices))
    after.keep_in(tmp_path / "judge")
    assert [g.value for g in graded(after, "Canberra", "Sydney")] == [1.0, 0.0]
    assert len(fake.requests) == asked == 2
    # 100 tokens at 10 and 10 tokens at 100 dollars per million, twice.
    assert after.spending.spent.usd == pytest.approx(2 * 0.002)
    graded(after, "Perth")
    after.close()
    replay = Judge(fake.settings())
    replay.read(tmp_path / "judge")
    written = file.read_bytes()
    graded(replay, "Perth", "Sydney", "Adelaide")
    assert len(fake.requests) == 4
    assert file.read_bytes() == written
    last = json.loads(file.read_text().splitlines()[-1])
    assert last["answer"]["verdict"] == "wrong"


def test_another_model_or_prompt_is_another_question(fake: FakeJudge, tmp_path: Path) -> None:
    own = tmp_path / "own.txt"
    own.write_text("Right? {answer} {reference}")
    template = {"reference": ReferenceSettings(str(own))}
    same = {"max_tokens": 99}  # a reply that can be read is whole
    for more in ({}, {"temperature": 0.5}, template, {"model": "other"}, same):
        judge = Judge(replace(fake.settings(), **more))
        judge.keep_in(tmp_path / "judge")
        graded(judge, "Canberra")
        judge.close()
    assert len(fake.requests) == 4


@pytest.mark.parametrize(
    ("limits", "answered"),
    [
        ({"budget_calls": 2}, 2),
        # A request reserves about 0.0011 dollars and costs 0.0002: the fourth one does not fit.
        ({"budget_usd": 0.0015, "input_price": 1.0, "output_price": 10.0, "max_tokens": 64}, 3),
    ],
)
def test_the_judge_stops_the_run_at_its_budget(
    fake: FakeJudge, limits: dict[str, Any], answered: int
) -> None:
    judge = Judge(fake.settings(**limits))
    reward = reference_reward(judge)
    with pytest.raises(BudgetSpent, match=r"environment\.judge\.budget_.*Resume") as error:
        for i in range(50):
            asyncio.run(reward(f"city {i}", TASK))
    assert len(fake.requests) == judge.spending.spent.calls == answered
    assert next(iter(limits)) in str(error.value)


def test_questions_that_wait_for_a_slot_do_not_use_up_the_budget(fake: FakeJudge) -> None:
    """Ten requests cost 0.002 dollars. All of their reservations together would be 0.011."""
    prices = {"input_price": 1.0, "output_price": 10.0, "max_tokens": 64}
    judge = Judge(fake.settings(budget_usd=0.004, concurrency=1, **prices))
    found = graded(judge, *(f"city {i}" for i in range(10)))
    assert [grade.value for grade in found] == [0.0] * 10
    assert judge.spending.spent.usd == pytest.approx(0.002)


def test_unreadable_replies_count_for_the_cost(fake: FakeJudge, tmp_path: Path) -> None:
    fake.behaviour, fake.usage = prose, False
    judge = Judge(fake.settings())
    judge.keep_in(tmp_path)
    graded(judge, "Canberra")
    judge.close()
    assert judge.spending.spent.calls == 2
    # The endpoint counts no tokens: they are estimated from characters.
    assert 200 < judge.spending.spent.prompt_tokens < 1200
    again = Judge(fake.settings())
    again.keep_in(tmp_path)
    assert again.spending.spent == judge.spending.spent
    again.close()


def test_concurrent_requests_are_limited(fake: FakeJudge) -> None:
    fake.delay_s = 0.05
    graded(Judge(fake.settings(concurrency=3)), *(f"city {i}" for i in range(12)))
    assert len(fake.requests) == 12
    assert fake.most == 3


def group(*texts: str) -> Group:
    made = [
        Trajectory.one_turn(TASK.id, i, [0], [0], [0.0], [-1], "stop", text=text)
        for i, text in enumerate(texts)
    ]
    return Group(TASK, made)


def test_in_an_environment_a_judge_is_asked_concurrently_and_beyond_its_time_limit(
    fake: FakeJudge,
) -> None:
    fake.delay_s = 0.4
    judge = Judge(fake.settings())
    with Environment(["judge_reference", "judge_pairwise"], timeout_s=0.1, judge=judge) as scored:
        judged = group("Canberra", "Sydney", "", "Perth")
        began = time.monotonic()
        scored.score([judged])
        assert time.monotonic() - began < 4
    rewards = [t.reward for t in judged.trajectories]
    assert [r.parts["judge_reference"] for r in rewards] == [1.0, 0.0, 0.0, 0.0]
    assert [r.parts["judge_pairwise"] for r in rewards] == pytest.approx([1, 0.5, 0, 0.5])
    assert [r.solved for r in rewards] == [True, False, False, False]
    assert fake.most > 3


def test_a_failed_question_is_not_repeated_by_the_environment(fake: FakeJudge) -> None:
    fake.behaviour = prose
    with Environment(["judge_reference"], error_budget=1.0, judge=Judge(fake.settings())) as scored:
        judged = group("Canberra")
        scored.score([judged])
    reward = judged.trajectories[0].reward
    assert reward.value is None and reward.verdict == "infrastructure_error"
    assert len(fake.requests) == 2  # the judge repeats its questions itself


def test_a_spent_budget_ends_the_scoring(fake: FakeJudge) -> None:
    judge = Judge(fake.settings(budget_calls=1))
    scored = Environment(["judge_reference"], error_budget=1.0, judge=judge)
    with scored, pytest.raises(BudgetSpent):
        scored.score([group("Canberra", "Sydney")])


@pytest.mark.parametrize(
    ("model", "family"),
    [
        ("Qwen/Qwen3-0.6B", "qwen"),
        ("meta-llama/Llama-3.2-1B", "llama"),
        ("gpt-4o-mini", "gpt"),
        ("openai/gpt-oss-20b", "gpt"),
        ("claude-sonnet-4-5", "claude"),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", "qwen"),
        ("my-judge", ""),
    ],
)
def test_the_family_of_a_model_is_in_its_name(model: str, family: str) -> None:
    assert family_of(model) == family


def test_a_judge_of_the_policys_family_causes_a_warning(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    assert family_of(str(tmp_path)) == "qwen"
    assert "'qwen'" in same_family("qwen", "Qwen")
    assert same_family("", "") == same_family("gpt", "qwen") == ""
