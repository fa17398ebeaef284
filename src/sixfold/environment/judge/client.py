"""Client of an OpenAI-compatible endpoint: repetitions, time limits, and what the endpoint accepts.

The API key comes from an environment variable. It is sent in one header, and in no message.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from ...errors import UserError
from ...http_request import Reply, http_request
from .prompts import Messages
from .settings import JudgeSettings

REPEATED = frozenset((408, 409, 425, 429, 500, 502, 503, 504, 520, 522, 524, 529))
"""Statuses after which a request is sent again."""
UNKNOWN = (400, 422)
"""Statuses of an endpoint that does not know a parameter of the request."""
CLOSED = (401, 403, 404)
"""Statuses of an endpoint that cannot be used with these settings."""
FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 30.0
MOST_BYTES = 1 << 24
_SAID = 300  # characters of the endpoint's answer in a message


class JudgeFailed(RuntimeError):
    """The judge gave no verdict: nothing is known about the completion."""


class Said(NamedTuple):
    """What the judge wrote.

    Attributes:
        content: text of the reply.
        prompt_tokens: tokens of the prompt; None if the endpoint does not count.
        completion_tokens: tokens of the reply; None if the endpoint does not count.
        complete: False if the reply reached its token limit.
    """

    content: str
    prompt_tokens: int | None
    completion_tokens: int | None
    complete: bool


@dataclass(frozen=True)
class Dialect:
    """How this endpoint wants to be asked. It is found out from its refusals.

    Attributes:
        structured: response_format of a request.
        limit: name of the parameter with the token limit.
        tempered: whether the temperature is sent.
    """

    structured: Literal["schema", "json", "none"]
    limit: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    tempered: bool = True


class JudgeClient:
    """Asks one model at one endpoint.

    Args:
        settings: endpoint, model and limits.
        base_url: gives the base URL. It may wait until a local model is loaded.

    Attributes:
        repeated: number of requests that were sent again.

    Raises:
        UserError: if the environment variable that the user named has no key.
    """

    def __init__(self, settings: JudgeSettings, base_url: Callable[[], Awaitable[str]]) -> None:
        self.settings = settings
        self.repeated = 0
        self._base_url = base_url
        self._key = os.environ.get(settings.key_variable, "").strip()
        if not self._key and settings.key_variable != JudgeSettings().key_variable:
            raise UserError(
                f"environment.judge.key_variable = '{settings.key_variable}': the environment has"
                " no such variable. Export the API key under this name"
            )
        if not (self._key.isascii() and self._key.isprintable()):
            raise UserError(
                f"the API key in the variable {settings.key_variable} has characters that no header"
                " can carry. Export it again"
            )
        self._dialect = Dialect("schema" if settings.structured == "auto" else settings.structured)
        self._works = False
        self._slots: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None

    async def say(
        self, messages: Messages, schema: Mapping[str, Any], sending: Callable[[], None]
    ) -> Said:
        """The judge's reply to a conversation.

        Args:
            messages: the conversation.
            schema: JSON schema that the reply should have.
            sending: called before the request is sent.

        Raises:
            JudgeFailed: if the endpoint refuses, or gives no reply within the time limit.
            UserError: if the endpoint refuses the key or the model, and has never replied.
        """
        base = await self._base_url()
        async with self._slot():
            sending()
            dialect = self._dialect
            try:
                async with asyncio.timeout(self.settings.timeout_s):
                    while True:
                        reply = await self._answered(base, self._body(messages, schema, dialect))
                        if reply.status == 200:
                            self._dialect, self._works = dialect, True
                            return _said(reply.body)
                        simpler = _simpler(dialect, reply, self.settings.structured == "auto")
                        if simpler is None:
                            raise self._refused(base, reply)
                        dialect = simpler
            except TimeoutError as error:
                raise JudgeFailed(
                    f"the judge at {base} gave no reply within environment.judge.timeout_s ="
                    f" {self.settings.timeout_s:g} s"
                ) from error

    async def _answered(self, base: str, body: bytes) -> Reply:
        """The answer to a request, which is sent again while the endpoint fails."""
        url = f"{base}/chat/completions"
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        headers |= {"Authorization": f"Bearer {self._key}"} if self._key else {}
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.settings.timeout_s
        for attempt in range(self.settings.retries + 1):
            wait = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2**attempt) * random.uniform(0.75, 1.25)
            try:
                async with asyncio.timeout(self.settings.request_timeout_s):
                    reply = await http_request("POST", url, body, headers, MOST_BYTES)
                if reply.status not in REPEATED:
                    return reply
                problem = self._refusal(base, reply)
                wait = max(wait, _asked_wait(reply))
            except TimeoutError:
                problem = (
                    f"the judge at {base} did not answer within"
                    f" {self.settings.request_timeout_s:g} s"
                )
            except (OSError, asyncio.IncompleteReadError, ValueError, IndexError) as error:
                problem = f"no judge at {base}: {type(error).__name__}: {error}"
            late = loop.time() + wait > deadline
            if attempt == self.settings.retries or late:
                break
            self.repeated += 1
            await asyncio.sleep(wait)
        raise JudgeFailed(f"{problem} ({attempt + 1} attempts)")

    def _body(self, messages: Messages, schema: Mapping[str, Any], dialect: Dialect) -> bytes:
        settings = self.settings
        body: dict[str, Any] = {"model": settings.model, "messages": messages}
        body[dialect.limit] = settings.max_tokens
        if dialect.tempered:
            body["temperature"] = settings.temperature
        if dialect.structured == "schema":
            form = {"name": "verdict", "strict": True, "schema": schema}
            body["response_format"] = {"type": "json_schema", "json_schema": form}
        elif dialect.structured == "json":
            body["response_format"] = {"type": "json_object"}
        return json.dumps(body).encode()

    def _refused(self, base: str, reply: Reply) -> Exception:
        """Error for a status that no repetition mends.

        Once the endpoint has replied, a refusal may be due to the text that is judged: a firewall
        refuses hostile texts with 403. A policy must not be able to end the run.
        """
        text = self._refusal(base, reply)
        return UserError(text) if reply.status in CLOSED and not self._works else JudgeFailed(text)

    def _refusal(self, base: str, reply: Reply) -> str:
        """What an error status means, without the key."""
        said = " ".join(reply.body[:_SAID].decode(errors="replace").split())
        if self._key:
            said = said.replace(self._key, "***")
        hint = {
            401: f". Set the API key in the variable {self.settings.key_variable}",
            403: f". Check the API key in the variable {self.settings.key_variable}",
            404: ". Check environment.judge.url and environment.judge.model",
        }.get(reply.status, "")
        return f"the judge at {base} answered with status {reply.status}: {said}{hint}"

    def _slot(self) -> asyncio.Semaphore:
        """Bound of the requests at a time in the running event loop."""
        loop = asyncio.get_running_loop()
        if self._slots is None or self._slots[0] is not loop:
            self._slots = loop, asyncio.Semaphore(self.settings.concurrency)
        return self._slots[1]


def _said(body: bytes) -> Said:
    """The reply in the body of an answer.

    Raises:
        JudgeFailed: if the body is not a chat completion.
    """
    try:
        answer = json.loads(body)
        choice = answer["choices"][0]
        content = choice["message"].get("content")
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise JudgeFailed(
            "the judge's endpoint did not answer with a chat completion: check"
            f" environment.judge.url ({type(error).__name__}: {error})"
        ) from error
    counted = answer.get("usage")
    usage = counted if isinstance(counted, dict) else {}
    return Said(
        content if isinstance(content, str) else "",
        _count(usage.get("prompt_tokens")),
        _count(usage.get("completion_tokens")),
        choice.get("finish_reason") != "length",
    )


def _count(value: Any) -> int | None:
    return value if type(value) is int and value >= 0 else None


def _simpler(dialect: Dialect, reply: Reply, auto: bool) -> Dialect | None:
    """The next dialect to try after a refusal, or None.

    Args:
        dialect: dialect of the refused request.
        reply: the refusal.
        auto: whether the response_format may change.
    """
    if reply.status not in UNKNOWN:
        return None
    said = reply.body.decode(errors="replace").lower()
    if "max_completion_tokens" in said and dialect.limit == "max_tokens":
        return replace(dialect, limit="max_completion_tokens")
    if "temperature" in said and dialect.tempered:
        return replace(dialect, tempered=False)
    if not auto or dialect.structured == "none":
        return None
    return replace(dialect, structured="json" if dialect.structured == "schema" else "none")


def _asked_wait(reply: Reply) -> float:
    """Seconds that the endpoint asks for with Retry-After. 0 if it does not."""
    try:
        return max(0.0, float(reply.headers.get("retry-after", "0")))
    except ValueError:
        return 0.0
