"""User code gets copies of what belongs to the run.

In each form of user code, a call empties a list of its row and changes its messages. The next call
for the same task must get the values of the first.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from sixfold.checks.environment import Environment
from sixfold.checks.scorer import Result
from sixfold.data.task_set import given_tasks
from sixfold.environment.episode import Action, End, Observation
from sixfold.environment.episodes import load_episode
from sixfold.environment.group_form import Member, OtherRewards, win_rate
from sixfold.environment.rewards import RewardFunction
from sixfold.environment.sampled import Sampled
from sixfold.environment.tools.episode import ToolEpisode
from sixfold.environment.tools.tool import tool
from sixfold.model.scratch import character_tokenizer
from sixfold.renderer.renderer import Renderer
from sixfold.types import Group, Message, SamplingParams, Task, Trajectory
from sixfold.user_code import own_copy
from sixfold_environments.audit.trials import Trials
from sixfold_environments.web.settings import WebSettings
from sixfold_environments.web.user_site import Web
from sixfold_serving.agents.function_runner import FunctionRunner
from tests.rollout.episodes import Recording, letters, played

LEVELS = [3, 2, 1]


def row() -> Task:
    prompt: tuple[Message, ...] = (Message(role="user", content="go"),)
    return Task("t", prompt, {"x": [*LEVELS]}, columns={"levels": [*LEVELS], "n": {"a": [1]}})


def left(task: Task) -> float:
    """What is left in a task, all of which is then taken: 10 for a task that nobody changed."""
    message: Any = task.prompt[0]
    found = len(task.columns["levels"]) + len(task.answer["x"]) + len(task.columns["n"])
    found += 3 * (message["content"] == "go")
    task.columns["levels"].clear()
    task.answer["x"].clear()
    task.columns.clear()  # type: ignore[attr-defined]
    message["content"] = ""
    return float(found)


def single(completion: str, task: Task) -> float:
    return left(task)


async def single_async(completion: str, task: Task) -> float:
    return left(task)


def asks(completion: str, task: Task, completion_ids: list[int], prompt_ids: list[int]) -> float:
    found = len(completion_ids) + len(prompt_ids) + left(task)
    completion_ids.clear()
    prompt_ids.clear()
    return found


def over_group(group: list[Member], task: Task) -> list[float]:
    value = left(task) + len(group) + sum(member.parts["right"] for member in group)
    for member in group:
        member.parts.clear()  # type: ignore[attr-defined]
    group.clear()
    return [value, value]


def trl(
    prompts: list[Any],
    completions: list[Any],
    levels: list[list[int]],
    n: list[dict[str, Any]],
    prompt_ids: list[list[int]],
    **columns: Any,
) -> list[float]:
    values = []
    for at, said in enumerate(completions):
        values.append(
            float(
                len(levels[at])
                + len(n[at])
                + len(prompts[at][0]["content"])
                + len(said[0]["content"])
                + len(prompt_ids[at])
                + len(columns["answer"][at]["x"])
            )
        )
        levels[at].clear()
        n[at].clear()
        prompts[at][0]["content"] = said[0]["content"] = ""
        prompt_ids[at].clear()
        columns["answer"][at]["x"].clear()
    completions.clear()
    return values


FORMS = [
    (single, [10.0, 10.0]),
    (single_async, [10.0, 10.0]),
    (asks, [13.0, 13.0]),
    (over_group, [14.0, 14.0]),
    (trl, [3 + 1 + 2 + 1 + 2 + 3.0] * 2),
]


@pytest.mark.parametrize(("function", "expected"), FORMS, ids=lambda p: getattr(p, "__name__", ""))
def test_every_call_of_a_reward_gets_the_same_values(function: Any, expected: list[float]) -> None:
    task, sampled = row(), Sampled(["stop"] * 2, [[7], [8]], [1, 2], "go")
    others = [OtherRewards({"right": 1.0}, True, "passed")] * 2
    reward = RewardFunction("r", function)
    for _ in range(3):
        assert reward.scores(["a", "b"], task, sampled, others) == expected
    assert task == row() and sampled == Sampled(["stop"] * 2, [[7], [8]], [1, 2], "go")


def test_every_comparison_of_a_win_rate_gets_the_same_values() -> None:
    def fuller(first: str, second: str, task: Task) -> float:
        return float(left(task) == 10.0)

    rate = RewardFunction("rate", win_rate(fuller))
    found = rate.scores(["a", "b", "c"], row(), Sampled(["stop"] * 3, [[]] * 3, [], ""))
    assert found == [0.5] * 3  # every comparison gave 1: each text wins when it is the first


def test_a_named_reward_gets_the_same_values_in_its_process(tmp_path: Path) -> None:
    """Checks that reach the process in one request share their task there."""
    file = tmp_path / "popping.py"
    file.write_text(
        "def popped(completion, task):\n    return float(task.columns['levels'].pop(0))\n"
        "def listed(completions, levels, **more):\n    return [one.pop(0) for one in levels]\n"
    )
    task = row()
    samples = [
        Trajectory.one_turn("t", at, [1], [2], [0.0], [0], "stop", text="a") for at in range(4)
    ]
    with Environment([f"{file}:popped", f"{file}:listed"], timeout_s=60.0) as environment:
        environment.score([Group(task, samples)])
    assert [t.reward and t.reward.parts for t in samples] == [{"popped": 3.0, "listed": 3.0}] * 4


@pytest.fixture
def fake() -> tuple[Recording, Renderer]:
    renderer = Renderer(character_tokenizer("0123456789+=?#abcxyzgontwe ", ("<|user|>",)), (1,))
    return Recording(renderer, letters(renderer, None)), renderer


class Emptying:
    """An environment that empties its task when it is made."""

    def __init__(self, task: Task) -> None:
        self.found, self.task = left(task), task

    async def start(self) -> Observation:
        return Observation(messages=(Message(role="user", content="go"),))

    async def step(self, action: Action) -> End:
        return End(self.found)


def test_every_episode_gets_the_same_task(fake: tuple[Recording, Renderer]) -> None:
    task = row()
    for _ in range(2):  # two epochs
        groups, _ = played(*fake, Emptying, [task], samples=4)
        assert groups[0].rewards == [10.0] * 4
    assert task == row()


def test_an_environment_may_go_on_with_its_list_of_messages(
    fake: tuple[Recording, Renderer],
) -> None:
    """The conversation has each message once, as if the environment gave a new list each time."""

    class Fresh:
        """Three turns. The first message is that of a list, to which the later ones are added."""

        def __init__(self, task: Task) -> None:
            self.messages: list[Message] = []

        def given(self, text: str) -> Observation:
            self.messages.append(Message(role="user", content=text))
            return Observation((self.messages[-1],))

        async def start(self) -> Observation:
            return self.given("one")

        async def step(self, action: Action) -> Observation | End:
            return End(1.0) if len(self.messages) > 2 else self.given("two")

    class Growing(Fresh):
        async def start(self) -> Observation:
            self.given("one")
            return Observation(self.messages)  # type: ignore[arg-type]

    params = SamplingParams(max_tokens=1)
    tokens = [
        played(*fake, kind, [Task("t", "go")], params=params)[0][0].trajectories[0].tokens
        for kind in (Fresh, Growing)
    ]
    assert tokens[0] == tokens[1]


def test_the_descriptions_of_tools_stay_those_of_the_run() -> None:
    class Renaming(ToolEpisode):
        @tool
        def look(self, where: str) -> str:
            """Look."""
            return where

        async def start(self) -> Observation:
            first = await super().start()
            parameters: Any = first.tools[0]["function"]["parameters"]
            parameters["properties"].pop("where")
            return first

    async def described() -> list[int]:
        made = [Renaming(row()) for _ in range(2)]
        for each in made:
            await each.start()
        schemas: list[Any] = [e.registry.descriptions[0]["function"]["parameters"] for e in made]
        return [len(schema["properties"]) for schema in schemas]

    assert asyncio.run(described()) == [1, 1]


TRL = """
class Game:
    def reset(self, levels, **row):
        self.level = levels.pop(0)
        row["n"]["a"].append(2)
        return f" level {self.level}"

    def act(self) -> str:
        '''Act.'''
        return "ok"

    def get_reward(self):
        return float(self.level)


def scored(prompts, completions, environments, levels, n, **more):
    value = levels[0].pop(0) + 10 * environments[0].level + 100 * len(n[0]["a"])
    prompts[0][0]["content"] = ""
    completions[0].clear()
    return [value]
"""


@pytest.mark.parametrize(("query", "expected"), [("", 3.0), ("?reward=scored", 133.0)])
def test_every_reset_of_a_trl_environment_gets_the_same_row(
    tmp_path: Path, query: str, expected: float
) -> None:
    (tmp_path / "popping_game.py").write_text(TRL)
    make, task = load_episode(f"trl:{tmp_path / 'popping_game.py'}:Game{query}"), row()

    async def play() -> tuple[Any, Any]:
        episode = make(task)
        try:
            return await episode.start(), await episode.step(Action("done"))
        finally:
            await episode.close()  # type: ignore[attr-defined]

    for _ in range(3):
        first, end = asyncio.run(play())
        assert first.messages[-1]["content"] == "go level 3" and end.reward == expected
    assert task == row()


def test_every_call_of_an_agent_gets_the_same_task(tmp_path: Path) -> None:
    (tmp_path / "popping_agent.py").write_text(
        "def play(task, base_url):\n    return float(task.columns['levels'].pop(0))\n"
    )
    task = row()

    async def rewards() -> list[object]:
        runner = FunctionRunner(f"{tmp_path / 'popping_agent.py'}:play")
        try:
            return [await runner.run(task, "http://host") for _ in range(2)]
        finally:
            await runner.close()

    assert asyncio.run(rewards()) == [3.0, 3.0]


def test_every_text_of_an_audit_gets_the_same_task() -> None:
    with Environment([lambda completion, task: 0.0]) as environment:
        trials = Trials(environment, Emptying)
        task = row()
        found = trials.rewards([(task, text) for text in ("a", "b", "c")])
    assert [reward.value for reward in found] == [10.0] * 3


SITE = """
def site(task):
    start = task.columns["levels"].pop(0)
    def app(environ, start_response):
        start_response("200 OK", [("Content-Type", "text/html")])
        return [f"<title>{start}</title>".encode()]
    app.start = start
    return app


def goal(visit):
    return float(visit.task.columns["levels"].pop(0) + 10 * visit.site.start)
"""


def test_every_site_and_goal_gets_the_same_task(tmp_path: Path) -> None:
    file = tmp_path / "popping_site.py"
    file.write_text(SITE)
    make = Web.with_settings(WebSettings(site=f"{file}:site", goals=(f"{file}:goal",)))

    async def reward() -> object:
        episode: Any = make(task)
        await episode.start()
        end = await episode.step(Action("done"))
        await episode.close()
        return end.reward

    task = row()
    assert [asyncio.run(reward()) for _ in range(2)] == [33.0, 33.0]


def test_a_generator_of_tasks_may_fill_one_row_again_and_again() -> None:
    def tasks() -> Iterator[Task]:
        filled: dict[str, Any] = {"levels": []}
        for number in range(3):
            filled["levels"].append(number)
            yield Task(str(number), f"{number}?", columns=filled)

    found = given_tasks(tasks(), []).train
    assert [task.columns["levels"] for task in found] == [[0], [0, 1], [0, 1, 2]]


def test_parts_of_a_copy_are_distinct_and_of_the_same_type() -> None:
    inner, lock = [1], threading.Lock()
    given = {"a": inner, "b": inner, "t": (inner, "x"), "lock": lock, "r": Result(1.0, None, 0.0)}
    copied: Any = own_copy(given)
    assert copied == given
    lists = [copied["a"], copied["b"], copied["t"][0], inner]
    assert len({id(one) for one in lists}) == 4
    assert copied["lock"] is lock and type(copied["t"]) is tuple
    member = Member("a", "stop", {"x": 1.0})
    assert type(own_copy(member)) is Member and own_copy(member).parts is not member.parts
    deep: Sequence[Any] = []
    for _ in range(100):
        deep = [deep]
    assert own_copy(deep) == deep and sys.getrecursionlimit() > 300


def test_no_field_of_a_copied_task_is_shared() -> None:
    """Also fields that a task gains later: every one that can hold a list is filled here."""
    nested = {"a": [{"b": [1]}]}
    task = Task(
        "t", ({"role": "user", "content": "x", "tool_calls": [nested]},), answer=[nested],
        columns=dict(nested), tools=({"function": nested},), template_args=dict(nested),
    )  # fmt: skip
    before = repr(task)
    copied = own_copy(task)
    assert repr(copied) == before

    def empty(value: Any) -> None:
        for one in value.values() if isinstance(value, dict) else value:
            if isinstance(one, dict | list | tuple):
                empty(one)
        if not isinstance(value, tuple):
            value.clear()

    empty(tuple(v for v in vars(copied).values() if isinstance(v, dict | list | tuple)))
    assert repr(task) == before != repr(copied)
