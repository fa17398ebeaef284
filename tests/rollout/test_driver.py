"""Episodes of several turns: their tokens are those that the engine saw, and a failure stays in its
episode.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.models.families import BY_NAME, make_tokenizer
from tests.rollout.episodes import (
    Action,
    End,
    Observation,
    Recording,
    Scripted,
    letters,
    played,
    scripted,
    user,
)

from sixfold.checks.budget import RewardBudgetExceeded
from sixfold.checks.environment import Environment
from sixfold.engine.engine import Engine
from sixfold.environment.base import Tally
from sixfold.environment.episode import MakeEpisode
from sixfold.environment.grade import Grade
from sixfold.errors import UserError
from sixfold.event_loop import EventLoop
from sixfold.model.causal_lm import CausalLM
from sixfold.model.loading import Policy
from sixfold.model.scratch import character_tokenizer
from sixfold.renderer.renderer import Renderer
from sixfold.rollout.base import groups_in_order
from sixfold.rollout.driver import Driver
from sixfold.rollout.engine_generator import EngineGenerator
from sixfold.rollout.generator import Peers, Sampled, SampleKey
from sixfold.rollout.player import Limits, OneTurn, Player
from sixfold.types import Group, Reward, SamplingParams, Task, Trajectory

CHAT = ("qwen2.5-instruct", "llama-3.2", "gemma-3")
TEXT = "0123456789+=?#abcxyz "


@cache
def renderer(name: str = "") -> Renderer:
    """Renderer with the chat template of a family, or without a template."""
    if not name:
        return Renderer(character_tokenizer(TEXT), (1,))
    tokenizer = make_tokenizer(BY_NAME[name])
    return Renderer(tokenizer, tokenizer.convert_tokens_to_ids(list(BY_NAME[name].ends)))


def task(name: str, chat: bool) -> Task:
    return Task(name, (user("1+1=?"),) if chat else "1+1=")


class Conversation:
    """Random turns, drawn from the task and the replies: text after an unfinished reply, messages
    after any reply, and sometimes a stop string.
    """

    def __init__(self, task: Task, turns: Sequence[int], chat: bool) -> None:
        self.task, self.turns, self.chat = task, list(turns), chat

    def stops(self) -> tuple[str, ...]:
        return ("ab", "c")[: self.turns[0] % 3] if self.turns else ()

    async def start(self) -> Observation:
        if isinstance(self.task.prompt, str):
            return Observation(text=self.task.prompt, stops=self.stops())
        return Observation(messages=self.task.prompt, stops=self.stops())

    async def step(self, action: Action) -> Observation | End:
        if not self.turns:
            return End(reward=float(len(action.text)))
        number = self.turns.pop(0)
        unfinished = action.stopped_by or action.finish_reason == "length"
        if self.chat and (number % 2 or not unfinished):
            new = (user(f"so {number}?"),)
            return Observation(messages=new, reward=0.5 * number, stops=self.stops())
        if not unfinished:
            return End(reward=1.0)
        return Observation(text=f"={number}#", stops=self.stops(), tool_errors=number % 2)


@given(
    name=st.sampled_from(("", *CHAT)),
    turns=st.lists(st.lists(st.integers(0, 9), max_size=4), min_size=1, max_size=3),
    tokens=st.integers(12, 200),
    most=st.integers(1, 4),
)
@settings(max_examples=60, deadline=None)
def test_tokens_are_those_that_the_engine_saw_and_the_mask_is_of_the_sampled_ones(
    name: str, turns: list[list[int]], tokens: int, most: int
) -> None:
    text, chat = renderer(name), bool(name)
    script = letters(text, text.stop_token_ids[0])
    generator = Recording(text, script, context=1 << 20)
    tasks = [task(f"t{i}", chat) for i in range(len(turns))]
    first = len(text.encode(tasks[0]))
    limits = Limits(tokens=first + tokens, turns=most, step_s=5.0)
    make: MakeEpisode = lambda t: Conversation(t, turns[int(t.id[1:])], chat)  # noqa: E731
    params = SamplingParams(max_tokens=6, stop_token_ids=text.stop_token_ids)
    groups, stats = played(generator, text, make, tasks, samples=2, limits=limits, params=params)
    count = 0
    for t in (t for g in groups for t in g.trajectories):
        asked = [
            (before, found)
            for before, key, found in generator.sampled
            if (key.name, key.sample) == (t.task_id, t.sample)
        ]
        assert len(asked) == len(t.turns) <= most and len(t.tokens) <= limits.tokens
        mask = [False] * len(t.tokens)
        for turn, (before, found) in zip(t.turns, asked, strict=True):
            assert t.tokens[: turn.start] == before
            assert t.tokens[turn.start : turn.stop] == found.tokens
            assert t.logp[turn.start : turn.stop] == found.logp
            mask[turn.start : turn.stop] = [True] * len(found.tokens)
        assert t.mask == mask and t.prompt_length == first
        assert [x for x, m in zip(t.logp, mask, strict=True) if not m and x] == []
        assert t.outcome in ("ended", "length", "turns", "context"), t
        assert t.reward is not None and t.reward.value is not None
        count += len(t.turns)
    assert {key.origin for _, key, _ in generator.sampled} == {first}
    assert stats["rollout/turns_mean"] == count / (2 * len(tasks))


def test_a_text_continues_the_turn_and_messages_start_another() -> None:
    """By hand: what the policy sees, what rewards read, and who is credited."""
    text = renderer()
    replies = {0: "ab", 1: "xyz", 2: "c"}

    def script(tokens: Sequence[int], params: SamplingParams, key: Any) -> list[int]:
        said = len(generator.calls) - 1
        return [*text.plain(replies[said]), *([1] if said == 2 else [])]

    generator = Recording(text, script)
    seen: list[Scripted] = []

    def make(task: Task) -> Scripted:
        seen.append(
            Scripted(
                task,
                Observation(text="=12#", reward=0.25, stops=("z",), events=({"kind": "call"},)),
                Observation(text="?", reward=-0.5, tool_errors=2),
                End(reward=2, events=({"kind": "end"},)),
            )
        )
        return seen[-1]

    params = SamplingParams(max_tokens=3, stop_token_ids=(1,))
    ((group,), stats) = played(
        generator, text, make, [Task("t", "1+1=")], params=params, stops=("b",)
    )
    (t,) = group.trajectories
    first = text.encode(Task("t", "1+1="))
    assert text.shown(t.tokens[len(first) : -1]) == "ab=12#xyz?c"
    assert t.provenance == "p" * len(first) + "ss" + "oooo" + "sss" + "o" + "ss"
    assert t.text == "ab=12#xyz?c"
    assert [(a.text, a.finish_reason, a.stopped_by) for a in seen[0].actions] == [
        ("a", "stop", "b"),
        ("xy", "stop", "z"),
        ("c", "stop", ""),
    ]
    assert [(turn.reward, turn.tool_errors) for turn in t.turns] == [(0.25, 0), (-0.5, 2), (0, 0)]
    assert t.total_reward == 2 + 0.25 - 0.5 and t.reward == Reward(2.0)
    assert (t.outcome, t.environment) == ("ended", "tests")
    assert t.events == ({"kind": "call"}, {"kind": "end"}) and t.started <= t.ended
    assert stats["rollout/turns_mean"] == 3
    assert stats["rollout/tool_error_frac"] == pytest.approx(1 / 3)


# Failures of the environment.


class Raises:
    def __init__(self, task: Task) -> None: ...

    async def start(self) -> Observation:
        raise OSError("no tool")

    async def step(self, action: Action) -> End: ...


class Unwritable(Raises):
    """Environment whose first observation has a character that the tokenizer does not know."""

    async def start(self) -> Observation:
        return Observation(text="é")


class Synchronous(Scripted):
    def step(self, action: Action) -> End:  # type: ignore[override]
        return End(1.0)


class Started(Raises):
    """Environment whose `start` returns `given`, or awaits it."""

    def __init__(self, task: Task, given: Any) -> None:
        self.given = given

    async def start(self) -> Any:
        return await self.given() if asyncio.iscoroutinefunction(self.given) else self.given


class SynchronousStart(Scripted):
    def start(self) -> Observation:  # type: ignore[override]
        return Observation(text="x")


class Unmade:
    def __init__(self, task: Task) -> None:
        raise KeyError("unmade")


class ExitsAtOnce(Unmade):
    def __init__(self, task: Task) -> None:
        sys.exit(3)


async def stubborn(action: Action) -> None:
    try:
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        await asyncio.sleep(60)


async def raises(action: Action) -> End:
    raise ValueError("two\nlines")


async def raises_group(action: Action) -> End:
    """As a task group does for a failure in one of its tasks."""
    inner = ExceptionGroup("inner", [OSError("no tool")])
    raise ExceptionGroup("unhandled errors in a TaskGroup", [inner, TimeoutError()])


async def timed_out(action: Action) -> End:
    raise TimeoutError("the tool's own")


async def exits(*action: Action) -> End:
    sys.exit(0)


async def cancels(*action: Action) -> End:
    raise asyncio.CancelledError


async def waits() -> None:
    await asyncio.sleep(60)


class Mute(Exception):
    """Error whose message cannot be read."""

    def __str__(self) -> str:
        raise ValueError("no message")


async def mute(action: Action) -> End:
    raise Mute


async def fails_in_a_file_name(action: Action) -> End:
    raise OSError("no file a\ud800b")


def starting(given: Any) -> MakeEpisode:
    return lambda task: Started(task, given)


def nested(depth: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(depth):
        found = [found]
    return found


def makes_nothing(task: Task) -> None:
    pass


class NoAction(Scripted):
    async def step(self) -> End:  # type: ignore[override]
        return End(1.0)


FAULTS: list[tuple[Any, str, str]] = [
    (Raises, "error", "OSError: no tool"),
    (Unwritable, "error", "does not know"),
    (Unmade, "error", "KeyError: 'unmade'"),
    (ExitsAtOnce, "error", "SystemExit: 3"),
    (makes_nothing, "error", "NoneType, which has no `start` and `step`"),
    (scripted(raises_group), "error", "OSError: no tool"),
    (Synchronous, "error", "async def step"),
    (SynchronousStart, "error", "async def start"),
    (starting(None), "error", "`start` returned NoneType, not Observation"),
    (starting("1+1="), "error", "`start` returned str"),
    (starting(End(1.0)), "error", "`start` returned End"),
    (starting(exits), "error", "SystemExit"),
    (starting(cancels), "error", "cancelled itself"),
    (starting(waits), "timeout", "`start` took longer than environment.timeout_s"),
    (scripted(cancels), "error", "`step` cancelled itself"),
    (scripted(mute), "error", "Mute"),
    (scripted(fails_in_a_file_name), "error", "OSError: no file a?b"),
    (scripted(("x", 1.0, False, {})), "error", "`step` returned tuple"),
    (scripted(raises), "error", "ValueError: two lines"),
    (scripted(timed_out), "error", "TimeoutError: the tool's own"),
    (scripted(stubborn), "timeout", "environment.timeout_s"),
    (scripted(None), "error", "NoneType"),
    (scripted(Observation()), "error", "Observation"),
    (scripted(Observation(text="x", messages=(user("x"),))), "error", "Observation"),
    (scripted(Observation(messages=({"role": "assistant", "content": "x"},))), "error", "assist"),
    (scripted(Observation(text="é")), "error", "characters"),
    (scripted(End(math.nan)), "error", "End.reward: the environment returned nan"),
    (scripted(End(-math.inf)), "error", "-inf"),
    (scripted(End(np.float32("nan"))), "error", "nan"),  # type: ignore[arg-type]
    (scripted(End(10**400)), "error", "too large"),
    (scripted(End(np.array([0.5, 1.0]))), "error", "ndarray"),  # type: ignore[arg-type]
    (scripted(End({"right": 1.0})), "error", "dict"),  # type: ignore[arg-type]
    (scripted(End(Grade(math.nan, "passed"))), "error", "Grade.value"),
    (scripted(End(Reward(math.inf))), "error", "Reward.value"),
    (scripted(End(Reward(1.0, {"right": 1.0, "form": math.nan}))), "error", "parts['form']"),
    (scripted(End(Reward(1.0, {"form": "good"}))), "error", "parts['form']"),  # type: ignore
    (scripted(End(Reward(1.0, score=math.nan))), "error", "Reward.score"),
    (scripted(End(Reward(1.0, steps=((4, math.nan),)))), "error", "Reward.steps"),
    (scripted(End(Reward(1.0, steps=((0, 1.0),)))), "error", "token 0 was not sampled"),
    (scripted(End(Reward(1.0, steps=((999, 1.0),)))), "error", "token 999 was not sampled"),
    (scripted(Observation(text="x", reward="1")), "error", "reward"),  # type: ignore[arg-type]
    (scripted(Observation(text="x", reward=None)), "error", "reward"),  # type: ignore[arg-type]
    (scripted(Observation(text="x", tool_errors="1")), "error", "tool_errors"),  # type: ignore
    (scripted(End(1.0, tool_errors=-1)), "error", "tool_errors"),
    (scripted(End(1.0, events=({"deep": nested(100_000)},))), "error", "an event is not JSON"),
    (scripted(End(1.0, events=None)), "error", "an event is not JSON"),  # type: ignore[arg-type]
    (scripted(Observation(text="\ud800")), "error", "surrogate"),
    (scripted(End(1e300)), "error", "1e+300"),
    (scripted(End(1.0, outcome="done")), "error", "End.outcome"),  # type: ignore[arg-type]
    (scripted(End("good")), "error", "str"),  # type: ignore[arg-type]
    (scripted(Observation(text="x", reward=math.inf)), "error", "inf"),
    (scripted(End(1.0, events=({"when": time},))), "error", "JSON"),
    (scripted(End(Reward(None, error="the judge is down"))), "error", "the judge is down"),
    (scripted(End(Reward(None), outcome="timeout")), "timeout", "End.reward"),
    (scripted(exits), "error", "SystemExit"),
    (NoAction, "error", "TypeError"),
    (scripted(Observation(messages=({"role": "user", "content": 5},))), "error", "content"),  # type: ignore
    (scripted(Observation(messages=(user("\ud800"),))), "error", "surrogate"),
    (scripted(Observation(text=5)), "error", "text"),  # type: ignore[arg-type]
    (scripted(Observation(messages=({"role": "user"},))), "error", "content"),  # type: ignore
    (scripted(Observation(messages="so?")), "error", "messages"),  # type: ignore[arg-type]
    (scripted(Observation(text="x", stops=")")), "error", "stops"),  # type: ignore[arg-type]
    (scripted(Observation(text="x", stops=("",))), "error", "stops"),
    (scripted(Observation(text="x", stops=None)), "error", "stops"),  # type: ignore[arg-type]
    (scripted(Observation(text="x", tools=("f",))), "error", "tools"),  # type: ignore[arg-type]
    (scripted(Observation(text="x", tools=3)), "error", "tools"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("make", "outcome", "error"), FAULTS)
def test_a_failing_environment_fails_its_own_episode(make: Any, outcome: str, error: str) -> None:
    """The other episodes go on. The failed one is kept as data, without a reward."""
    text = renderer(CHAT[0]) if "assist" in error else renderer()
    chat = "assist" in error
    generator = Recording(text, letters(text, None))
    good = scripted(Observation(text="x"), End(1.0))
    tasks = [task("good", False), task("bad", chat), task("fine", False)]
    with Environment([lambda completion, task: 0.0], error_budget=0.4) as environment:
        groups, _ = played(
            generator,
            text,
            lambda t: make(t) if t.id == "bad" else good(t),
            tasks,
            limits=Limits(1000, 8, step_s=0.2),
            scorer=environment.scorer(3),
        )
    bad = groups[1].trajectories[0]
    assert (bad.outcome, bad.finish_reason) == (outcome, "error")
    assert bad.reward is not None and bad.reward.value is None and error in str(bad.reward.error)
    assert "\n" not in str(bad.reward.error)
    assert bad.tokens[: bad.prompt_length] == text.encode(tasks[1])
    for group in (groups[0], groups[2]):
        assert group.rewards == [1.0] and len(group.trajectories[0].turns) == 2


@pytest.mark.parametrize(
    ("given", "value"),
    [
        (1, 1.0),
        (True, 1.0),
        (np.float32(0.5), 0.5),
        (np.bool_(False), 0.0),
        (np.array([0.25]), 0.25),
        (torch.tensor(-2.0), -2.0),
        (Grade(np.float64(0.5), "wrong_answer"), 0.5),
        (Reward(np.float32(0.5), {"form": torch.tensor(1.0)}), 0.5),  # type: ignore
    ],
)
def test_a_reward_may_be_a_number_of_an_array_library(given: Any, value: float) -> None:
    """The trajectory holds Python numbers, so that it can be written as JSON."""
    text = renderer()
    make = scripted(Observation(text="x", reward=np.float32(0.125)), End(given))  # type: ignore
    ((group,), _) = played(Recording(text, letters(text, None)), text, make, [task("t", False)])
    (t,) = group.trajectories
    assert t.reward is not None and t.reward.value == value and t.turns[0].reward == 0.125
    again = Trajectory.from_record(json.loads(json.dumps(t.to_record())))
    assert again.reward == t.reward and again.turns == t.turns


async def compared() -> float:
    await asyncio.sleep(0.3)
    return 2.0


async def incomparable() -> float:
    raise ValueError("nothing to compare")


async def unnumbered() -> float:
    return math.nan


@pytest.mark.parametrize(
    ("later", "value", "error"),
    [
        (compared, 2.0, ""),  # longer than a step may take
        (incomparable, None, "nothing to compare"),
        (unnumbered, None, "nan"),
        (exits, None, "SystemExit"),
        (lambda: 1.0, None, "async def later"),
        (3, None, "int"),
    ],
)
def test_a_reward_may_come_later(later: Any, value: float | None, error: str) -> None:
    text = renderer()
    make = scripted(Observation(text="x", reward=0.5), End(later=later))
    tasks = [task("t", False)]
    with Environment([lambda completion, task: 0.0], error_budget=1.0) as environment:
        ((group,), _) = played(
            Recording(text, letters(text, None)),
            text,
            make,
            tasks,
            limits=Limits(1000, 8, step_s=0.1),
            scorer=environment.scorer(1),
        )
    (reward,) = [t.reward for t in group.trajectories]
    assert reward is not None and reward.value == value and error in str(reward.error or "")


@pytest.mark.parametrize(("make", "outcome", "error"), [(scripted(End(1.0)), "ended", ""), *FAULTS])
def test_every_episode_is_closed_once(make: Any, outcome: str, error: str) -> None:
    text = renderer(CHAT[0]) if "assist" in error else renderer()
    closed: list[str] = []

    def closing(given: Task) -> Any:
        episode = make(given)

        async def close() -> None:
            closed.append(given.id)

        episode.close = close
        return episode

    generator = Recording(text, letters(text, None))
    tasks = [task("t", "assist" in error)]
    ((group,), _) = played(generator, text, closing, tasks, limits=Limits(1000, 8, step_s=0.2))
    assert group.trajectories[0].outcome in (outcome, "length")
    assert closed == ["t"] or make in (
        Unmade,
        ExitsAtOnce,
        makes_nothing,
    )  # an episode that was never made holds nothing


def test_a_cancelled_episode_is_closed() -> None:
    text = renderer()
    closed: list[str] = []

    class Waiting(Scripted):
        async def start(self) -> Observation:
            return await asyncio.Event().wait()  # type: ignore[return-value]

        async def close(self) -> None:
            await asyncio.sleep(0)
            closed.append(self.task.id)

    async def cancelled() -> None:
        player = Player(Recording(text), text, Limits(1000, 8), Waiting)
        given = task("t", False)
        playing = asyncio.create_task(
            player.play(given, 0, text.encode(given), SamplingParams(max_tokens=4))
        )
        await asyncio.sleep(0)
        playing.cancel()
        await asyncio.gather(playing, return_exceptions=True)

    asyncio.run(cancelled())
    assert closed == ["t"]


def test_too_many_failures_stop_the_step_and_leave_nothing() -> None:
    text = renderer()
    generator = Recording(text, letters(text, None))
    tasks = [task(f"t{i}", False) for i in range(8)]
    with (
        Environment([lambda completion, task: 0.0], error_budget=0.25) as environment,
        pytest.raises(RewardBudgetExceeded, match="3 of 8"),
    ):
        played(generator, text, Raises, tasks, scorer=environment.scorer(8))
    assert generator.running == 0


def test_limits_end_an_episode_with_the_rewards_of_its_turns() -> None:
    text = renderer()
    generator = Recording(text, letters(text, None))
    turn = Observation(text="x", reward=0.25)
    endless, room = scripted(*[turn] * 9), len(text.encode(Task("t", "1="))) + 10
    ((turns,), _) = played(generator, text, endless, [Task("t", "1=")], limits=Limits(1000, 3))
    ((context,), _) = played(
        generator,
        text,
        endless,
        [Task("t", "1=")],
        limits=Limits(room, 9),
    )
    (a,), (b,) = turns.trajectories, context.trajectories
    assert (a.outcome, len(a.turns), a.truncated) == ("turns", 3, True)
    assert (b.outcome, b.truncated) == ("context", True)
    assert len(b.tokens) <= room
    assert a.total_reward == 0.75 and b.total_reward == 0.25 * len(b.turns)


def test_an_observation_that_does_not_fit_is_not_written() -> None:
    """What the environment said about the reply stays: reward, failed calls and events."""
    text = renderer("qwen2.5-instruct")
    asked = Task("t", (user("1+1=?"),))
    long = {"role": "tool", "content": "7" * 300}
    call = {"kind": "tool_call", "tool": "look", "result": long["content"]}
    seen = Observation(messages=(long,), reward=0.5, tool_errors=1, events=(call,))  # type: ignore[arg-type]
    prompt = len(text.encode(asked))
    generator = Recording(text, letters(text, None))
    ((group,), _) = played(
        generator, text, scripted(seen, End(1.0)), [asked], limits=Limits(prompt + 200, 9)
    )
    (t,) = group.trajectories
    assert (t.outcome, t.truncated, len(t.turns)) == ("context", True, 1)
    assert t.provenance == "p" * prompt + "s" * t.sampled_length and "7" not in t.text
    assert (t.turns[0].reward, t.turns[0].tool_errors, t.turns[0].events) == (0.5, 1, 1)
    assert t.events == (call,) and t.total_reward == 0.5
    # With room for it and for one more token, the episode goes on.
    ((group,), _) = played(
        generator, text, scripted(seen, End(1.0)), [asked], limits=Limits(prompt + 1000, 9)
    )
    whole = group.trajectories[0]
    room = len(whole.tokens) - whole.turns[1].stop + whole.turns[1].start + 1
    for tokens, turns in ((room, 2), (room - 1, 1)):
        ((group,), _) = played(
            generator, text, scripted(seen, End(1.0)), [asked], limits=Limits(tokens, 9)
        )
        (t,) = group.trajectories
        assert len(t.turns) == turns and len(t.tokens) <= tokens


def test_messages_need_a_chat_template() -> None:
    tokenizer = character_tokenizer(TEXT)
    tokenizer.chat_template = None
    bare = Renderer(tokenizer, (1,))
    make = scripted(Observation(messages=(user("x"),)))
    with pytest.raises(UserError, match=r"model\.chat_template"):
        played(Recording(bare, letters(bare, None)), bare, make, [Task("t", "1=")])


def test_fields_of_messages_are_in_the_first_prompt() -> None:
    """An example is the tool calls of an earlier turn, which later suffixes assume."""
    text = renderer("qwen2.5-instruct")
    call = {"type": "function", "function": {"name": "look", "arguments": {"at": "42"}}}
    said = (
        user("1+1=?"),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "2"},
    )

    class Continued(Scripted):
        async def start(self) -> Observation:
            return Observation(messages=said)  # type: ignore[arg-type]

    make = lambda task: Continued(task, End(1.0))  # noqa: E731
    ((group,), _) = played(
        Recording(text, letters(text, None)), text, make, [Task("t", (user("1+1=?"),))]
    )
    (t,) = group.trajectories
    assert t.tokens[: t.prompt_length] == text.encode_messages(said)
    assert "look" in text.shown(t.tokens)


def test_a_first_observation_that_leaves_no_room_is_a_failure() -> None:
    text = renderer()

    class Long(Scripted):
        async def start(self) -> Observation:
            return Observation(text="1" * 50)

    ((group,), _) = played(Recording(text), text, Long, [Task("t", "1=")], limits=Limits(50))
    (t,) = group.trajectories
    assert t.outcome == "context" and t.tokens == text.encode(Task("t", "1=")) and not t.turns


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("first", [False, True])
def test_a_text_that_cannot_fit_is_not_tokenized(
    first: bool, chat: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokenizing megabytes would block the event loop, and with it all other episodes."""
    text, huge = renderer("qwen2.5-instruct"), "7 " * 500_000
    seen = Observation(messages=(user(huge),)) if chat else Observation(text=huge)
    read = list[int]()

    class Long(Scripted):
        async def start(self) -> Observation:
            return seen if first else await super().start()

    def watched(name: str) -> None:
        before = getattr(Renderer, name)

        def noted(self: Renderer, *given: Any, **more: Any) -> Any:
            read.append(len(repr(given)))
            return before(self, *given, **more)

        monkeypatch.setattr(Renderer, name, noted)

    for name in ("encode", "encode_messages", "suffix", "suffix_text", "plain"):
        watched(name)
    asked = Task("t", (user("1+1=?"),))
    ((group,), _) = played(
        Recording(text, letters(text, None)), text, lambda t: Long(t, seen), [asked]
    )
    (t,) = group.trajectories
    assert (t.outcome, len(t.turns)) == ("context", 0 if first else 1)
    assert read and max(read) < 10_000
    if first:
        assert t.reward is not None and "max_episode_tokens" in str(t.reward.error)


# Episodes run together.


def engine_player(policy: Policy, make: MakeEpisode, turns: int = 2, **sizes: Any) -> Player:
    engine = Engine(CausalLM(policy.model), **{"kv_tokens": 8000, "max_running": 64, **sizes})
    text = Renderer(policy.tokenizer, policy.stop_token_ids)
    return Player(EngineGenerator(engine, text), text, Limits(200, turns, 60.0), make, (), "tests")


def test_other_episodes_are_decoded_while_tools_are_slow(policy: Policy) -> None:
    """32 episodes of two turns: every tool waits until the engine has decoded 5 steps for others,
    or has nothing to do. If the engine stood still meanwhile, the tools would time out.
    """
    waited: list[int] = []

    class Slow(Scripted):
        async def step(self, action: Action) -> Any:
            engine = player.generator.engine  # type: ignore[attr-defined]
            begun = engine.stats.steps
            while engine.stats.steps < begun + 5 and engine.busy:
                await asyncio.sleep(0.001)
            waited.append(engine.stats.steps - begun)
            return await super().step(action)

    tasks = [Task(f"t{i}", f"{i}+{i}=") for i in range(8)]
    player = engine_player(
        policy, lambda t: Slow(t, Observation(text="+1="), End(1.0)), max_running=4
    )
    driver = Driver(player, SamplingParams(max_tokens=12), 4)
    groups = asyncio.run(groups_in_order(driver.play(tasks, 0), tasks))
    assert [t.outcome for g in groups for t in g.trajectories] == ["length"] * 32
    assert len(waited) == 64 and sum(steps >= 5 for steps in waited) > 32


def test_a_second_turn_draws_its_own_noise_and_a_replay_the_same(policy: Policy) -> None:
    """The noise does not depend on other episodes or on the speed of tools."""
    tasks = [Task(f"t{i}", f"{i}+{i}=") for i in range(4)]

    def tokens(chosen: list[Task], delay: float, **sizes: Any) -> dict[tuple[str, int], list[int]]:
        async def step(action: Action) -> Observation:
            await asyncio.sleep(delay * (hash(action.text) % 3))
            return Observation(text="=1+")

        player = engine_player(policy, scripted(step, End(1.0)), **sizes)
        driver = Driver(player, SamplingParams(max_tokens=8), 3)
        groups = asyncio.run(groups_in_order(driver.play(chosen, 3), chosen))
        return {(t.task_id, t.sample): t.tokens for g in groups for t in g.trajectories}

    whole = tokens(tasks, 0.0)
    assert tokens(tasks[::-1], 0.01, max_running=2) == whole
    assert tokens(tasks[1:2], 0.0, prefix_cache="none") == {
        key: found for key, found in whole.items() if key[0] == "t1"
    }
    assert len({tuple(found) for found in whole.values()}) == len(whole)


def test_64_slow_checks_take_the_slowest_and_not_the_sum(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(
        "import asyncio\n"
        "async def slow(completion, task):\n"
        "    await asyncio.sleep(0.5)\n"
        "    return float(len(completion))\n"
    )
    text = renderer()
    generator = Recording(text, letters(text, None))
    tasks = [task(f"t{i}", False) for i in range(8)]
    with Environment([f"{tmp_path}/slow.py:slow"]) as environment:
        environment.start()
        asyncio.run(_warm(environment))
        began = time.perf_counter()
        groups, _ = played(
            generator, text, OneTurn, tasks, samples=8, scorer=environment.scorer(64)
        )
        seconds = time.perf_counter() - began
    assert all(t.reward and t.reward.value == len(t.text) for g in groups for t in g.trajectories)
    assert 0.5 <= seconds < 8.0, "32 s if the checks ran one after the other"


async def _warm(environment: Environment) -> None:
    one = Trajectory.one_turn("w", 0, [1], [2], [-1.0], [0], "stop", text="w")
    await environment.scorer(1).finish(Group(Task("w", "w"), [one]))


def test_checks_begin_before_other_episodes_have_ended() -> None:
    """No group waits for the check of another."""
    text = renderer()
    events: list[str] = []

    class Scorer:
        async def add(self, task: Task, trajectory: Trajectory) -> None:
            events.append(f"check {task.id}")
            await asyncio.sleep(60 if task.id == "slow" else 0)
            trajectory.reward = Reward(1.0)

        async def finish(self, group: Group) -> None:
            events.append(f"finish {group.task.id}")

        def fail(self, trajectory: Trajectory, line: str) -> None: ...

        def tally(self) -> Tally: ...

        def count(self, others: Sequence[Tally]) -> None: ...

    async def first_two() -> list[str]:
        player = Player(Recording(text), text, Limits(100))
        stream = Driver(player, SamplingParams(4), 2).play(
            [task(name, False) for name in ("slow", "a", "b")], 0, Scorer()
        )
        try:
            return [(await anext(stream)).task.id for _ in range(2)]
        finally:
            await stream.aclose()

    assert sorted(asyncio.run(first_two())) == ["a", "b"]
    assert events.count("check slow") == 2 and "finish slow" not in events


class Together(Recording):
    """Generator whose replies have sample + 1 tokens, end in this order and report `Peers`."""

    async def generate(
        self, tokens: Sequence[int], params: SamplingParams, key: SampleKey, **options: Any
    ) -> Sampled:
        found = await super().generate(tokens, params, key, **options)
        return replace(found, peers=Peers(3, key.sample + 1, key.sample + 1))


def test_the_order_of_samples_does_not_depend_on_the_time_of_the_environment() -> None:
    """The shortest reply ends first, but its environment answers last."""
    text, offered = renderer(), list[list[int]]()

    class Shortest:
        keep = 1

        def __call__(self, task: Task, ended: Sequence[Trajectory]) -> list[Trajectory] | None:
            offered.append([t.sample for t in ended])
            return [*ended] if len(ended) == 3 else None

    async def step(action: Action) -> End:
        await asyncio.sleep(0.05 if len(action.text) == 1 else 0)
        return End(1.0)

    generator = Together(text, lambda tokens, params, key: text.plain("abc"[: key.sample + 1]))
    player = Player(generator, text, Limits(1000, 1, step_s=5.0), scripted(step), (), "tests")
    driver = Driver(player, SamplingParams(max_tokens=6), 3)
    tasks = [Task("t", "1=")]
    asyncio.run(groups_in_order(driver.play(tasks, 0, choose=Shortest()), tasks))
    assert offered == [[0], [0, 1], [0, 1, 2]]


# Signals.


def test_a_signal_leaves_the_engine_idle_and_the_loop_usable(policy: Policy) -> None:
    """A handler that raises in the middle of a step. Afterwards the same step gives the tokens of
    an engine that was never interrupted.
    """
    tasks = [Task(f"t{i}", f"{i}+{i}=") for i in range(4)]
    checked: list[str] = []

    class Stop(KeyboardInterrupt):
        pass

    def handler(number: int, frame: Any) -> None:
        raise Stop

    async def interrupt(action: Action) -> Observation:
        if not checked:
            checked.append("once")
            os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(0)
        return Observation(text="=1+")

    player, plain = (engine_player(policy, scripted(interrupt, End(1.0))) for _ in range(2))
    before = signal.signal(signal.SIGINT, handler)
    loop = EventLoop()
    try:
        driver = Driver(player, SamplingParams(max_tokens=20), 3)
        with pytest.raises(Stop):
            loop.run(groups_in_order(driver.play(tasks, 0), tasks))
        engine = player.generator.engine  # type: ignore[attr-defined]
        usage = engine.usage()
        assert (usage.running, usage.waiting, usage.used) == (0, 0, 0) and not engine.busy
        again = loop.run(groups_in_order(driver.play(tasks, 0), tasks))
        whole = loop.run(groups_in_order(Driver(plain, driver.params, 3).play(tasks, 0), tasks))
        assert [[t.tokens for t in g.trajectories] for g in again] == [
            [t.tokens for t in g.trajectories] for g in whole
        ]
    finally:
        signal.signal(signal.SIGINT, before)
        loop.close()


def test_the_loop_runs_inside_another_loop_as_in_a_notebook() -> None:
    loop = EventLoop()

    async def answer() -> int:
        await asyncio.sleep(0.001)
        return 42

    async def notebook() -> int:
        return loop.run(answer())

    assert asyncio.run(notebook()) == 42 and loop.run(answer()) == 42
    loop.close()


def test_the_loop_closes_inside_another_loop() -> None:
    async def notebook() -> None:
        loop = EventLoop()
        assert loop.run(asyncio.sleep(0, 42)) == 42
        loop.close()
        loop.close()

    asyncio.run(notebook())


def test_closing_the_loop_does_not_wait_for_a_task_that_ignores_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sixfold.event_loop.CLEAN_UP_S", 0.05)
    loop = EventLoop()

    async def left_behind() -> None:
        asyncio.get_running_loop().create_task(stubborn(Action("")))
        await asyncio.sleep(0)

    loop.run(left_behind())
    began = time.perf_counter()
    loop.close()
    loop.close()
    assert time.perf_counter() - began < 5


def test_one_task_twice_is_refused() -> None:
    text = renderer()
    with pytest.raises(ValueError, match="task id is repeated"):
        played(Recording(text), text, OneTurn, [Task("t", "1="), Task("t", "2=")])
