"""Sessions of a server that records: requests that continue one another become one trajectory, with
the sampled tokens and the posted reward.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from serving import Running, slowed

from sixfold.types import Trajectory
from sixfold_serving.app import make_app
from sixfold_serving.record import read_trajectories
from sixfold_serving.requests import TextAsk, parse_ask

Messages = list[dict[str, Any]]


def opened(server: Running) -> tuple[openai.OpenAI, dict[str, str]]:
    made = httpx.post(f"{server.url}/sessions").json()
    return openai.OpenAI(base_url=made["base_url"], api_key="x", max_retries=0), made


def path(server: Running) -> Path:
    assert server.served.recorder is not None
    return server.served.recorder.path


def recorded(server: Running, name: str) -> list[Trajectory]:
    """The trajectories of a session, read from a copy of its lines of the record."""
    lines = path(server).read_bytes().splitlines(keepends=True)
    copy = path(server).with_name(f"copy-{name}")
    copy.write_bytes(b"".join(line for line in lines if json.loads(line).get("session") == name))
    return read_trajectories(copy)


def post(url: str, **body: Any) -> int:
    return httpx.post(url, json=body).status_code


def test_a_record_deleted_while_serving_is_complete_after_the_next_line(server: Running) -> None:
    client, made = opened(server)
    messages: Any = [{"role": "user", "content": "hi"}]
    client.chat.completions.create(model="tiny", messages=messages, max_tokens=3)
    path(server).unlink()
    assert post(made["reward_url"], reward=0.25) == 200
    (one,) = recorded(server, made["id"])
    assert one.reward is not None and one.reward.value == 0.25


@pytest.mark.parametrize("stream", [False, True])
def test_requests_that_continue_a_reply_are_one_trajectory(server: Running, stream: bool) -> None:
    """Its log-probs equal those of the module over the whole sequence."""
    client, made = opened(server)
    messages: Messages = [{"role": "user", "content": "hi"}]
    said = []
    for question in ("and", "more", None):
        ask: Any = dict(model="tiny", messages=messages, max_tokens=5, stream=stream)
        answer = client.chat.completions.create(**ask)
        text = (
            "".join(chunk.choices[0].delta.content or "" for chunk in answer if chunk.choices)
            if stream
            else answer.choices[0].message.content
        )
        said.append(text)
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": question}]
    assert post(made["reward_url"], reward=0.5, parts={"form": 1.0}) == 200
    (trajectory,) = recorded(server, made["id"])
    assert len(trajectory.turns) == 3 and trajectory.graded_text == said[-1]
    assert trajectory.reward is not None
    assert (trajectory.reward.value, trajectory.reward.parts) == (0.5, {"form": 1.0})
    assert set(trajectory.provenance) == set("psto")
    with torch.no_grad():
        tokens = torch.tensor([trajectory.tokens])
        rows = server.engine.runner.model.module(tokens).logits[0, :-1].float().log_softmax(-1)
    expected = rows.gather(-1, tokens[0, 1:, None])[:, 0].tolist()
    for at, sampled in enumerate(trajectory.mask):
        if sampled:
            assert trajectory.logp[at] == pytest.approx(expected[at - 1], abs=1e-4)


def test_plain_text_and_other_histories(server: Running) -> None:
    """A prompt that begins with an earlier prompt and its completion continues it. Others do not.

    Without a posted reward, trajectories have no reward.
    """
    client, made = opened(server)
    ask: Any = dict(model="tiny", max_tokens=4)

    def text(seed: int) -> str | None:
        """The completion of "ab" if it reaches its limit: otherwise nothing can continue it."""
        choice = server.client().completions.create(prompt="ab", seed=seed, **ask).choices[0]
        return choice.text if choice.finish_reason == "length" else None

    seed = next(seed for seed in range(50) if text(seed) is not None)
    first = client.completions.create(prompt="ab", seed=seed, **ask).choices[0]
    assert first.text == text(seed)
    client.completions.create(prompt=f"ab{first.text}cd", **ask)
    client.completions.create(prompt="xy", **ask)
    found = recorded(server, made["id"])
    assert [len(t.turns) for t in found] == [2, 1]
    assert [t.reward for t in found] == [None, None]


def test_a_session_accepts_one_finite_reward_and_then_ends(server: Running) -> None:
    client, made = opened(server)
    assert post(made["reward_url"], reward=1.0) == 404  # no request yet
    ask: Any = dict(model="tiny", messages=[{"role": "user", "content": "hi"}], max_tokens=2)
    client.chat.completions.create(**ask)
    headers = {"content-type": "application/json"}
    for bad in ("NaN", "Infinity", "1e999", '"1"', "true", "null"):
        body = f'{{"reward": {bad}}}'
        assert httpx.post(made["reward_url"], content=body, headers=headers).status_code == 400
    assert post(made["reward_url"], reward=1.0, colour="red") == 400
    assert post(made["reward_url"], reward=1) == 200
    assert post(made["reward_url"], reward=1.0) == 410
    with pytest.raises(openai.APIStatusError) as refused:
        client.chat.completions.create(**ask)
    assert refused.value.status_code == 410
    assert post(f"{server.url}/sessions/a%20b/reward", reward=1.0) == 400


def test_a_session_without_a_reply_takes_no_reward(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its requests were refused, or its client left. A reward would score nothing."""
    client, made = opened(server)
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="tiny", prompt="\u4f60", max_tokens=2)  # unknown
    answer = httpx.post(made["reward_url"], json={"reward": 1.0})
    assert answer.status_code == 409 and "no reply" in answer.json()["error"]["message"]
    with monkeypatch.context() as patch:  # the reply must not end before its client leaves
        patch.setattr(server.engine, "step", server.engine.step)
        slowed(0.01)(server.engine)
        stream = client.completions.create(model="tiny", prompt="ab", max_tokens=300, stream=True)
        next(iter(stream))
        stream.close()
        server.idle()
    assert post(made["reward_url"], reward=1.0) == 409
    client.completions.create(model="tiny", prompt="ab", max_tokens=2)
    assert post(made["reward_url"], reward=1.0) == 200
    (trajectory,) = recorded(server, made["id"])
    assert trajectory.total_reward == 1.0


def test_a_client_that_leaves_keeps_what_was_sampled(server: Running) -> None:
    """The aborted request is not part of the trajectory. The client can send it again."""
    client, made = opened(server)
    messages: Messages = [{"role": "user", "content": "hi"}]
    ask: Any = dict(model="tiny", max_tokens=3, seed=0)
    answer = client.chat.completions.create(messages=messages, **ask).choices[0].message
    messages += [answer.model_dump(exclude_none=True), {"role": "user", "content": "b"}]
    stream = client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=300, seed=0, stream=True
    )
    next(iter(stream))
    stream.close()
    server.idle()
    assert server.served.sessions is not None
    (conversation,) = server.served.sessions._open[made["id"]].all
    until = time.monotonic() + 10
    while conversation.busy and time.monotonic() < until:
        time.sleep(0.01)
    client.chat.completions.create(messages=messages, **ask)
    assert post(made["reward_url"], reward=1.0) == 200
    found = [t for t in recorded(server, made["id"]) if t.sampled_length <= 6]
    assert [len(t.turns) for t in found] == [2]
    assert [t.total_reward for t in found] == [1.0]


def test_an_unanswered_request_is_removed_after_the_request_in_progress(server: Running) -> None:
    """A request reads the conversations of its session in another thread.

    Removing one of them at the same time would hide another from the loop of that thread.
    """
    sessions = server.served.sessions
    assert sessions is not None
    ask = parse_ask(TextAsk, {"model": "tiny", "prompt": "ab"})
    name = sessions.create()

    async def run() -> None:
        turn = await sessions.plain(name, ask, "ab")
        conversations = sessions._open[name]
        reading, read = threading.Event(), threading.Event()

        def read_conversations() -> int:
            reading.set()
            assert read.wait(30)
            return len(conversations.all)

        other = asyncio.ensure_future(sessions.run(read_conversations))
        await asyncio.to_thread(reading.wait, 30)
        leaving = asyncio.ensure_future(turn.give_up())
        await asyncio.sleep(0.05)
        read.set()
        assert await other == 1
        await leaving
        assert conversations.all == []

    asyncio.run(run())


def test_only_a_server_that_records_has_sessions(server: Running) -> None:
    app = make_app(replace(server.served, sessions=None, recorder=None))

    async def status() -> int:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return (await client.post("/sessions", json={})).status_code

    assert asyncio.run(status()) == 404
    assert httpx.post(f"{server.url}/sessions").status_code == 200


def test_a_request_of_a_session_has_one_prompt_and_one_reply(server: Running) -> None:
    client, _ = opened(server)
    many: Any = dict(model="tiny", messages=[{"role": "user", "content": "hi"}], n=2)
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(**many)
    assert error.value.param == "n"
    for prompt in (["a", "b"], [10**6]):
        with pytest.raises(openai.BadRequestError) as error:
            client.completions.create(model="tiny", prompt=prompt)
        assert error.value.param == "prompt"
