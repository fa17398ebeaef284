"""Clients that disappear at any moment of a session: its replies and its reward are kept, it has an
outcome and a message, and other sessions continue.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from tests.agents.playing import generator, renderer, talk, with_agent
from tests.agents.test_agent_player import Slow, content, posted
from tests.rollout.episodes import user

from sixfold.checks.environment import Environment
from sixfold.types import Task

TASKS = [Task("a", "1+1=?", answer=2), Task("b", "2+2=?", answer=4)]
SCORE = 0.25
"""Reward of the reward function. Agents give other rewards."""


def request_bytes(base_url: str, text: str, stream: bool = False) -> bytes:
    """A request for a reply, as it is sent."""
    at = urlsplit(base_url)
    body = json.dumps({"model": "m", "messages": [user(text)], "stream": stream}).encode()
    head = f"POST {at.path}/chat/completions HTTP/1.1\r\nHost: {at.netloc}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def connected(base_url: str) -> socket.socket:
    at = urlsplit(base_url)
    return socket.create_connection((at.hostname or "", at.port or 0), timeout=10)


def never_asks(task: Task, base_url: str) -> None:
    connected(base_url).close()


def sends_half_a_head(task: Task, base_url: str) -> None:
    with connected(base_url) as line:
        line.sendall(request_bytes(base_url, "x")[:40])


def sends_half_a_body(task: Task, base_url: str) -> None:
    with connected(base_url) as line:
        line.sendall(request_bytes(base_url, "x")[:-5])


def leaves_between_requests(task: Task, base_url: str) -> None:
    with connected(base_url) as line:
        line.sendall(request_bytes(base_url, "x"))
        assert line.recv(65536).startswith(b"HTTP/1.1 200")


def half_closes(task: Task, base_url: str) -> None:
    """It sends no more after its request. Like most servers, the endpoint takes it for gone."""
    talk()(task, base_url)
    with connected(base_url) as line:
        line.sendall(request_bytes(base_url, "slow"))
        line.shutdown(socket.SHUT_WR)
        line.recv(65536)
    assert noticed.wait(10)


def leaves_after_the_first_event(task: Task, base_url: str) -> None:
    talk()(task, base_url)
    with connected(base_url) as line:
        line.sendall(request_bytes(base_url, "slow", stream=True))
        while b"data:" not in line.recv(65536):
            pass
    assert noticed.wait(10)


def ends_with_an_open_stream(task: Task, base_url: str) -> None:
    talk()(task, base_url)
    kept.append(connected(base_url))
    kept[-1].sendall(request_bytes(base_url, "slow", stream=True))
    while b"data:" not in kept[-1].recv(65536):
        pass


kept: list[socket.socket] = []
"""Connections that agents leave open."""


def resets(task: Task, base_url: str) -> None:
    """The connection is reset, as when the client's machine is switched off."""
    talk()(task, base_url)
    with connected(base_url) as line:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        line.sendall(request_bytes(base_url, "slow"))
        assert began.wait(10)
    assert noticed.wait(10)


def posts_and_leaves(task: Task, base_url: str) -> None:
    talk()(task, base_url)
    assert posted(base_url, reward=0.75).status_code == 200
    resets(task, base_url)


def leaves_and_posts(task: Task, base_url: str) -> None:
    resets(task, base_url)
    assert posted(base_url, reward=0.75).status_code == 200


def drops_the_slower_of_two(task: Task, base_url: str) -> None:
    """Two clients: the first leaves before its reply, after the second has got one."""
    with connected(base_url) as line:
        line.sendall(request_bytes(base_url, "slow"))
        time.sleep(0.2)
        talk()(task, base_url)
    time.sleep(0.2)


def drops_the_later_of_two(task: Task, base_url: str) -> None:
    """Two clients: the second leaves, and then the first gets its reply."""
    first = threading.Thread(target=talk(), args=(Task("", "soon"), base_url))
    first.start()
    time.sleep(0.2)
    with connected(base_url) as line:
        line.sendall(request_bytes(base_url, "slow"))
        time.sleep(0.2)
    first.join()


began, noticed = threading.Event(), threading.Event()
"""A reply to "slow" was asked for; the endpoint has noticed that its client is gone."""


class SlowOrSoon(Slow):
    """Replies to "soon" after a second, and never to "slow"."""

    async def generate(self, tokens: Any, params: Any, key: Any, **options: Any) -> Any:
        asked = renderer("qwen2.5-instruct").shown(tokens)
        if "soon" in asked:
            await asyncio.sleep(1)
        if "slow" in asked:
            began.set()
        try:
            return await super().generate(tokens, params, key, **options)
        except asyncio.CancelledError:
            noticed.set()
            raise


@pytest.mark.mostly_nightly(4)
@pytest.mark.parametrize(
    ("agent", "outcome", "reward", "turns"),
    [
        (never_asks, "error", None, 0),
        (sends_half_a_head, "error", None, 0),
        (sends_half_a_body, "error", None, 0),
        (leaves_between_requests, "ended", SCORE, 1),
        (half_closes, "aborted", None, 1),
        (leaves_after_the_first_event, "aborted", None, 1),
        (ends_with_an_open_stream, "aborted", None, 1),
        (resets, "aborted", None, 1),
        (posts_and_leaves, "ended", 0.75, 2),
        (leaves_and_posts, "ended", 0.75, 1),
        (drops_the_slower_of_two, "ended", SCORE, 1),
        (drops_the_later_of_two, "aborted", None, 1),
    ],
)
def test_a_client_that_disappears_loses_nothing_that_was_sampled(
    agent: Callable[[Task, str], None], outcome: str, reward: float | None, turns: int
) -> None:
    of = renderer("qwen2.5-instruct")

    def one_leaves(task: Task, base_url: str) -> float | None:
        if task.id == "a":
            agent(task, base_url)
            return None
        talk("x")(task, base_url)
        return 1.0

    began.clear()
    noticed.clear()
    made = SlowOrSoon(of, generator(of)._script, vocabulary=20)
    with Environment([lambda completion, task: SCORE], error_budget=0.9) as environment:
        left, other = with_agent(
            one_leaves, TASKS, of, made=made, environment=environment, tokens=30
        )
    while kept:
        kept.pop().close()
    first = left.trajectories[0]
    assert sum(len(t.turns) for t in left.trajectories) == turns
    assert first.outcome == outcome and first.reward is not None
    assert first.reward.value == reward
    if reward is None:
        said = "disconnected" if outcome == "aborted" else "without a reply"
        assert said in str(first.reward.error)
    (complete,) = other.trajectories
    assert complete.total_reward == 1.0 and len(complete.turns) == 2
    assert made.running == 0


def test_a_connection_that_is_used_again_for_another_session_mixes_nothing() -> None:
    """A program may have one connection pool for all its episodes. The path tells the session."""
    of, ports = renderer("qwen2.5-instruct"), list[int]()
    with httpx.Client(timeout=30) as pool:

        def agent(task: Task, base_url: str) -> float:
            messages = [user(str(task.prompt))]
            for text in ("x", ""):
                body = {"model": "m", "messages": messages}
                with pool.stream("POST", f"{base_url}/chat/completions", json=body) as reply:
                    ports.append(
                        reply.extensions["network_stream"].get_extra_info("client_addr")[1]
                    )
                    said = json.loads(reply.read())["choices"][0]["message"]
                messages += [said, user(text)]
            return float(task.id == "a")

        found = with_agent(agent, TASKS, of, samples=2, concurrency=1)
    expected = with_agent(talk("x"), TASKS, of, samples=2)
    assert len(set(ports)) == 1 and len(ports) == 8
    assert [[content(t) for t in g.trajectories] for g in found] == [
        [content(t) for t in g.trajectories] for g in expected
    ]
    rewards = [[t.total_reward for t in g.trajectories] for g in found]
    assert rewards == [[1.0, 1.0], [0.0, 0.0]]
