"""Episodes with tools: results, structured errors, limits, and the state of the episode."""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest

from sixfold.environment.episode import Action, End, Observation
from sixfold.environment.tools.episode import Equipped, ToolEpisode
from sixfold.environment.tools.observation import ToolError, ToolsFailed
from sixfold.environment.tools.running import Slots
from sixfold.environment.tools.setup import ToolSetup
from sixfold.environment.tools.tool import Tool, tool
from sixfold.errors import UserError
from sixfold.types import Task, ToolCall

TASK = Task("1", "buy 2 cups", answer={"cup": 2})


class Shop(ToolEpisode):
    def __init__(self, task: Task) -> None:
        super().__init__(task, [lookup, slow])
        self.cart: dict[str, int] = {}

    @tool
    def add(self, item: str, count: int = 1) -> str:
        """Put an item into the cart.

        Args:
            item: name of the item.
            count: how many.
        """
        self.cart[item] = self.cart.get(item, 0) + count
        return f"cart: {sum(self.cart.values())}"

    @tool
    async def empty(self) -> dict[str, int]:
        """Empty the cart."""
        before, self.cart = self.cart, {}
        return before

    async def final(self, action: Action) -> End:
        return End(reward=float(self.cart == self.task.answer))


class Mute(Exception):
    """Error whose message cannot be read."""

    def __str__(self) -> str:
        raise ValueError("no message")


@tool
def lookup(city: str, unit: Literal["C", "F"] = "C") -> Any:
    """Weather of a city."""
    answers: dict[str, Any] = {
        "Oslo": {"t": 3},
        "x": object(),
        "nan": float("nan"),
        "none": None,
        "numpy": {"t": np.float32(0.5), "days": np.arange(2)},
        "half": "a\ud800b",
    }
    if city == "exit":
        raise SystemExit(3)
    if city == "own":
        raise ToolError("no such city")
    if city == "own half":
        raise ToolError("no city a\ud800b")
    if city == "error half":
        raise OSError("no file a\ud800b")
    if city == "mute":
        raise Mute
    return answers[city]


@tool(timeout_s=0.05)
async def slow() -> None:
    """Never ends."""
    await asyncio.sleep(60)


def calls(*made: tuple[str, Any]) -> Action:
    given = tuple(
        ToolCall(name, value if isinstance(value, str) else json.dumps(value))
        for name, value in made
    )
    return Action("text", calls=given)


def play(episode: ToolEpisode, *actions: Action) -> list[Any]:
    async def run() -> list[Any]:
        seen: list[Any] = [await episode.start()]
        for action in actions:
            seen.append(await episode.step(action))
        return seen

    return asyncio.run(run())


def contents(seen: Observation) -> list[str]:
    return [message["content"] for message in seen.messages]


def kinds(seen: Observation) -> list[str]:
    return [json.loads(text)["error"]["kind"] for text in contents(seen)]


def test_calls_change_the_state_and_the_end_state_is_graded() -> None:
    episode = Shop(TASK)
    first, second, end = play(
        episode, calls(("add", {"item": "cup"}), ("add", {"item": "cup"})), Action("done")
    )
    assert first.messages == ({"role": "user", "content": "buy 2 cups"},)
    assert [one["function"]["name"] for one in first.tools] == ["add", "empty", "lookup", "slow"]
    assert contents(second) == ["cart: 1", "cart: 2"], "methods run in the order of the reply"
    assert [dict(m)["tool_call_id"] for m in second.messages] == ["call00000", "call00001"]
    assert (second.tool_errors, end.reward) == (0, 1.0)
    event = dict(second.events[0])
    assert event.pop("seconds") >= 0
    assert event == {
        "kind": "tool_call", "tool": "add", "arguments": '{"item": "cup"}', "result": "cart: 1",
    }  # fmt: skip


def test_episodes_of_a_class_do_not_share_state() -> None:
    first, second = Shop(TASK), Shop(TASK)
    play(first, calls(("add", {"item": "cup", "count": 2})))
    assert (first.cart, second.cart) == ({"cup": 2}, {})
    assert play(first, calls(("empty", {})))[1].messages[0]["content"] == '{"cup": 2}'


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        (("sub", {}), "unknown_tool"),
        (("add", "{oops"), "bad_json"),
        (("add", "[1]"), "bad_json"),
        (("add", "3"), "bad_json"),
        (("add", {}), "missing_argument"),
        (("add", {"item": "a", "price": 3}), "unknown_argument"),
        (("add", {"item": 3}), "wrong_argument"),
        (("add", {"item": "a", "count": "3"}), "wrong_argument"),
        (("add", {"item": "a", "count": True}), "wrong_argument"),
        (("add", {"item": None}), "wrong_argument"),
        (("lookup", {"city": "Oslo", "unit": "K"}), "wrong_argument"),
        (("lookup", {"city": "Rome"}), "exception"),
        (("lookup", {"city": "own"}), "exception"),
        (("lookup", {"city": "exit"}), "exception"),
        (("lookup", {"city": "own half"}), "exception"),
        (("lookup", {"city": "error half"}), "exception"),
        (("lookup", {"city": "mute"}), "exception"),
        (("lookup", {"city": "x"}), "bad_result"),
        (("lookup", {"city": "nan"}), "bad_result"),
        (("slow", {}), "timeout"),
    ],
)
def test_a_failed_call_gives_a_structured_error(call: tuple[str, Any], kind: str) -> None:
    episode = Shop(TASK)
    _, seen = play(episode, calls(call))
    assert kinds(seen) == [kind]
    assert (seen.tool_errors, seen.events[0]["error"]) == (1, kind)
    assert contents(seen)[0].encode(), "half of a surrogate pair cannot be tokenized"
    assert not episode.cart


def test_a_malformed_call_gives_a_structured_error() -> None:
    action = replace(calls(("add", {"item": "cup"})), malformed=("it is not JSON",))
    _, seen = play(Shop(TASK), action)
    assert contents(seen)[0] == "cart: 1" and seen.tool_errors == 1
    assert json.loads(contents(seen)[1])["error"]["kind"] == "malformed"


def test_a_result_is_text_or_json_and_is_cut() -> None:
    episode = Equipped(Shop, ToolSetup(max_result=5))(TASK)
    assert isinstance(episode, ToolEpisode)
    _, seen = play(
        episode,
        calls(("lookup", {"city": "none"}), ("add", {"item": "a"}), ("lookup", {"city": "Oslo"})),
    )
    assert contents(seen)[0] == ""
    assert contents(seen)[1].startswith("cart:\n[cut: 5 of 7")
    assert contents(seen)[2].startswith('{"t":\n')


def test_a_result_may_hold_arrays_and_half_of_a_surrogate_pair() -> None:
    _, seen = play(Shop(TASK), calls(("lookup", {"city": "numpy"}), ("lookup", {"city": "half"})))
    assert contents(seen) == ['{"t": 0.5, "days": [0, 1]}', "a?b"]


def test_calls_over_the_limit_are_refused_one_by_one() -> None:
    episode = Shop(TASK)
    episode.setup = ToolSetup(max_calls=1)
    _, seen = play(episode, calls(("add", {"item": "a"}), ("add", {"item": "b"})))
    assert episode.cart == {"a": 1}
    assert json.loads(contents(seen)[1])["error"]["kind"] == "too_many_calls"


def test_functions_of_one_reply_run_concurrently() -> None:
    barrier = threading.Barrier(3, timeout=5)

    def meet(n: int) -> int:
        barrier.wait()
        return n

    episode = ToolEpisode(TASK, [meet])
    _, seen = play(episode, calls(*(("meet", {"n": n}) for n in range(3))))
    assert contents(seen) == ["0", "1", "2"]


def test_a_function_that_ignores_its_limit_keeps_its_slot_until_it_returns() -> None:
    go = threading.Event()
    begun: list[int] = []

    @tool(timeout_s=0.05)
    def stuck() -> None:
        begun.append(1)
        go.wait(60)

    episode = ToolEpisode(TASK, [stuck])
    slots = Slots(2)
    episode.setup = ToolSetup(slots=slots)
    _, first, second = play(episode, calls(*[("stuck", {})] * 2), calls(*[("stuck", {})] * 3))
    assert (kinds(first), kinds(second)) == (["timeout"] * 2, ["busy"] * 3)
    assert len(begun) == 2
    go.set()
    episode = ToolEpisode(TASK, [Tool(lambda: None, name="quick")])
    episode.setup = ToolSetup(slots=slots, timeout_s=10.0)
    both = calls(("quick", {}), ("quick", {}))
    assert contents(play(episode, both)[1]) == ["", ""], "the slots are free again"


def test_a_slot_that_is_handed_to_a_cancelled_call_is_released() -> None:
    async def handed_over() -> None:
        slots = Slots(1)
        await slots.take(1.0)
        waiting = asyncio.create_task(slots.take(1.0))
        await asyncio.sleep(0)
        slots.give()
        await asyncio.sleep(0)  # the slot has been handed over, and `waiting` has not resumed
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await slots.take(0.1)

    asyncio.run(handed_over())


def test_a_stuck_method_does_not_race_with_the_next_one() -> None:
    go = threading.Event()

    class Stuck(ToolEpisode):
        @tool(timeout_s=0.05)
        def wait(self) -> None:
            go.wait(10)

    _, first, second = play(Stuck(TASK), calls(("wait", {})), calls(("wait", {})))
    go.set()
    assert (kinds(first), kinds(second)) == (["timeout"], ["busy"])


def test_tools_that_cannot_work_fail_the_episode() -> None:
    def broken() -> None:
        raise ToolsFailed("the database is gone")

    with pytest.raises(ToolsFailed, match="database"):
        play(ToolEpisode(TASK, [broken]), calls(("broken", {})))


def test_two_tools_with_the_same_name_are_refused() -> None:
    def add() -> None: ...

    class Two(Shop):
        def __init__(self, task: Task) -> None:
            ToolEpisode.__init__(self, task, [add])

    with pytest.raises(UserError, match=r"'add'.*name="):
        play(Two(TASK))
