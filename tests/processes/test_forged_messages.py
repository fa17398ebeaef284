"""Replies of processes that run a user's code, which can write to the pipe of its process."""

from __future__ import annotations

import asyncio
import json

import pytest

from sixfold.checks.process import WorkerProcess
from sixfold.processes.child import ChildEnded, Message
from sixfold.rollout.environment_fault import EnvironmentFault
from sixfold_serving.agents.function_runner import FunctionRunner

VALUES: list[object] = [
    None,
    True,
    0,
    1.5,
    "text",
    [],
    [1],
    {},
    {"a": 1},
    [[]],
    [["r", 1, False, ""]],
    ["r"],
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_malformed_list_of_rewards_ends_the_process(value: object) -> None:
    worker = object.__new__(WorkerProcess)
    worker.ready = False
    for body in ({"rewards": [value]}, {"rewards": value}, value, {"fatal": [value]}):
        if body == {"rewards": []}:
            continue
        with pytest.raises(ChildEnded, match="malformed"):
            worker.load(Message(True, json.dumps(body).encode()))
        assert not worker.ready, "a process that was ready would be started again, for ever"


@pytest.mark.parametrize(
    "body",
    [
        *(json.dumps(value) for value in VALUES if value != {}),
        *(json.dumps({"run": value, "value": 1.0}) for value in VALUES if value not in (0, 1)),
        *(json.dumps({"run": 0, "value": value}) for value in ([], [1], {}, {"a": 1})),
        *(json.dumps({"run": 0, "error": value}) for value in VALUES if value != "text"),
        '{"run": 0}', "", "not JSON", "[" * 100_000,
    ],
    ids=lambda body: body[:40],
)  # fmt: skip
def test_a_malformed_reply_of_an_agent_fails_its_episodes_at_once(body: str) -> None:
    class Forging:
        """A process that sends one reply."""

        def arrived(self) -> list[Message]:
            return [Message(True, body.encode())]

        def close(self, grace_s: float) -> None:
            pass

    async def ended() -> object:
        runner = object.__new__(FunctionRunner)
        waiting: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        runner._pending, runner._child, runner._loop = {0: waiting}, Forging(), None  # type: ignore[assignment]
        runner._arrived()
        return await asyncio.wait_for(waiting, 30)

    with pytest.raises(EnvironmentFault, match="malformed reply"):
        asyncio.run(ended())
