"""Results of tools become text outside the event loop, under the tool's limits.

Whatever a tool returns or raises fails its own call at most.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from pydantic import BaseModel

from sixfold.environment.episode import Action, Observation
from sixfold.environment.tools.episode import ToolEpisode
from sixfold.environment.tools.tool import Tool
from sixfold.types import Task, ToolCall


def endless() -> Iterator[int]:
    yield from itertools.count()


async def endless_async() -> AsyncIterator[int]:
    while True:
        yield 1


def deep() -> Any:
    value: list[Any] = []
    for _ in range(5_000):
        value = [value]
    return value


def circle() -> Any:
    value: list[Any] = []
    value.append(value)
    return value


@dataclass
class Page:
    rows: Any


class Model(BaseModel):
    rows: Any


class Pages:
    """An array whose conversion says in which thread it runs."""

    def tolist(self) -> list[int]:
        return [threading.get_ident()]


def outcomes(*functions: Callable[..., Any], limit: float = 30.0) -> list[str]:
    """What the policy reads after a reply that calls each function once."""
    tools = [
        Tool(function, name=f"f{at}", timeout_s=limit) for at, function in enumerate(functions)
    ]

    async def play() -> Observation:
        episode = ToolEpisode(Task("t", "?"), tools)
        await episode.start()
        calls = tuple(ToolCall(one.name, "{}") for one in tools)
        seen = await episode.step(Action("", calls=calls))
        assert isinstance(seen, Observation)
        return seen

    return [message["content"] for message in asyncio.run(play()).messages]


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "generator": (endless, "iterator"),
    "async generator": (endless_async, "iterator"),
    "in a list": (lambda: [1, endless()], "iterator"),
    "in a dictionary": (lambda: {"a": {"b": endless()}}, "iterator"),
    "in a dataclass": (lambda: Page(endless()), "iterator"),
    "in a model": (lambda: Model(rows=endless()), "iterator"),
    "map": (lambda: map(str, [1]), "iterator"),
    "deep": (deep, "100 levels"),
    "circle": (circle, "100 levels"),
    "many": (lambda: [0] * 1_000_001, "1,000,000 values"),
    "large array": (lambda: {"a": np.broadcast_to(np.zeros(1), (10**6, 10**6))}, "values"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_result_without_end_or_bounds_fails_only_its_call(kind: str) -> None:
    function, said = REFUSED[kind]

    async def later() -> Any:
        return function()

    bad, bad_async, good = outcomes(function, later, lambda: "fine")
    assert good == "fine"
    for text in (bad, bad_async):
        error = json.loads(text)["error"]
        assert error["kind"] == "bad_result" and said in error["message"]


def test_results_and_messages_are_converted_outside_the_event_loop() -> None:
    class Failed(Exception):
        def __str__(self) -> str:
            return str(threading.get_ident())

    def fails() -> None:
        raise Failed

    async def fails_async() -> None:
        raise Failed

    async def gives_async() -> Any:
        return {"a": Pages()}

    found = outcomes(lambda: {"a": Pages()}, gives_async, fails, fails_async)
    idents = {json.loads(text)["a"][0] for text in found[:2]}
    idents |= {int(json.loads(text)["error"]["message"].split()[-1]) for text in found[2:]}
    assert threading.get_ident() not in idents


def test_a_conversion_that_hangs_reaches_the_limit_of_its_call() -> None:
    go_on = threading.Event()

    class Hangs:
        def tolist(self) -> list[int]:
            go_on.wait(60)
            return []

    class Speechless(Exception):
        def __str__(self) -> str:
            go_on.wait(60)
            return ""

    def fails() -> None:
        raise Speechless

    async def later() -> Any:
        return Hangs()

    try:
        *hung, good = outcomes(lambda: Hangs(), later, fails, lambda: [1, "a"], limit=0.3)
    finally:
        go_on.set()
    assert [json.loads(text)["error"]["kind"] for text in hung] == ["timeout"] * 3
    assert good == '[1, "a"]'
