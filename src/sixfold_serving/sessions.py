"""Sessions of a server that records: requests that belong together, and their reward.

Each session has its own base URL, `/sessions/NAME/v1`. If a request continues a reply of its
session, its prompt consists of the sampled tokens and a suffix (`rollout/conversations.py`). So
`record.read_trajectories` can join both to one trajectory.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import anyio
from anyio.to_thread import run_sync
from pydantic import BaseModel

from sixfold.engine.sequence import Sequence as EngineSequence
from sixfold.errors import UserError
from sixfold.renderer.renderer import Renderer, RenderError
from sixfold.rollout.conversations import Conversations, Prompt
from sixfold.rollout.generator import Sampled
from sixfold.types import Task

from .api_error import ApiError, bad_request
from .form import STRICT
from .requests import Ask, Limits

MAX_SESSIONS = 4096
"""Maximum number of sessions whose conversations are kept.

If there are more, the oldest one is removed: its next request begins a new trajectory.
"""
MAX_ENDED = 1 << 16
"""Maximum number of ended sessions whose names are kept."""

_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")


class RewardAsk(BaseModel):
    """The body of POST /sessions/NAME/reward. `parts` are recorded, but not added to the reward."""

    model_config = STRICT

    reward: float
    parts: dict[str, float] = {}


class SessionTurn:
    """A request of a session.

    Args:
        prompt: the prompt that the policy continues.
    """

    def __init__(
        self, sessions: Sessions, name: str, conversations: Conversations, prompt: Prompt
    ) -> None:
        self.prompt = prompt
        self.name = name
        self._sessions = sessions
        self._conversations = conversations
        self._done = False

    @property
    def recorded(self) -> dict[str, str]:
        """Fields for the request's line in the record."""
        suffix = self.prompt.suffix
        return {"session": self.name, "suffix": suffix.provenance if suffix else ""}

    async def told(
        self, sequence: EngineSequence, text: str, message: Mapping[str, Any] | None
    ) -> None:
        """Write the reply to its conversation.

        Args:
            text: the reply as text, before the stop string that ended it.
            message: the reply as the client gets it. None for plain text.
        """
        sampled = Sampled(
            sequence.tokens[len(self.prompt.tokens) :],
            sequence.logp,
            sequence.version,
            sequence.finish_reason or "aborted",
            sequence.reused,
            sequence.seconds,
        )
        self._done = True
        # Shielded: if the client leaves now, an unwritten reply would leave the conversation busy.
        await asyncio.shield(
            self._sessions.run(
                lambda: self._conversations.reply(self.prompt, sampled, text, message or {})
            )
        )

    async def give_up(self) -> None:
        """Remove the request from its conversation, unless its reply was written."""
        if not self._done:
            self._done = True
            # Not on the event loop: another request may be reading the same conversations in the
            # thread of `run`.
            await asyncio.shield(self._sessions.run(lambda: self._conversations.drop(self.prompt)))


class Sessions:
    """The sessions of a server, by name. A session begins with its first request.

    Args:
        renderer: converts messages to tokens. Used only by the threads of `run`.
        limits: limits that prompts are checked against.
        record: function that records a reward. Arguments: name of the session, value, parts.
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
        self._lane = anyio.CapacityLimiter(1)  # renderers and conversations are not thread-safe

    def create(self) -> str:
        """Make a random name for a new session, which cannot be guessed."""
        return secrets.token_urlsafe(24)

    async def run(self, work: Callable[[], Any]) -> Any:
        """Run a function that uses the renderer or conversations in a thread, one at a time."""
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
            tools: descriptions of functions.

        Raises:
            ApiError: the session has ended, or the prompt cannot be converted to tokens.
        """
        self._limits.check_chat(messages, self._renderer)
        return await self._turn(name, ask, lambda of: of.chat(messages, tools))

    async def plain(self, name: str, ask: Ask, given: str | list[int]) -> SessionTurn:
        """Begin a turn of plain text.

        Args:
            given: text or token ids to continue.

        Raises:
            ApiError: the session has ended, or the prompt is too long, has no tokens, or has an
                unknown token id.
        """
        if isinstance(given, str):
            self._limits.check_length(len(given), "prompt")
        else:
            self._limits.check_token_ids(given, "prompt")
        return await self._turn(name, ask, lambda of: of.plain(given))

    def reward(self, name: str, ask: RewardAsk) -> None:
        """Record the reward of a session and end the session.

        Raises:
            ApiError: the session has no request or no reply, or already has a reward, or the record
                cannot be written.
        """
        self._check(name)
        if name not in self._open:
            raise ApiError(
                404,
                "the session has no request. Send a request before the reward",
                code="session_not_found",
            )
        # A copy, as in `_make_room`.
        if not any(conversation.marks for conversation in [*self._open[name].all]):
            raise ApiError(
                409,
                "the session has no reply that a reward could score: its requests were refused,"
                " given up, or still run. Send a request that succeeds before the reward",
                code="session_without_reply",
            )
        try:
            self._record(name, ask.reward, ask.parts)
        except (UserError, ValueError) as error:
            raise ApiError(500, "the reward could not be written to the record") from error
        del self._open[name]
        self._ended[name] = None
        if len(self._ended) > MAX_ENDED:
            del self._ended[next(iter(self._ended))]

    async def _turn(
        self, name: str, ask: Ask, make: Callable[[Conversations], Prompt]
    ) -> SessionTurn:
        self._check(name)
        if ask.samples > 1:
            field = "best_of" if ask.best_of else "n"
            raise bad_request(
                f"{field} = {ask.samples}: a request of a session gets one reply. Set {field} = 1",
                field,
            )
        if ask.search:
            raise bad_request(
                "search: a request of a session gets the one reply that is sampled. Remove it",
                "search",
            )
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
                "the name of a session must have 1 to 128 letters, digits, '.', '_' and '-'"
            )
        if name in self._ended:
            raise ApiError(
                410,
                "the session has ended, because its reward was posted. Begin another session",
                code="session_ended",
            )

    def _make_room(self) -> None:
        """If there are too many sessions, remove the oldest one without a request in progress."""
        if len(self._open) < MAX_SESSIONS:
            return
        idle = (
            name
            for name, conversations in self._open.items()
            # A copy: a request in the thread of `run` may change the list meanwhile.
            if not any(conversation.busy for conversation in [*conversations.all])
        )
        oldest = next(idle, None)
        if oldest is None:
            raise ApiError(503, "too many sessions are open. Try again later")
        del self._open[oldest]
