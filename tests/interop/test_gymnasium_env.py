"""Unchanged Gymnasium environments: tasks, rewards, outcomes, and every kind of failure."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.rollout.episodes import Recording, played

pytest.importorskip("gymnasium")

import numpy
from gymnasium import spaces

from sixfold.data.sources import load_tasks
from sixfold.data.task_set import prompt_key
from sixfold.environment.episode import Action, Observation
from sixfold.environment.episodes import load_episode
from sixfold.errors import UserError
from sixfold.model.scratch import character_tokenizer
from sixfold.recipe.schema import DataConfig
from sixfold.renderer.renderer import Renderer
from sixfold.rollout.player import Limits
from sixfold.types import SamplingParams, Task
from sixfold_environments.adapters.actions import Actions, MalformedAction
from sixfold_environments.adapters.gymnasium_env import (
    Game,
    GymnasiumEpisode,
    _game,
    gymnasium_tasks,
)
from sixfold_environments.adapters.observations import observation_text
from sixfold_environments.adapters.spec import Spec
from tests.interop import games

WORD = "tests.interop.games:tests/Word-v0"


@pytest.fixture
def renderer() -> Renderer:
    tokenizer = character_tokenizer("abcdefghijklmnopqrstuvwxyz0123456789 ,.:_{}[]\"'?")
    return Renderer(tokenizer, [tokenizer.eos_token_id])


def saying(renderer: Renderer, reply: str | Callable[[str], str]) -> Recording:
    """A generator that replies with a text, or with a function of the last letter that it saw."""

    def script(tokens: Any, params: SamplingParams, key: Any) -> list[int]:
        text = reply if isinstance(reply, str) else reply(renderer.decode(tokens[-2:-1]))
        return [*renderer.plain(text), renderer.tokenizer.eos_token_id]

    return Recording(renderer, script)


def play(
    spec: str,
    renderer: Renderer,
    reply: str | Callable[[str], str],
    tasks: int = 1,
    limits: Limits | None = None,
) -> Any:
    """Trajectories of the first seeds."""
    make = load_episode(f"gymnasium:{spec}")
    games.CLOSED.clear()
    made = [
        Task(id=f"t{n}", prompt="a", columns={"seed": n, "observation": "a"}) for n in range(tasks)
    ]
    params = SamplingParams(max_tokens=6, stop_token_ids=tuple(renderer.stop_token_ids))
    groups, _ = played(saying(renderer, reply), renderer, make, made, limits=limits, params=params)
    return [group.trajectories[0] for group in groups]


def test_rewards_and_outcome_come_from_the_environment(renderer: Renderer) -> None:
    ended, *_ = play(WORD, renderer, lambda letter: letter)
    assert ended.outcome == "ended" and ended.reward.value == 1.0
    assert [turn.reward for turn in ended.turns] == [1.0, 1.0, 0.0]  # the last is the end's
    assert [event["kind"] for event in ended.events] == ["environment_step"] * 3
    wrong, *_ = play(WORD, renderer, "z")
    assert wrong.outcome == "turns" and wrong.reward.value == 0.0  # truncated
    assert games.CLOSED == [0]


def test_tasks_are_seeds_and_the_same_each_time() -> None:
    first, again = gymnasium_tasks(WORD, 20, 1), gymnasium_tasks(WORD, 20, 1)
    assert first == again and len({task.id for task in first}) == 20
    assert {task.prompt for task in first} == set("abc")
    other = gymnasium_tasks(WORD, 20, 2)
    assert not {task.id for task in other} & {task.id for task in first}
    assert len({prompt_key(task) for task in first}) == 20  # equal prompts, different games


def test_held_out_seeds_are_never_trained_on() -> None:
    data = DataConfig(source=f"gymnasium:{WORD}", limit=12, heldout=5, prompt_suffix="!")
    found = load_tasks(data, seed=0, rewards=("arithmetic",))
    assert len(found.heldout) == 5 and len(found.train) == 7
    assert not {t.columns["seed"] for t in found.train} & {t.columns["seed"] for t in found.heldout}
    assert all(str(task.prompt).endswith("!") for task in found.train)


def test_an_episode_starts_with_the_prompt_of_its_task() -> None:
    for task in gymnasium_tasks(WORD, 5, 3):

        async def started(task: Task = task) -> Observation:
            episode = load_episode(f"gymnasium:{WORD}")(task)
            try:
                return await episode.start()
            finally:
                await episode.close()  # type: ignore[attr-defined]

        assert asyncio.run(started()).text == task.prompt


@pytest.mark.parametrize(
    ("fault", "outcome", "error"),
    [
        ("reset", "error", "no board"),
        ("step", "error", "broken board"),
        ("nan", "error", "nan"),
        ("old", "error", "terminated"),
        ("picture", "error", "object"),
        ("hang", "timeout", "environment.timeout_s"),
    ],
)
def test_a_fault_ends_its_episode_and_closes_it(
    fault: str, outcome: str, error: str, renderer: Renderer
) -> None:
    limits = Limits(tokens=1000, turns=8, step_s=1.0 if fault == "hang" else 30.0)
    (bad,) = play(f"{WORD}?fault={fault}", renderer, "z", limits=limits)
    assert bad.outcome == outcome and bad.reward.value is None
    assert error in bad.reward.error.lower()
    deadline = time.monotonic() + 20
    while games.CLOSED != [0] and time.monotonic() < deadline:
        time.sleep(0.01)  # a step that hangs delays `close` until it returns
    assert games.CLOSED == [0]


def test_an_environment_whose_constructor_hangs_is_closed_later() -> None:
    begun, go = threading.Event(), threading.Event()

    class Slow(games.Word):
        def __init__(self) -> None:
            begun.set()
            go.wait(30)
            super().__init__()

    async def given_up() -> None:
        game = Game("Slow", Spec("", "Slow"), Slow)
        episode = GymnasiumEpisode(game, Task("t", "a", columns={"seed": 5}))
        starting = asyncio.create_task(episode.start())
        await asyncio.to_thread(begun.wait, 30)
        starting.cancel()
        closing = asyncio.create_task(episode.close())
        await asyncio.sleep(0)
        go.set()
        await closing

    games.CLOSED.clear()
    asyncio.run(given_up())
    assert games.CLOSED == [5]


def test_a_limit_on_turns_ends_an_endless_episode(renderer: Renderer) -> None:
    (cut,) = play(f"{WORD}?fault=endless", renderer, "z", limits=Limits(1000, turns=5))
    assert cut.outcome == "turns" and len(cut.turns) == 5 and games.CLOSED == [0]


def test_a_failure_to_close_is_recorded_and_the_reward_stands(renderer: Renderer) -> None:
    make = load_episode(f"gymnasium:{WORD}")
    game = _game(f"{WORD}?fault=close")
    tasks = [Task(id="t", prompt="a", columns={"seed": 0})]
    same = type(make(tasks[0]))
    groups, _ = played(saying(renderer, "z"), renderer, lambda task: same(game, task), tasks)
    (done,) = groups[0].trajectories
    assert done.outcome == "turns" and done.events[-1]["kind"] == "close_failed"


def test_blocking_steps_of_several_episodes_overlap(renderer: Renderer) -> None:
    """Each step returns only when the steps of all episodes have been called."""
    done = play(f"{WORD}?fault=meet", renderer, "z", tasks=games.MEETING.parties)
    assert [t.outcome for t in done] == ["turns"] * games.MEETING.parties


def test_a_reply_without_an_action_gets_a_hint_and_no_step() -> None:
    async def go() -> None:
        episode = load_episode("gymnasium:tests.interop.games:tests/Doors-v0")(Task("t", "?"))
        start = await episode.start()
        assert json.loads(start.text) == {"text": "which door?", "door": 1}
        bad = await episode.step(Action("through the wall"))
        assert isinstance(bad, Observation) and bad.tool_errors == 1
        hint = json.loads(bad.messages[0]["content"])["error"]
        assert hint["kind"] == "malformed_action"
        assert hint["actions"] == {"3": "left", "4": "up", "5": "up left"}
        good = await episode.step(Action("I go Up Left."))
        assert isinstance(good, Observation) and json.loads(good.messages[0]["content"]) == {
            "text": "went 5",
            "door": 2,
        }
        assert good.reward == 1 and good.tool_errors == 0
        assert episode._env.unwrapped.taken == [5]  # type: ignore[attr-defined]
        await episode.close()  # type: ignore[attr-defined]

    asyncio.run(go())


DISCRETE = Actions("Discrete", spaces.Discrete(3, start=3), {3: "left", 4: "up", 5: "up left"})


@pytest.mark.parametrize(
    ("reply", "action"),
    [
        ("3", 3),
        ("action 4.", 4),
        ("<think>3 or 4?</think>5", 5),
        ("3 was bad. <action>up</action>", 4),
        ("<answer>left</answer>", 3),
        ("UP LEFT", 5),
        ("4, so 4: up", 4),
    ],
)
def test_discrete_actions(reply: str, action: int) -> None:
    read = DISCRETE.read(reply)
    assert read == action and isinstance(read, numpy.int64)


@pytest.mark.parametrize(
    "reply", ["", "2", "6", "3.5", "-3", "3 or 4", "left, then up", "<think>3", "1e3", "upleft"]
)
def test_replies_without_a_discrete_action(reply: str) -> None:
    with pytest.raises(MalformedAction):
        DISCRETE.read(reply)


def test_arrays_are_json_and_must_be_in_the_space() -> None:
    boxes = Actions("Box", spaces.Box(-1.0, 1.0, (2,)))
    assert boxes.read("[0.5, -1]").tolist() == [0.5, -1.0]
    for reply in ("[2, 0]", "[0]", "0.5", "[[0, 0]]", "[null, 0]", "nothing", "[NaN, 0]"):
        with pytest.raises(MalformedAction):
            boxes.read(reply)
    several = Actions("MultiDiscrete", spaces.MultiDiscrete([2, 3]))
    assert several.read("<action>[1, 2]</action>").tolist() == [1, 2]
    with pytest.raises(MalformedAction):
        several.read("[2, 0]")


def test_text_of_observations() -> None:
    assert observation_text("as it is\n") == "as it is\n"
    assert observation_text({"any": "only this"}) == "only this"
    image = {"text": "a cat", "image": numpy.zeros((32, 32)), "at": numpy.array([1, 2]), "on": None}
    assert json.loads(observation_text(image)) == {
        "text": "a cat",
        "image": "not shown: a value of type ndarray",
        "at": [1, 2],
        "on": None,
    }
    assert observation_text(numpy.int64(7)) == "7"
    assert observation_text((numpy.int64(1), 2, False)) == "[1, 2, false]"
    assert observation_text({"a": numpy.array([1, 2])}) == '{"a": [1, 2]}'
    for given in (object(), numpy.zeros((20, 20)), None.__class__):
        with pytest.raises(TypeError):
            observation_text(given)


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        ("tests.interop.games:tests/Wrod-v0", "tests/Word-v0"),
        ("FrozenLke-v1", "FrozenLake-v1"),
        ("no_such_module:Game-v0", "no_such_module"),
        ("no/such.py:Game-v0", "no/such.py"),
        ("", "gymnasium:NAME"),
        (f"{WORD}?letter=abc", "letter"),
        (f"{WORD}?letters", "NAME=VALUE"),
    ],
)
def test_environments_that_do_not_exist_are_refused(spec: str, named: str) -> None:
    with pytest.raises(UserError, match=named):
        load_episode(f"gymnasium:{spec}")


def test_a_class_in_a_file_is_an_environment(tmp_path: Path, renderer: Renderer) -> None:
    file = tmp_path / "my_games.py"
    file.write_text("from tests.interop.games import Word\nclass Mine(Word): pass\n")
    (ended,) = play(f"{file}:Mine?letters=q", renderer, "q")
    assert ended.outcome == "ended"


def test_an_action_space_without_text_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "odd_games.py"
    file.write_text(
        "from gymnasium import spaces\nfrom tests.interop.games import Word\n"
        "class Odd(Word):\n    def __init__(self):\n        super().__init__()\n"
        "        self.action_space = spaces.Tuple([spaces.Discrete(2)])\n"
    )
    with pytest.raises(UserError, match="ActionWrapper"):
        load_episode(f"gymnasium:{file}:Odd")


def test_a_missing_library_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    _game.cache_clear()
    with pytest.raises(UserError, match=r"sixfold\[envs\]"):
        load_episode("gymnasium:FrozenLake-v1")


def test_an_episode_that_never_started_can_be_closed() -> None:
    episode = load_episode("gymnasium:FrozenLake-v1")(Task("t", "?"))

    asyncio.run(episode.close())  # type: ignore[attr-defined]
    thread = episode._thread._thread  # type: ignore[attr-defined]
    thread.join(10)
    assert not thread.is_alive()
