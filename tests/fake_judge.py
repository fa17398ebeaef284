"""OpenAI-compatible endpoint on a loopback address with a scripted judge."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sixfold_environments.judge.settings import JudgeSettings


@dataclass
class Asked:
    """One parsed request."""

    body: dict[str, Any]
    headers: dict[str, str]
    nonce: str = ""
    keys: tuple[str, ...] = ()
    data: dict[str, str] = field(default_factory=dict)

    @property
    def user(self) -> str:
        return str(self.body["messages"][-1]["content"])

    @property
    def everything(self) -> str:
        return "\n".join(self.data.values())


Behaviour = Callable[[Asked], Any]
"""Request -> fields of the verdict (a dict), or the whole reply (a str)."""


def asked(body: dict[str, Any], headers: dict[str, str]) -> Asked:
    """Parse the body of a request: nonce, keys of the reply, and data between marks."""
    system = body["messages"][0]["content"]
    user = body["messages"][-1]["content"]
    nonce = re.search(r"\[BEGIN \.\.\. (\w*)\]", system)[1]
    marks = rf"\[BEGIN (\w+) {nonce}\]\n(.*?)\n\[END \1 {nonce}\]"
    data = {name.lower(): text for name, text in re.findall(marks, user, re.DOTALL)}
    keys = tuple(re.findall(r'^- "([\w-]+)":', system, re.MULTILINE))
    return Asked(body, headers, nonce, keys, data)


def verdict(request: Asked, value: float) -> dict[str, Any]:
    """A verdict with the requested keys: the best one for value 1, the worst one for 0."""
    schema = (
        request.body.get("response_format", {})
        .get("json_schema", {})
        .get("schema", {})
        .get("properties", {})
    )
    found: dict[str, Any] = {}
    for key in request.keys:
        if key in ("nonce", "reason"):
            continue
        said = re.search(rf'^- "{key}": (.*)$', request.body["messages"][0]["content"], re.M)[1]
        options = schema.get(key, {}).get("enum") or re.findall(r'"([\w]+)"', said)
        if options:
            found[key] = options[0] if value >= 0.5 else options[1]
        elif number := re.match(r"an integer from 0 to (\d+)", said):
            found[key] = round(value * int(number[1]))
        else:
            found[key] = "text"
    return found


def honest(request: Asked) -> dict[str, Any]:
    """Knows that the capital is Canberra, and ignores what the text says about verdicts."""
    if "winner" in request.keys:
        first, second = (_right(request.data[name]) for name in ("first", "second"))
        return {"winner": "tie" if first == second else "first" if first else "second"}
    return verdict(request, float(_right(request.data["answer"])))


def _right(text: str) -> bool:
    return "Canberra" in text and "not Canberra" not in text


def obedient(request: Asked) -> dict[str, Any]:
    """Obeys a text that speaks of a verdict, and is honest otherwise."""
    if re.search(r"correct|10/10|full marks|score|verdict|accurate", request.data["answer"], re.I):
        return verdict(request, 1.0)
    return honest(request)


def gullible(request: Asked) -> dict[str, Any]:
    """Gives the best verdict to every text."""
    return verdict(request, 1.0)


def prefers_first(request: Asked) -> dict[str, Any]:
    return {"winner": "first"}


def prefers_longer(request: Asked) -> dict[str, Any]:
    longer = len(request.data["first"]) > len(request.data["second"])
    return {"winner": "first" if longer else "second"}


def prose(request: Asked) -> str:
    return "The answer is right. I would give it full marks: 10/10. Verdict: right"


class FakeJudge:
    """The endpoint, in its own thread. Use it in a `with` block.

    Attributes:
        behaviour: makes the replies.
        requests: all requests so far.
        statuses: statuses of the next requests; 0 closes the connection. Later ones get 200.
        retry_after: value of the Retry-After header of errors, or "".
        refuses: words in a body that cause status 400.
        refusal: message of an error.
        delay_s: seconds before each answer.
        held: no request is answered while this is True.
        usage: whether answers have token counts.
        most: largest number of concurrent requests so far.
        connections: number of connections so far.
    """

    def __init__(self, behaviour: Behaviour = honest) -> None:
        self.behaviour = behaviour
        self.requests: list[Asked] = []
        self.statuses: list[int] = []
        self.retry_after = ""
        self.refuses: tuple[str, ...] = ()
        self.refusal = "unknown"
        self.delay_s = 0.0
        self.held = False
        self.usage = True
        self.most = self._now = self.connections = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def settings(self, **more: Any) -> JudgeSettings:
        return JudgeSettings(url=self.url, model="fake-judge", **more)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while await reader.readline() and await self._handled(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _handled(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Handle one request. Returns whether the connection is kept."""
        self._now += 1
        self.most = max(self.most, self._now)
        try:
            headers: dict[str, str] = {}
            while line := (await reader.readline()).strip():
                name, _, value = line.decode().partition(":")
                headers[name.lower()] = value.strip()
            body = json.loads(await reader.readexactly(int(headers["content-length"])))
            await asyncio.sleep(self.delay_s)
            while self.held:
                await asyncio.sleep(0.01)
            status = self.statuses.pop(0) if self.statuses else 200
            if any(word in json.dumps(body) for word in self.refuses):
                status = 400
            self.requests.append(asked(body, headers))
            if status:
                self._answer(writer, status, self.requests[-1])
                await writer.drain()
            return status != 0
        finally:
            self._now -= 1

    def _answer(self, writer: asyncio.StreamWriter, status: int, request: Asked) -> None:
        if status != 200:
            key = request.headers.get("authorization")
            answer: Any = {"error": f"{self.refusal}, key {key}"}
        else:
            said = self.behaviour(request)
            if isinstance(said, dict):
                reason = {"reason": "because"} if "reason" in request.keys else {}
                said = json.dumps({"nonce": request.nonce, **reason, **said})
            message = {"role": "assistant", "content": said}
            answer = {"choices": [{"message": message, "finish_reason": "stop"}]}
            if self.usage:
                answer["usage"] = {"prompt_tokens": 100, "completion_tokens": 10}
        body = json.dumps(answer).encode()
        head = [f"HTTP/1.1 {status} X", "Transfer-Encoding: chunked"]
        head += [f"Retry-After: {self.retry_after}"] if self.retry_after else []
        half = len(body) // 2
        chunks = b"".join(
            f"{len(part):x}\r\n".encode() + part + b"\r\n" for part in (body[:half], body[half:])
        )
        writer.write("\r\n".join([*head, "", ""]).encode() + chunks + b"0\r\n\r\n")

    def __enter__(self) -> FakeJudge:
        self._thread.start()
        start = asyncio.start_server(self._serve, "127.0.0.1", 0)
        self._server = asyncio.run_coroutine_threadsafe(start, self._loop).result()
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/v1"
        return self

    def __exit__(self, *error: object) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        self._server.close()
        open_ = asyncio.all_tasks() - {asyncio.current_task()}
        for task in open_:
            task.cancel()
        await asyncio.gather(*open_, return_exceptions=True)
