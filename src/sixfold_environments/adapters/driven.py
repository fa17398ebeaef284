"""Episodes of environments that run the conversation themselves and request replies.

Such an environment was written for a model behind a server. Here it runs as an asyncio task. When
it requests a reply, its new messages become an observation. So the renderer owns the tokens, and
sampled tokens are never encoded again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from sixfold.environment.episode import Action, End, Observation
from sixfold.user_code import LIMIT, Called, own_copy


class ConversationChanged(ValueError):
    """The environment requested a reply to messages that do not extend the conversation."""


@dataclass
class Talk:
    """Channel through which an environment requests replies.

    Attributes:
        asked: observations that wait for a reply. At most one.
        answer: future reply to the last observation. None before the first request.
        known: messages that the policy has read, in canonical form.
    """

    asked: asyncio.Queue[Observation]
    answer: asyncio.Future[Action] | None = None
    known: tuple[dict[str, Any], ...] = ()

    async def ask(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> Action:
        """The policy's reply to a conversation.

        Args:
            messages: the whole conversation. From the second call on: the earlier messages, the
                last reply, and at least one new message.
            tools: descriptions of the functions that the policy may call. Only those of the first
                call are used.

        Raises:
            ConversationChanged: earlier messages have changed, there is no new message, or the last
                request has no reply yet.
        """
        if self.answer is not None and not self.answer.done():
            raise ConversationChanged(
                "the environment requested a reply while another request was waiting. An episode is"
                " one conversation: request replies one after the other"
            )
        given = tuple(canonical(message) for message in messages)
        new = self._new(given)
        self.known = given
        self.answer = asyncio.get_running_loop().create_future()
        self.asked.put_nowait(Observation(new, tools=tuple(tools)))  # type: ignore[arg-type]
        return await self.answer

    def _new(self, given: tuple[dict[str, Any], ...]) -> tuple[dict[str, Any], ...]:
        """The messages that the policy has not read."""
        if self.answer is None:
            return given
        size = len(self.known)
        replied = given[size : size + 1]
        if given[:size] != self.known or not replied or replied[0]["role"] != "assistant":
            raise ConversationChanged(
                "the environment changed earlier messages. An episode is trained as one"
                " conversation: only append to it"
            )
        new = given[size + 1 :]
        if not new:
            raise ConversationChanged(
                "the environment requested two replies without a new message between them"
            )
        return new


class Driven:
    """Episode of an environment that runs the conversation itself.

    Args:
        run: plays the whole episode with replies from the talk, and returns its end.
        left: called when the episode is closed.
    """

    def __init__(
        self,
        run: Callable[[Talk], Coroutine[Any, Any, End]],
        left: Callable[[], None] = lambda: None,
    ) -> None:
        self._run = run
        self._left = left
        self._talk: Talk | None = None
        self._running: asyncio.Future[End] | None = None

    async def start(self) -> Observation:
        """Start the environment. The messages of its first request are the prompt."""
        self._talk = Talk(asyncio.Queue())
        self._running = asyncio.ensure_future(Called(partial(self._run, self._talk), LIMIT.get()))
        first = await self._next()
        if isinstance(first, End):
            raise ValueError("the environment ended before it requested a reply")
        return first

    async def step(self, action: Action) -> Observation | End:
        assert self._talk is not None and self._talk.answer is not None
        self._talk.answer.set_result(action)
        return await self._next()

    async def close(self) -> None:
        """Cancel the environment if it still runs, and wait for its end."""
        try:
            if self._running is not None:
                self._running.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await self._running
        finally:
            self._left()

    async def _next(self) -> Observation | End:
        """The observation of the next request, or the end of the episode."""
        assert self._talk is not None and self._running is not None
        request = asyncio.ensure_future(self._talk.asked.get())
        try:
            await asyncio.wait((request, self._running), return_when=asyncio.FIRST_COMPLETED)
        finally:
            request.cancel()
        if request.done() and not request.cancelled():
            return request.result()
        return self._running.result()


def canonical(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as chat templates read it: role, content as text, and calls if it has any.

    Raises:
        TypeError: a part of the content is not text.
    """
    made: dict[str, Any] = {
        "role": str(message["role"]),
        "content": content_text(message.get("content")),
    }
    for key in ("name", "tool_call_id", "tool_calls"):
        if message.get(key):
            made[key] = own_copy(message[key])
    return made


def content_text(content: Any) -> str:
    """Content of a message as text.

    Args:
        content: a text, None, or a list of parts. Parts are joined by line breaks.

    Raises:
        TypeError: a part is not text, for example an image.
    """
    if content is None or isinstance(content, str):
        return content or ""
    parts = []
    for part in content:
        text = part if isinstance(part, str) else dict(part).get("text")
        if not isinstance(text, str):
            raise TypeError("a message has a part that is not text. Sixfold trains on text only")
        parts.append(text)
    return "\n".join(parts)
