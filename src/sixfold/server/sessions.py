"""Sessions of a server that records: requests that belong together, and their reward.

A session has a base URL of its own, `/sessions/NAME/v1`. A request that continues a reply of its
session gets the sampled tokens and a suffix as its prompt (`rollout/conversations.py`). So the
record joins both to one trajectory (`record.read_trajectories`).
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import anyio
from anyio.to_thread import run_sync
from pydantic import BaseModel

from ..engine.sequence import Sequence as EngineSequence
from ..errors import UserError
from ..rollout.conversations import Conversations, Prompt
from ..rollout.generator import Sampled
from ..rollout.renderer.renderer import Renderer, RenderError
from ..types import Task
from .api_error import ApiError, bad_request
from .form import STRICT
from .requests import Ask, Limits

MOST_SESSIONS = 4096
"""Most sessions whose conversations are kept. The oldest one is then forgotten: its next request
begins a new trajectory.
"""
MOST_ENDED = 1 << 16
"""Most names of ended sessions that are kept."""

_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")


class RewardAsk(BaseModel):
    """The body of POST /sessions/NAME/reward. `parts` are recorded, and not added."""

    model_config = STRICT

    reward: float
    parts: dict[str, float] = {}


class SessionTurn:
    """A request of a session.

    Args:
        sessions: the sessions of the server.
        name: name of the session.
        conversations: conversations of the session.
        prompt: what the policy continues.
    """

    def __init__(
        self, sessions: Sessions, name: str, conversations: Conversations, prompt: Prompt
    ) -> None:
        self.prompt = prompt
        self.name = name
        self._sessions = sessions
        self._conversations = conversations
        self._told = False

    @property
    def recorded(self) -> dict[str, str]:
        """Fields of the request's line in the record."""
        suffix = self.prompt.suffix
        return {"session": self.name, "suffix": suffix.provenance if suffix else ""}

    async def told(
        self, sequence: EngineSequence, text: str, message: Mapping[str, Any] | None
    ) -> None:
        """Write the reply to its conversation.

        Args:
            sequence: the finished sequence.
            text: the reply as text, before the stop string that ended it.
            message: the reply as the client gets it. None for plain text.
        """
        self._told = True
        sampled = Sampled(
            sequence.tokens[len(self.prompt.tokens) :],
            sequence.logp,
            sequence.version,
            sequence.finish_reason or "aborted",
            sequence.reused,
            sequence.seconds,
        )
        await self._sessions.run(
            lambda: self._conversations.reply(self.prompt, sampled, text, message or {})
        )

    def give_up(self) -> None:
        """Forget the request, unless it has its reply."""
        if not self._told:
            self._told = True
            self._conversations.drop(self.prompt)


class Sessions:
    """Sessions of a server, by name. A session begins with its first request.

    Args:
        renderer: converts messages to tokens. Used only by the threads of `run`.
        limits: limits that prompts are checked against.
        record: records a reward: name of the session, value, parts.
    """

    def __init__(
        self,
        renderer: Renderer,
        limits: Limits,
        record: Callable[[str, float, Mapping[str, float]], None],
    ) -> None:
        self._renderer = renderer
        self._limits = limits
        self._record = record
        self._open: dict[str, Conversations] = {}
        self._ended: dict[str, None] = {}
        self._lane = anyio.CapacityLimiter(1)  # renderers are not thread-safe

    def create(self) -> str:
        """Name of a new session that cannot be guessed."""
        return secrets.token_urlsafe(24)

    async def run(self, work: Callable[[], Any]) -> Any:
        """Run work that needs the renderer, in another thread."""
        return await run_sync(work, limiter=self._lane)

    async def chat(
        self,
        name: str,
        ask: Ask,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
    ) -> SessionTurn:
        """Begin a turn of a chat.

        Args:
            name: name of the session.
            ask: the request.
            messages: the conversation.
            tools: descriptions of functions.

        Raises:
            ApiError: the session has ended, or the prompt cannot be converted to tokens.
        """
        if not self._renderer.has_template:
            raise bad_request("the model has no chat template. Use /v1/completions", "messages")
        self._limits.check_length(sum(len(m["content"]) for m in messages), "messages")
        return await self._turn(name, ask, lambda of: of.chat(messages, tools))

    async def plain(self, name: str, ask: Ask, given: str | list[int]) -> SessionTurn:
        """Begin a turn of plain text. The arguments are those of `chat`."""
        self._limits.check_length(len(given), "prompt")
        return await self._turn(name, ask, lambda of: of.plain(given))

    def reward(self, name: str, ask: RewardAsk) -> None:
        """Record the reward of a session. This ends it.

        Raises:
            ApiError: the session has no request, or has its reward already.
        """
        self._check(name)
        if name not in self._open:
            raise ApiError(404, "this session has no request", code="session_not_found")
        try:
            self._record(name, ask.reward, ask.parts)
        except (OSError, ValueError) as error:
            raise ApiError(500, "the reward could not be written to the record") from error
        del self._open[name]
        self._ended[name] = None
        if len(self._ended) > MOST_ENDED:
            del self._ended[next(iter(self._ended))]

    async def _turn(
        self, name: str, ask: Ask, make: Callable[[Conversations], Prompt]
    ) -> SessionTurn:
        self._check(name)
        if ask.n > 1:
            raise bad_request("n: a request of a session gets one reply. Set n = 1", "n")
        if name not in self._open:
            self._make_room()
            self._open[name] = Conversations(self._renderer, Task(name, ""), 0)
        of = self._open[name]
        try:
            prompt = await self.run(lambda: make(of))
        except RenderError as error:
            raise bad_request(str(error), error.part) from error
        except UserError as error:
            raise bad_request(str(error), ask.prompt_field) from error
        return SessionTurn(self, name, of, prompt)

    def _check(self, name: str) -> None:
        if not _NAME.fullmatch(name):
            raise bad_request(
                "the name of a session has 1 to 128 letters, digits, '.', '_' and '-'"
            )
        if name in self._ended:
            raise ApiError(410, "the session has ended: it has its reward", code="session_ended")

    def _make_room(self) -> None:
        """Forget the oldest session without a request in progress, if there are too many."""
        if len(self._open) < MOST_SESSIONS:
            return
        idle = (
            name
            for name, conversations in self._open.items()
            if not any(conversation.busy for conversation in conversations.all)
        )
        oldest = next(idle, None)
        if oldest is None:
            raise ApiError(503, "too many sessions are open. Try again later")
        del self._open[oldest]
