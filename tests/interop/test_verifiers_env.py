"""Unchanged classic environments of verifiers: their state, stop conditions, parser and rubric.

Without the library, a stand-in replaces it (conftest.py). `make environments` runs this file with
the library.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from sixfold.data.sources import load_tasks
from sixfold.environment.episode import Action, End, Observation
from sixfold.environment.episodes import load_episode
from sixfold.errors import UserError
from sixfold.model.scratch import character_tokenizer
from sixfold.recipe.schema import DataConfig
from sixfold.renderer.renderer import Renderer
from sixfold.rollout.generator import SampleKey
from sixfold.rollout.player import Limits
from sixfold.types import Reward, SamplingParams, Task, ToolCall, Trajectory
from sixfold_environments.adapters.verifiers_env import verifiers_tasks
from tests.rollout.episodes import Recording, played

GAMES = str(Path(__file__).with_name("vf_games.py"))


def steps(spec: str, replies: Any, number: int = 0) -> list[Any]:
    """The first observation, and the answer to each reply."""
    tasks, _ = verifiers_tasks(spec, 0, 0)

    async def play() -> list[Any]:
        episode = load_episode(f"verifiers:{spec}")(tasks[number])
        try:
            first = await episode.start()
            actions = [r if isinstance(r, Action) else Action(r) for r in replies]
            return [first, *[await episode.step(action) for action in actions]]
        finally:
            await episode.close()  # type: ignore[attr-defined]

    return asyncio.run(play())


def test_a_rubric_with_weights_and_async_functions_scores_one_turn() -> None:
    first, end = steps(f"{GAMES}?weight=0.25", ["b"], number=1)
    assert [m["role"] for m in first.messages] == ["system", "user", "assistant", "user"]
    assert first.messages[-1]["content"] == "say b" and not first.tools
    assert end.reward.value == pytest.approx(1 + 0.25 * 0.5) and end.outcome == "ended"
    assert end.reward.parts == {"right": 1.0, "short": 0.5, "num_turns": 1.0}
    assert end.reward.weights == {"right": 1.0, "short": 0.25, "num_turns": 0.0}
    assert steps(GAMES, ["bb"])[-1].reward.value == pytest.approx(0.5 / 3)


def test_tasks_come_from_both_data_sets() -> None:
    data = DataConfig(source=f"verifiers:{GAMES}?count=8", limit=5, heldout=2)
    found = load_tasks(data, seed=0, rewards=())
    assert [task.prompt_text for task in found.train] == [f"say {x}" for x in "abcde"]
    assert [task.prompt_text for task in found.heldout] == ["say x", "say y"]
    assert [task.answer for task in found.heldout] == ["x", "y"]
    only = DataConfig(source=f"verifiers:{GAMES}:counting", heldout=1)
    made = load_tasks(only, seed=0, rewards=())
    assert len(made.train) == 2 and len(made.heldout) == 1


def test_a_system_prompt_of_the_recipe_is_refused() -> None:
    with pytest.raises(UserError, match=r"data\.system_prompt"):
        load_tasks(DataConfig(source=f"verifiers:{GAMES}", system_prompt="x"), seed=0, rewards=())


def test_state_and_final_response_of_several_turns() -> None:
    _, second, end = steps(f"{GAMES}:counting", ["one", "two"])
    assert isinstance(second, Observation) and isinstance(end, End)
    assert second.messages == ({"role": "user", "content": "1"},)
    assert end.reward.value == 2.0 and end.outcome == "ended"
    cut = steps(f"{GAMES}:counting?turns=2", ["one", "two"])[-1]
    assert cut.outcome == "turns" and cut.reward.value == 1.0


def test_tools_are_shown_called_and_answered() -> None:
    call = Action("?", calls=(ToolCall("add", '{"a": 2, "b": 3}', "c1"),), content="let me see")
    first, result, end = steps(f"{GAMES}:tools", [call, "it is 5"])
    (tool,) = first.tools
    assert tool["type"] == "function" and tool["function"]["name"] == "add"
    assert set(tool["function"]["parameters"]["properties"]) == {"a", "b"}
    assert result.messages == ({"role": "tool", "content": "5", "tool_call_id": "c1"},)
    assert end.reward.value == 1.0
    bad = Action("?", calls=(ToolCall("add", '{"a": "x"}', "c1"),))
    assert steps(f"{GAMES}:tools", [bad])[-1].messages[0]["role"] == "tool"


def renderer() -> Renderer:
    tokenizer = character_tokenizer("abcdefghijklmnopqrstuvwxyz0123456789 ")
    return Renderer(tokenizer, [tokenizer.eos_token_id])


def trained_on(spec: str, *replies: Sequence[str], **limits: Any) -> list[Trajectory]:
    """The samples of the first task, through the driver.

    Args:
        spec: the environment.
        replies: the replies of each sample.
        limits: limits of an episode that differ from the default.
    """
    text, said = renderer(), [iter(each) for each in replies]

    def script(tokens: Any, params: SamplingParams, key: SampleKey) -> list[int]:
        return [*text.plain(next(said[key.sample])), text.tokenizer.eos_token_id]

    tasks = verifiers_tasks(spec, 1, 0)[0]
    params = SamplingParams(max_tokens=6, stop_token_ids=tuple(text.stop_token_ids))
    make = load_episode(f"verifiers:{spec}")
    bounds = Limits(**{"tokens": 1000, "turns": 8, "step_s": 5.0, **limits})
    groups, _ = played(
        *(Recording(text, script), text, make, tasks),
        samples=len(replies),
        limits=bounds,
        params=params,
    )
    return list(groups[0].trajectories)


def test_only_sampled_tokens_are_trained() -> None:
    (one,) = trained_on(f"{GAMES}:counting", ["one", "two"])
    text = renderer()
    assert text.decode([t for t, m in zip(one.tokens, one.mask, strict=True) if m]) == "one"
    shown = text.shown(one.tokens)
    assert shown == "<|user|>say a<|assistant|>one<|end|><|user|>1<|assistant|>two<|end|>"
    assert one.reward and one.reward.value == 2.0


def test_group_reward_functions_compare_the_samples_of_a_task() -> None:
    for _ in range(2):  # a second step plays the same task again
        four = trained_on(f"{GAMES}:group", ["aa"], ["a"], ["aaa"], ["aaa"])
        rewards = [t.reward for t in four if t.reward]
        assert [reward.parts["longest"] for reward in rewards] == [0.0, 0.0, 1.0, 1.0]
        assert [reward.value for reward in rewards] == [0.0, 1.0, 1.0, 1.0]  # "a" is right


def test_samples_that_a_limit_cuts_are_not_in_the_group() -> None:
    """The first sample says most, but has no room for a second reply. The others are compared."""
    cut, short, long = trained_on(
        f"{GAMES}:counting_group", ["aaaaa"], ["a", "a"], ["a", "bb"], tokens=15
    )
    assert (cut.outcome, len(cut.turns), cut.reward) == ("context", 1, Reward(0.0))
    assert [(t.outcome, len(t.turns)) for t in (short, long)] == [("ended", 2)] * 2
    assert [t.reward and t.reward.parts["longest"] for t in (short, long)] == [0.0, 1.0]


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("setup", "no state"),
        ("response", "no response"),
        ("library", "no sandbox"),
        ("rewrites", "changed earlier messages"),
        ("reward", "broken"),
        ("nan", "nan"),
    ],
)
def test_a_fault_gives_no_reward(fault: str, error: str) -> None:
    (bad,) = trained_on(f"{GAMES}:counting?fault={fault}", ["one", "two"])
    assert bad.outcome == "error" and bad.reward is not None
    assert bad.reward.value is None and error in str(bad.reward.error)


def test_an_environment_that_blocks_ends_at_its_time_limit() -> None:
    """It runs in a task of its own, beside the method that waits for it."""
    (bad,) = trained_on(f"{GAMES}:counting?fault=blocks", ["one", "two"], step_s=0.3)
    assert bad.outcome == "timeout" and bad.total_reward is None


def test_an_episode_beyond_the_turn_limit_is_cut() -> None:
    (cut,) = trained_on(f"{GAMES}:counting", ["one"], turns=1)
    assert cut.outcome == "turns" and cut.reward == Reward(0.0)


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        (f"{GAMES}:load_enviroment", "load_environment"),
        (f"{GAMES}?wieght=1", "wieght"),
        (f"{GAMES}:nothing", "Environment"),
        ("no-such-environment", "no_such_environment"),
        ("no/such.py", "no/such.py"),
        ("", "verifiers:NAME"),
    ],
)
def test_environments_that_do_not_exist_are_refused(spec: str, named: str) -> None:
    with pytest.raises(UserError, match=named):
        load_episode(f"verifiers:{spec}")


def test_a_missing_library_says_which_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "verifiers", None)
    with pytest.raises(UserError, match=r"verifiers>=0\.1\.14,<0\.4"):
        load_episode(f"verifiers:{GAMES}?count=7")


def test_a_version_without_classic_environments_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    newer = ModuleType("verifiers")
    newer.__version__ = "0.4.0"  # type: ignore[attr-defined]
    newer.__path__ = [str(tmp_path)]
    monkeypatch.setitem(sys.modules, "verifiers", newer)
    monkeypatch.delitem(sys.modules, "verifiers.clients", raising=False)
    monkeypatch.setattr(sys, "meta_path", [PathFinder])
    with pytest.raises(UserError, match=r"0\.4\.0 .*0\.1\.14 to 0\.3.*<0\.4'"):
        load_episode(f"verifiers:{GAMES}?count=5")


def test_the_signal_handlers_of_the_run_are_kept() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    load_episode(f"verifiers:{GAMES}?count=6")
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_a_task_survives_json() -> None:
    (task, *_), _ = verifiers_tasks(GAMES, 1, 0)
    assert json.loads(json.dumps(dict(task.columns)))["question"] == "say a"
    assert isinstance(task, Task) and task.columns["example_id"] == 0


def test_every_rollout_gets_the_same_row() -> None:
    spec = f"{GAMES}:popping"
    (task,), _ = verifiers_tasks(spec, 0, 0)

    async def reward() -> Any:
        episode = load_episode(f"verifiers:{spec}")(task)
        await episode.start()
        end = await episode.step(Action("a"))
        await episode.close()  # type: ignore[attr-defined]
        assert isinstance(end, End) and isinstance(end.reward, Reward)
        return end.reward.value

    assert [asyncio.run(reward()) for _ in range(3)] == [3.0] * 3
