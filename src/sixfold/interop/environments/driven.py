"""Episodes of environments that drive themselves: they ask for replies, as a client asks a server.

Such an environment runs as a task. When it asks for a reply, its new messages become an
observation, so the renderer owns the tokens and nothing that was sampled is encoded again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...environment.episode import Action, End, Observation


class ConversationChanged(ValueError):
    """The environment asked for a reply to a conversation that does not continue the last one."""


@dataclass
class Talk:
    """The conversation so far, on the environment's side.

    Attributes:
        asked: observations that wait for a reply. At most one.
        answer: set by the reply to the last observation.
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
            messages: the whole conversation. After the first call it must consist of the earlier
                messages, the last reply, and new messages.
            tools: functions that the policy may call. They count in the first call.

        Raises:
            ConversationChanged: if earlier messages have changed, or none is new.
        """
        if self.answer is not None and not self.answer.done():
            raise ConversationChanged(
                "the environment asked for a second reply before it had the first. An episode has"
                " one conversation"
            )
        given = tuple(canonical(message) for message in messages)
        new = self._new(given)
        self.known = given
        self.answer = asyncio.get_running_loop().create_future()
        self.asked.put_nowait(Observation(new, tools=tuple(tools)))  # type: ignore[arg-type]
        return await self.answer

    def _new(self, given: tuple[dict[str, Any], ...]) -> tuple[dict[str, Any], ...]:
        if self.answer is None:
            return given
        size = len(self.known)
        replied = given[size : size + 1]
        if given[:size] != self.known or not replied or replied[0]["role"] != "assistant":
            raise ConversationChanged(
                "the environment changed earlier messages. An episode is trained as one"
                " conversation that only grows"
            )
        new = given[size + 1 :]
        if not new:
            raise ConversationChanged("the environment asked twice without a new message")
        return new


class Driven:
    """Episode of an environment that drives itself.

    Args:
        run: plays the whole episode. It gets the talk, asks it for replies, and returns the end.
        left: called once when the episode is over, however it ended.
    """

    def __init__(
        self, run: Callable[[Talk], Awaitable[End]], left: Callable[[], None] = lambda: None
    ) -> None:
        self._run = run
        self._left = left
        self._talk: Talk | None = None
        self._running: asyncio.Future[End] | None = None

    async def start(self) -> Observation:
        """Start the environment. Its first request is the prompt."""
        self._talk = Talk(asyncio.Queue())
        self._running = asyncio.ensure_future(self._run(self._talk))
        first = await self._next()
        if isinstance(first, End):
            raise ValueError("the environment ended before it asked for a reply")
        return first

    async def step(self, action: Action) -> Observation | End:
        """Give the reply to the environment."""
        assert self._talk is not None and self._talk.answer is not None
        self._talk.answer.set_result(action)
        return await self._next()

    async def close(self) -> None:
        """Cancel the environment if it still runs, and wait until it has freed what it holds."""
        try:
            if self._running is not None:
                self._running.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await self._running
        finally:
            self._left()

    async def _next(self) -> Observation | End:
        """The next request, or the end."""
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
        TypeError: if a part of the content is no text.
    """
    made: dict[str, Any] = {
        "role": str(message["role"]),
        "content": content_text(message.get("content")),
    }
    for key in ("name", "tool_call_id", "tool_calls"):
        if message.get(key):
            made[key] = message[key]
    return made


def content_text(content: Any) -> str:
    """Content of a message: text, nothing, or a list of parts.

    Raises:
        TypeError: for a part that is no text, such as an image.
    """
    if content is None or isinstance(content, str):
        return content or ""
    parts = []
    for part in content:
        text = part if isinstance(part, str) else dict(part).get("text")
        if not isinstance(text, str):
            raise TypeError("a message has a part that is no text. Sixfold trains on text")
        parts.append(text)
    return "\n".join(parts)
