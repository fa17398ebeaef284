"""Client for the judge's OpenAI-compatible endpoint: retries, time limits, supported parameters.

The API key comes from an environment variable. It is only sent in the Authorization header, and
never appears in a message.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

from sixfold.errors import UserError, one_line
from sixfold.http_client import HttpClient, NoReply, Patience, Reply, request_again

from .prompts import Messages
from .settings import JudgeSettings

UNSUPPORTED = (400, 422)
"""HTTP statuses of an endpoint that does not support a parameter of the request."""
REJECTED = (401, 403, 404)
"""HTTP statuses of an endpoint that rejects the key, the URL or the model."""
MAX_BYTES = 1 << 24
"""Maximum size of an answer."""
_SHOWN_BYTES = 300
"""Bytes of an error answer that are shown in a message."""


class JudgeFailed(RuntimeError):
    """The judge gave no verdict, so the completion has no score."""


class JudgeReply(NamedTuple):
    """A reply of the judge.

    Attributes:
        prompt_tokens: number of prompt tokens. None if the endpoint does not report it.
        completion_tokens: number of reply tokens. None if the endpoint does not report it.
        complete: False if the reply reached its token limit.
    """

    content: str
    prompt_tokens: int | None
    completion_tokens: int | None
    complete: bool


@dataclass(frozen=True)
class Dialect:
    """Request parameters that the endpoint supports. They are learned from its error answers.

    Attributes:
        structured: kind of `response_format`: JSON schema, any JSON object, or none.
        limit: name of the parameter for the token limit.
        tempered: whether `temperature` is sent.
    """

    structured: Literal["schema", "json", "none"]
    limit: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    tempered: bool = True


class JudgeClient:
    """Sends requests for one model to one endpoint.

    Args:
        base_url: returns the base URL. It may wait until a local model is loaded.

    Attributes:
        repeated: number of requests that were sent again.

    Raises:
        UserError: if the variable that the user named is not set, or its key contains characters
            that are not allowed in an HTTP header.
    """

    def __init__(self, settings: JudgeSettings, base_url: Callable[[], Awaitable[str]]) -> None:
        self.settings = settings
        self.repeated = 0
        self._base_url = base_url
        self._http = HttpClient(MAX_BYTES)
        self._key = os.environ.get(settings.key_variable, "").strip()
        if not self._key and settings.key_variable != JudgeSettings().key_variable:
            raise UserError(
                f"environment.judge.key_variable = '{settings.key_variable}': this environment"
                " variable is not set. Export the API key under this name"
            )
        if not (self._key.isascii() and self._key.isprintable()):
            raise UserError(
                f"the API key in the variable {settings.key_variable} has characters that are not"
                " allowed in an HTTP header. Export it again"
            )
        self._dialect = Dialect("schema" if settings.structured == "auto" else settings.structured)
        self._works = False
        self._slots: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None

    async def say(
        self, messages: Messages, schema: Mapping[str, Any], sending: Callable[[], None]
    ) -> JudgeReply:
        """Send a conversation and return the judge's reply.

        Args:
            sending: called right before the first request is sent, when a slot is free. If it
                raises an exception, nothing is sent.

        Raises:
            JudgeFailed: if the endpoint refuses, or gives no reply within the time limit.
            UserError: if the endpoint rejects the key or the model and has never replied before.
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
        """Send a request, with retries while the endpoint fails."""
        url = f"{base}/chat/completions"
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        headers |= {"Authorization": f"Bearer {self._key}"} if self._key else {}
        settings = self.settings
        patience = Patience(settings.retries, settings.request_timeout_s, settings.timeout_s)
        try:
            return await request_again(
                self._http,
                "POST",
                url,
                body,
                headers,
                server=f"the judge at {base}",
                patience=patience,
                refusal=partial(self._refusal, base),
                repeating=self._count_repeat,
            )
        except NoReply as error:
            raise JudgeFailed(str(error)) from error

    def _count_repeat(self) -> None:
        self.repeated += 1

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
        """Error for a status after which a retry does not help.

        Once the endpoint has replied, the judged text itself may cause the refusal: a firewall
        answers hostile texts with 403. The policy must not be able to end the run this way.
        """
        text = self._refusal(base, reply)
        ends_run = reply.status in REJECTED and not self._works
        return UserError(text) if ends_run else JudgeFailed(text)

    def _refusal(self, base: str, reply: Reply) -> str:
        """Error message for a status. The key is masked."""
        said = " ".join(reply.body[:_SHOWN_BYTES].decode(errors="replace").split())
        if self._key:
            said = said.replace(self._key, "***")
        hint = {
            401: f". Set the API key in the variable {self.settings.key_variable}",
            403: f". Check the API key in the variable {self.settings.key_variable}",
            404: ". Check environment.judge.url and environment.judge.model",
        }.get(reply.status, "")
        return f"the judge at {base} answered with status {reply.status}: {said}{hint}"

    def _slot(self) -> asyncio.Semaphore:
        """Limits the number of concurrent requests in the running event loop."""
        loop = asyncio.get_running_loop()
        if self._slots is None or self._slots[0] is not loop:
            self._slots = loop, asyncio.Semaphore(self.settings.concurrency)
        return self._slots[1]


def _said(body: bytes) -> JudgeReply:
    """Parse the body of an answer."""
    try:
        answer = json.loads(body)
        choice = answer["choices"][0]
        content = choice["message"].get("content")
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise JudgeFailed(
            "the judge's endpoint did not answer with a chat completion: check"
            f" environment.judge.url ({one_line(error)})"
        ) from error
    counted = answer.get("usage")
    usage = counted if isinstance(counted, dict) else {}
    return JudgeReply(
        content if isinstance(content, str) else "",
        _count(usage.get("prompt_tokens")),
        _count(usage.get("completion_tokens")),
        choice.get("finish_reason") != "length",
    )


def _count(value: Any) -> int | None:
    return value if type(value) is int and value >= 0 else None


def _simpler(dialect: Dialect, reply: Reply, auto: bool) -> Dialect | None:
    """The next dialect to try after a refusal. None if no other dialect may help.

    Args:
        auto: whether the response_format may change.
    """
    if reply.status not in UNSUPPORTED:
        return None
    said = reply.body.decode(errors="replace").lower()
    if "max_completion_tokens" in said and dialect.limit == "max_tokens":
        return replace(dialect, limit="max_completion_tokens")
    if "temperature" in said and dialect.tempered:
        return replace(dialect, tempered=False)
    if not auto or dialect.structured == "none":
        return None
    return replace(dialect, structured="json" if dialect.structured == "schema" else "none")
