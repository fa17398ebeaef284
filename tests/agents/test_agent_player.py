"""Agents that are functions: their trajectories equal those of the player bit for bit. A failure
ends only one episode, with its outcome and its message.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI
from tests.agents.playing import (
    Agent,
    client,
    end_of,
    generator,
    renderer,
    talk,
    whole_replies,
    with_agent,
    with_player,
)
from tests.rollout.episodes import End, Observation, Recording, Scripted, scripted, user

from sixfold.checks.budget import RewardBudgetExceeded
from sixfold.checks.environment import Environment
from sixfold.errors import UserError
from sixfold.rollout.generator import GeneratorClosed, Sampled, SampleKey
from sixfold.rollout.player import Limits
from sixfold.types import SamplingParams, Task, Trajectory
from sixfold_serving.agents.function import FunctionCalls

CHAT = ("qwen2.5-instruct", "llama-3.2", "gemma-3")
TASKS = [Task("a", "1+1=?", answer=2), Task("b", "2+2=?", answer=4)]


def content(trajectory: Trajectory) -> dict[str, Any]:
    """Fields of a trajectory that must be equal: all except times, names, rewards and events."""
    record = trajectory.to_record()
    record["turns"] = [{**turn, "seconds": 0.0, "events": 0} for turn in record["turns"]]
    untimed = ("started", "ended", "environment", "reward", "graded", "events")
    return {key: value for key, value in record.items() if key not in untimed}


def only(groups: Sequence[Any]) -> Trajectory:
    ((trajectory,),) = [group.trajectories for group in groups]
    return trajectory


# Parity with the player.


@pytest.mark.parametrize("name", CHAT)
@pytest.mark.parametrize("stream", [False, True])
def test_an_agents_trajectories_equal_those_of_the_player(name: str, stream: bool) -> None:
    """Tokens, mask, log-probs, versions, turns and text are equal, so the prompts and the noise
    were equal, too.
    """
    of = renderer(name)
    if stream and name != CHAT[0]:
        pytest.skip("one family is enough")
    agent = streamed("ab?", "x") if stream else talk("ab?", "x")
    observations = [Observation(messages=(user(text),)) for text in ("ab?", "x")]
    expected = with_player(scripted(*observations, End(0.0)), TASKS, of, samples=3)
    made = generator(of)
    found = with_agent(agent, TASKS, of, samples=3, made=made)
    assert [[content(t) for t in g.trajectories] for g in found] == [
        [content(t) for t in g.trajectories] for g in expected
    ]
    for trajectory in (t for group in found for t in group.trajectories):
        said = [s for s in made.sampled if (s[1].name, s[1].sample) == key(trajectory)]
        for (before, _, sampled), turn in zip(said, trajectory.turns, strict=True):
            assert trajectory.tokens[: turn.start] == before
            assert trajectory.tokens[turn.start : turn.stop] == sampled.tokens
            assert trajectory.logp[turn.start : turn.stop] == sampled.logp
        assert sum(trajectory.mask) == sum(len(s[2].tokens) for s in said)


def key(trajectory: Trajectory) -> tuple[str, int]:
    return trajectory.task_id, trajectory.sample


def streamed(*more: str) -> Agent:
    """Like `talk`, but with streams."""

    def agent(task: Task, base_url: str) -> None:
        with client(base_url) as api:
            messages: list[Any] = [user(str(task.prompt))]
            for text in (*more, ""):
                stream = api.chat.completions.create(model="m", messages=messages, stream=True)
                parts = [c.choices[0].delta.content or "" for c in stream if c.choices]
                messages += [{"role": "assistant", "content": "".join(parts)}, user(text)]

    return agent


def test_plain_text_continues_the_sampled_tokens() -> None:
    """A completion that ended with a stop string is continued there, as in the player."""
    of = renderer()
    ids = of.plain("c(1)")

    def script(tokens: Sequence[int], given: SamplingParams, key: SampleKey) -> list[int]:
        return [*of.plain("9"), end_of(of)] if of.shown(tokens).endswith("#") else ids

    class Calls(Scripted):
        async def start(self) -> Observation:
            return replace(await super().start(), stops=(")",))

    def agent(task: Task, base_url: str) -> None:
        with client(base_url) as api:
            ask = lambda text: api.completions.create(model="m", prompt=text, stop=[")"])  # noqa: E731
            said = str(task.prompt)
            said += ask(said).choices[0].text + ")=1#"
            assert ask(said).choices[0].text == "9"

    expected = with_player(
        lambda task: Calls(task, Observation(text="=1#", stops=(")",)), End(0.0)),
        TASKS[:1],
        of,
        script=script,
    )
    found = with_agent(agent, TASKS[:1], of, script=script)
    assert content(only(found)) == content(only(expected))
    assert only(found).graded == "9"


def test_tool_calls_go_through_the_client_unchanged() -> None:
    """The client sends calls back with arguments as text and a result by id. The sampled tokens
    stay, and the result follows as the template writes it.
    """
    of = renderer("qwen2.5-instruct")
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'

    def script(tokens: Sequence[int], given: SamplingParams, key: SampleKey) -> list[int]:
        done = "tool_response" in of.shown(tokens[key.origin or 0 :])
        return [*of.plain("2" if done else call), end_of(of)]

    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}

    def agent(task: Task, base_url: str) -> float:
        with client(base_url) as api:
            messages: list[Any] = [user(str(task.prompt))]
            ask: Any = dict(model="m", tools=[tool])
            reply = api.chat.completions.create(messages=messages, **ask).choices[0]
            (made,) = reply.message.tool_calls or ()
            assert reply.finish_reason == "tool_calls"
            assert json.loads(made.function.arguments) == {"a": 1}
            result = {"role": "tool", "tool_call_id": made.id, "content": "2"}
            messages += [reply.message.model_dump(exclude_none=True), result]
            last = api.chat.completions.create(messages=messages, **ask).choices[0]
            return float(last.message.content == "2")

    made = generator(of, script)
    trajectory = only(with_agent(agent, TASKS[:1], of, made=made, tokens=60))
    assert trajectory.reward is not None and trajectory.reward.value == 1.0
    assert len(trajectory.turns) == 2
    first = trajectory.turns[0]
    assert of.shown(trajectory.tokens[first.start : first.stop - 1]) == call
    assert made.sampled[1][0][: first.stop] == trajectory.tokens[: first.stop]
    events = [(e["kind"], e.get("tool"), e.get("result")) for e in trajectory.events]
    assert events == [("tool_call", "add", "2"), ("posted_reward", None, None)]
    assert [turn.events for turn in trajectory.turns] == [1, 1]


def test_a_forced_call_has_no_effect_but_is_read() -> None:
    """Frameworks force calls. In training nothing is forced, but a call that the policy writes in
    the format of its template is recognised.
    """
    of = renderer("llama-3.2")
    call = '{"name": "add", "parameters": {"a": 1}}'
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    found: list[Any] = []

    def agent(task: Task, base_url: str) -> float:
        with client(base_url) as api:
            messages: list[Any] = [user(str(task.prompt))]
            ask: Any = dict(model="m", tools=[tool], tool_choice="required")
            reply = api.chat.completions.create(messages=messages, **ask).choices[0].message
            found.extend(made.function.name for made in reply.tool_calls or ())
        return 1.0

    only(
        with_agent(agent, TASKS[:1], of, script=lambda *_: [*of.plain(call), end_of(of)], tokens=90)
    )
    assert found == ["add"]


def test_the_responses_api_continues_a_session_too() -> None:
    of = renderer("qwen2.5-instruct")

    def agent(task: Task, base_url: str) -> None:
        with client(base_url) as api:
            items: list[Any] = [user(str(task.prompt))]
            answer = api.responses.create(model="m", input=items)
            items += [item.model_dump(exclude_none=True) for item in answer.output]
            api.responses.create(model="m", input=[*items, user("x")])

    make = scripted(Observation(messages=(user("x"),)), End(0.0))
    expected = with_player(make, TASKS, of, samples=2)
    found = with_agent(agent, TASKS, of, samples=2)
    assert [[content(t) for t in g.trajectories] for g in found] == [
        [content(t) for t in g.trajectories] for g in expected
    ]


# Several conversations.


def test_other_conversations_of_a_session_are_trajectories_of_their_own() -> None:
    """They have the session's reward and different noise. An evaluation keeps only the main one."""
    of = renderer("qwen2.5-instruct")

    def agent(task: Task, base_url: str) -> float:
        talk()(Task("", "sub agent"), base_url)
        talk("x")(task, base_url)
        talk()(Task("", "sub agent"), base_url)
        return 0.5

    (group,) = with_agent(agent, TASKS[:1], of, samples=2)
    assert [t.sample for t in group.trajectories] == [0, 1, 2, 4, 3, 5]
    assert [len(t.turns) for t in group.trajectories] == [2, 2, 1, 1, 1, 1]
    assert [t.total_reward for t in group.trajectories] == [0.5] * 6
    sampled = {tuple(t.tokens[t.prompt_length :]) for t in group.trajectories}
    assert len(sampled) == 6  # equal prompts get different noise
    (alone,) = with_agent(agent, TASKS[:1], of, samples=2, whole=False)
    assert [content(t) for t in alone.trajectories] == [content(t) for t in group.trajectories[:2]]


def test_a_branch_continues_the_sampled_tokens() -> None:
    """Two requests continue the same reply. Both prompts have its sampled tokens."""
    of = renderer("qwen2.5-instruct")

    def agent(task: Task, base_url: str) -> float:
        with client(base_url) as api:
            ask = lambda m: api.chat.completions.create(model="m", messages=m)  # noqa: E731
            first: list[Any] = [user(str(task.prompt))]
            said = ask(first).choices[0].message.model_dump(exclude_none=True)
            for text in ("x", "y"):
                ask([*first, said, user(text)])
        return 1.0

    (group,) = with_agent(agent, TASKS[:1], of)
    main, branch = group.trajectories
    reply = main.turns[0].stop
    assert branch.tokens[:reply] == main.tokens[:reply] and branch.prompt_length > reply
    assert (len(main.turns), len(branch.turns)) == (2, 1)


def test_concurrent_requests_give_the_same_run_twice() -> None:
    """The order in which requests arrive does not matter."""
    of = renderer("qwen2.5-instruct")

    def agent_of(delays: Sequence[float]) -> Agent:
        async def agent(task: Task, base_url: str) -> float:
            async with AsyncOpenAI(base_url=base_url, api_key="x", max_retries=0) as api:

                async def ask(text: str, delay: float) -> None:
                    await asyncio.sleep(delay)
                    messages: list[Any] = [user(text)]
                    await api.chat.completions.create(model="m", messages=messages)

                texts = ("a", str(task.prompt), "b")
                await asyncio.gather(*map(ask, texts, delays))
            return 1.0

        return agent

    runs = [
        [content(t) for t in with_agent(agent_of(d), TASKS[:1], of)[0].trajectories]
        for d in ((0.0, 0.1, 0.2), (0.2, 0.1, 0.0))
    ]
    assert runs[0] == runs[1] and len(runs[0]) == 3
    assert "1+1=?" in of.shown(runs[0][0]["tokens"])


def test_a_changed_history_begins_a_new_conversation() -> None:
    of = renderer("qwen2.5-instruct")

    def agent(task: Task, base_url: str) -> float:
        talk()(task, base_url)
        with client(base_url) as api:
            other: list[Any] = [user(str(task.prompt)), user("z")]
            other[1:1] = [{"role": "assistant", "content": "never said"}]
            api.chat.completions.create(model="m", messages=other)
        return 1.0

    (group,) = with_agent(agent, TASKS[:1], of)
    assert ["never said" in of.shown(t.tokens) for t in group.trajectories] == [False, True]


# Sampling settings.


def test_the_recipe_decides_how_the_policy_is_sampled(caplog: pytest.LogCaptureFixture) -> None:
    """Each setting without effect causes one warning. `max_tokens` is respected."""
    of = renderer("qwen2.5-instruct")
    odd: Any = dict(temperature=0.1, top_p=0.5, seed=3, max_tokens=4)
    made = generator(of)
    plain = with_agent(talk("x", max_tokens=4), TASKS, of)
    with caplog.at_level("WARNING"):
        found = with_agent(talk("x", **odd), TASKS, of, made=made)
    assert [content(only([g])) for g in found] == [content(only([g])) for g in plain]
    assert {call[1].temperature for call in made.calls} == {1.0}
    assert {call[1].max_tokens for call in made.calls} == {4}
    told = [r.getMessage() for r in caplog.records if r.name == "sixfold_serving.agents"]
    assert [sum(name in line for line in told) for name in ("temperature", "top_p", "seed")] == [
        1
    ] * 3


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 2}, "n"),
        ({"logprobs": True, "top_logprobs": 3}, "top_logprobs"),
        ({"stop": [""]}, "stop[0]"),
        ({"extra_body": {"stop_token_ids": [10**6]}}, "stop_token_ids"),
    ],
)
def test_unsupported_settings_are_refused(fields: dict[str, Any], param: str) -> None:
    found: list[Any] = []

    def agent(task: Task, base_url: str) -> None:
        with pytest.raises(openai.BadRequestError) as refused:
            talk(**fields)(task, base_url)
        found.append(refused.value.param)
        talk()(task, base_url)

    only(with_agent(agent, TASKS[:1], renderer("qwen2.5-instruct")))
    assert found[0].startswith(param.partition("[")[0])


# Rewards.


def posted(base_url: str, **body: Any) -> httpx.Response:
    text = json.dumps(body)
    headers = {"content-type": "application/json"}
    return httpx.post(base_url.removesuffix("/v1") + "/reward", content=text, headers=headers)


def test_a_posted_reward_scores_the_session_once() -> None:
    codes: list[int] = []

    def agent(task: Task, base_url: str) -> None:
        talk()(task, base_url)
        bad: list[Any] = [float("nan"), float("inf"), 1e300, "1", True, None]
        codes.extend(posted(base_url, reward=value).status_code for value in bad)
        codes.append(posted(base_url, reward=0.0, parts={"form": float("nan")}).status_code)
        codes.append(posted(base_url, reward=0.75, parts={"form": 0.5}).status_code)
        codes.append(posted(base_url, reward=1.0).status_code)
        last.append(base_url)

    last: list[str] = []
    trajectory = only(with_agent(agent, TASKS[:1], renderer("qwen2.5-instruct")))
    assert codes == [400] * 7 + [200, 409]
    assert trajectory.reward is not None
    assert (trajectory.reward.value, trajectory.reward.parts) == (0.75, {"form": 0.5})


def test_a_session_refuses_requests_after_its_end() -> None:
    """A thread that the first agent leaves behind sends them. The second agent waits for it."""
    codes: list[int] = []
    done = threading.Event()

    def later(task: Task, base_url: str) -> None:
        while httpx.get(f"{base_url}/models").status_code == 200:
            time.sleep(0.01)
        codes.append(posted(base_url, reward=1.0).status_code)
        with pytest.raises(openai.APIStatusError) as refused:
            talk()(task, base_url)
        codes.append(refused.value.status_code)
        done.set()

    def agent(task: Task, base_url: str) -> float:
        talk()(task, base_url)
        if task.id == "a":
            threading.Thread(target=later, args=(task, base_url), daemon=True).start()
            return 0.25
        assert done.wait(15)
        return 0.0

    found = with_agent(agent, TASKS, renderer("qwen2.5-instruct"))
    assert codes == [410, 410]
    assert [g.trajectories[0].total_reward for g in found] == [0.25, 0.0]
    assert len(found[0].trajectories) == 1


def test_reward_functions_score_the_last_reply_or_the_returned_text() -> None:
    seen: list[str] = []

    def judge(completion: str, task: Task) -> float:
        seen.append(completion)
        return 1.0

    of = renderer("qwen2.5-instruct")
    with Environment([judge]) as environment:
        trajectory = only(with_agent(talk("x"), TASKS[:1], of, environment=environment))
        last = trajectory.turns[1]
        assert seen == [of.decode(trajectory.tokens[last.start : last.stop])]
        text = lambda task, base_url: talk("x")(task, base_url) or "42"  # noqa: E731
        trajectory = only(with_agent(text, TASKS[:1], of, environment=environment))
        assert seen[1:] == ["42"] and trajectory.total_reward == 1.0
        assert Trajectory.from_record(trajectory.to_record()) == trajectory


# Failures.


def raises(task: Task, base_url: str) -> None:
    talk()(task, base_url)
    raise ValueError("no such page")


def silent(task: Task, base_url: str) -> None:
    pass


def leaves(task: Task, base_url: str) -> None:
    """Its client disconnects in the middle of the second reply."""
    talk()(task, base_url)
    messages: list[Any] = [user("slow")]
    with pytest.raises(openai.APITimeoutError), client(base_url) as api:
        api.chat.completions.create(model="m", messages=messages, timeout=0.3)


def leaves_stream(task: Task, base_url: str) -> None:
    talk()(task, base_url)
    messages: list[Any] = [user("slow")]
    with client(base_url) as api:
        stream = api.chat.completions.create(model="m", messages=messages, stream=True)
        next(iter(stream))
        stream.close()
    time.sleep(0.3)


async def is_cancelled(task: Task, base_url: str) -> None:
    await asyncio.to_thread(talk(), task, base_url)
    raise asyncio.CancelledError


def stops_iteration(task: Task, base_url: str) -> None:
    talk()(task, base_url)
    next(iter(()))


def returns(value: Any) -> Agent:
    return lambda task, base_url: talk()(task, base_url) or value


class Slow(Recording):
    """Never replies to a prompt with the word "slow"."""

    async def generate(self, tokens: Any, params: Any, key: Any, **options: Any) -> Sampled:
        if "slow" in renderer("qwen2.5-instruct").shown(tokens):
            self.running += 1
            try:
                await asyncio.sleep(60)
            finally:
                self.running -= 1
        return await super().generate(tokens, params, key, **options)


@pytest.mark.parametrize(
    ("agent", "outcome", "said", "turns"),
    [
        (raises, "error", "no such page", 1),
        (silent, "error", "without a reply", 0),
        (leaves, "aborted", "disconnected", 1),
        (leaves_stream, "aborted", "disconnected", 1),
        (is_cancelled, "error", "CancelledError", 1),
        (stops_iteration, "error", "StopIteration", 1),
        (returns(float("nan")), "error", "nan", 1),
        (returns(["1"]), "error", "list", 1),
        (lambda task, url: talk()(task, url) or time.sleep(9), "timeout", "timeout_s", 1),
    ],
)
def test_a_failure_ends_one_episode_with_its_outcome(
    agent: Agent, outcome: str, said: str, turns: int
) -> None:
    """The tokens that were sampled before are kept without a reward. Other episodes continue."""
    of = renderer("qwen2.5-instruct")

    def one_fails(task: Task, base_url: str) -> Any:
        return agent(task, base_url) if task.id == "a" else talk()(task, base_url) or 1.0

    made = Slow(of, whole_replies(of), vocabulary=20)
    limit = 2.0 if outcome == "timeout" else 20.0
    with Environment([lambda completion, task: 1.0], error_budget=0.9) as environment:
        found = with_agent(
            one_fails, TASKS, of, made=made, environment=environment, timeout_s=limit
        )
    (failed,), (other,) = (group.trajectories for group in found)
    assert failed.outcome == outcome and len(failed.turns) == turns
    assert failed.reward is not None and failed.reward.value is None
    assert said in (failed.reward.error or "") and (failed.reward.error or "").startswith("agent:")
    assert other.total_reward == 1.0 and made.running == 0


@pytest.mark.parametrize(
    ("limits", "outcome"), [(Limits(1000, 2), "turns"), (Limits(120, 8), "context")]
)
def test_a_limit_ends_the_episode_with_reward_0(limits: Limits, outcome: str) -> None:
    found: list[str | None] = []

    def agent(task: Task, base_url: str) -> None:
        try:
            talk(*("abc" * 4 for _ in range(6)))(task, base_url)
        except openai.BadRequestError as error:
            found.append(error.code)
            raise

    trajectory = only(with_agent(agent, TASKS[:1], renderer("qwen2.5-instruct"), limits=limits))
    assert found == [{"turns": "max_turns", "context": "context_length_exceeded"}[outcome]]
    assert trajectory.outcome == outcome and trajectory.total_reward == 0.0
    assert len(trajectory.turns) > 0 and len(trajectory.tokens) <= limits.tokens


def test_a_function_that_fails_on_a_cut_reply_has_reward_0() -> None:
    """Only the latest reply counts: a failure after a whole reply is one of the agent."""
    of = renderer("qwen2.5-instruct")
    with Environment([lambda completion, task: 1.0], error_budget=1.0) as environment:
        cut, whole = (
            only(
                with_agent(
                    raises,
                    TASKS[:1],
                    of,
                    script=whole_replies(of),
                    environment=environment,
                    tokens=tokens,
                )
            )
            for tokens in (2, 6)
        )
    assert cut.outcome == "length" and cut.total_reward == 0.0
    assert whole.outcome == "error" and whole.reward is not None and whole.reward.value is None


def test_a_posted_reward_stands_at_a_limit() -> None:
    def agent(task: Task, base_url: str) -> None:
        httpx.post(base_url.removesuffix("/v1") + "/reward", json={"reward": 0.5})
        talk("a", "b", "c")(task, base_url)

    of = renderer("qwen2.5-instruct")
    trajectory = only(with_agent(agent, TASKS[:1], of, limits=Limits(1000, 2)))
    assert trajectory.outcome == "turns" and trajectory.total_reward == 0.5


def test_a_first_request_that_does_not_fit_is_a_failure() -> None:
    of, limits = renderer("qwen2.5-instruct"), Limits(20, 8)
    with Environment([lambda completion, task: 1.0], error_budget=1.0) as environment:
        groups = with_agent(talk(), TASKS[:1], of, limits=limits, environment=environment)
    failed = only(groups)
    assert failed.outcome == "context" and not failed.turns
    assert failed.reward is not None and "rollout.max_episode_tokens" in str(failed.reward.error)


def test_too_many_failures_stop_the_run() -> None:
    with (
        Environment([lambda completion, task: 1.0]) as environment,
        pytest.raises(RewardBudgetExceeded, match="no such page"),
    ):
        with_agent(raises, TASKS, renderer("qwen2.5-instruct"), environment=environment)


def test_a_failed_engine_ends_the_run_and_not_only_the_episode() -> None:
    of = renderer("qwen2.5-instruct")

    class Broken(Recording):
        async def generate(self, *args: Any, **options: Any) -> Sampled:
            raise GeneratorClosed("the engine is gone")

    with pytest.raises(GeneratorClosed, match="the engine is gone"):
        with_agent(talk(), TASKS, of, made=Broken(of))


def test_concurrent_agents_are_limited() -> None:
    running = [0, 0]
    lock = threading.Lock()

    def agent(task: Task, base_url: str) -> float:
        with lock:
            running[0] += 1
            running[1] = max(running)
        talk()(task, base_url)
        time.sleep(0.05)
        with lock:
            running[0] -= 1
        return 1.0

    with_agent(agent, TASKS, renderer("qwen2.5-instruct"), samples=4, concurrency=3)
    assert running == [0, 3]


@pytest.mark.parametrize("path", ["/sessions/nobody/v1/models", "/v1/models", "/sessions/x/reward"])
def test_a_session_cannot_be_guessed(path: str) -> None:
    statuses: list[int] = []

    def agent(task: Task, base_url: str) -> float:
        talk()(task, base_url)
        host = base_url.partition("/sessions")[0]
        headers = {"content-type": "application/json"}
        call = httpx.post if path.endswith("reward") else httpx.get
        statuses.append(call(host + path, headers=headers).status_code)
        evil = {"host": "evil.example"}
        statuses.append(httpx.get(f"{base_url}/models", headers=evil).status_code)
        statuses.append(httpx.get(f"{base_url}/models/any/name").status_code)
        return 1.0

    only(with_agent(agent, TASKS[:1], renderer("qwen2.5-instruct")))
    assert statuses[0] in (404, 410) and statuses[1:] == [403, 200]


def test_a_function_with_other_arguments_is_refused() -> None:
    with pytest.raises(UserError, match=r"environment\.agent\.command.*task, base_url"):
        FunctionCalls(lambda task: None, "my.py:agent")


def test_a_template_that_removes_thoughts_keeps_the_conversation() -> None:
    """Qwen3's template removes thoughts from earlier replies. The policy reads what it sampled."""
    of = renderer("qwen3")
    written = [*of.plain("<think>\nab\n</think>\n\nc"), end_of(of)]
    agent: Agent = lambda task, url: talk("x")(task, url) or 1.0  # noqa: E731
    (group,) = with_agent(agent, TASKS[:1], of, script=lambda *_: written, tokens=60)
    assert [len(t.turns) for t in group.trajectories] == [2]
    assert of.shown(group.trajectories[0].tokens).count("ab") == 2


def test_a_failed_run_ends_the_agents_of_other_episodes() -> None:
    """Their requests are cancelled in the engine, and the run does not wait for them."""
    of = renderer("qwen2.5-instruct")

    def one_fails(task: Task, base_url: str) -> None:
        if task.id == "a":
            time.sleep(0.5)
            raise ValueError("no such page")
        talk()(Task("", "slow"), base_url)

    base = generator(of)
    made = Slow(of, base._script, vocabulary=20)
    began = time.monotonic()
    with (
        Environment([lambda completion, task: 1.0], error_budget=0.1) as environment,
        pytest.raises(RewardBudgetExceeded),
    ):
        with_agent(one_fails, TASKS, of, made=made, environment=environment, timeout_s=60.0)
    assert made.running == 0 and time.monotonic() - began < 30


def test_a_reply_ends_before_the_end_token_that_its_request_names() -> None:
    """As on a Sixfold server: the token is sampled and trained, and is not part of the text."""
    of = renderer("qwen2.5-instruct")
    script = of.plain("ab7cd")
    (end,) = of.plain("7")
    heard: list[str | None] = []

    def agent(task: Task, base_url: str) -> None:
        with client(base_url) as api:
            reply = api.chat.completions.create(
                model="any",
                messages=[user(str(task.prompt))],
                extra_body={"stop_token_ids": [end]},
            )
        heard.append(reply.choices[0].message.content)

    found = only(with_agent(agent, TASKS[:1], of, script=lambda tokens, params, key: script))
    assert heard == ["ab"] == [found.text]
    assert found.tokens[found.prompt_length :] == of.plain("ab7")
