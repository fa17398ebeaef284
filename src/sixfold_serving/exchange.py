"""One HTTP request for completions, with its job for the engine's thread and its deltas."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any

from sixfold.rollout.engine_job import Delta, Job, RecordError
from sixfold.rollout.engine_thread import EngineFailed, EngineThread, QueueFull
from sixfold.rollout.generator import GeneratorClosed

from .api_error import ApiError, bad_request
from .sessions import SessionTurn

ENGINE_FAILED = "the engine has failed: see the server's log"


@dataclass(eq=False)
class Exchange:
    """One request.

    Attributes:
        job: job for the engine's thread, which puts the deltas into the inbox.
        inbox: deltas, or the error that ended the job.
        created: creation time, in seconds since the epoch.
        turn: the request's turn in its session. None for a request without a session.
        shown: function that makes a chat message of the last delta with the whole text. None for
            plain text.
        open: number of choices whose last delta has not been read.
    """

    id: str
    job: Job
    inbox: asyncio.Queue[Delta | Exception]
    created: float
    turn: SessionTurn | None = None
    shown: Callable[[Delta], dict[str, Any]] | None = None
    open: int = field(init=False)

    def __post_init__(self) -> None:
        self.open = self.job.choices

    def prompt_of(self, choice: int) -> int:
        """Index of the prompt of a choice."""
        return choice // len(self.job.samples)

    def call_id(self, choice: int, number: int) -> str:
        """Id of a tool call: nine characters, because some chat templates require this length.

        Args:
            number: index of the call in the choice.
        """
        return blake2b(f"{self.id}/{choice}/{number}".encode()).hexdigest()[:9]

    def submit(self, thread: EngineThread) -> None:
        """Queue the job.

        Raises:
            ApiError: 400 for more prompts than the queue can hold, 429 if the queue is full, 503 if
                the server is stopping or the engine has failed.
        """
        prompts = len(self.job.prompts)
        if thread.max_queue is not None and prompts > thread.max_queue:
            raise bad_request(
                f"prompt: {prompts} prompts exceed the queue of {thread.max_queue} prompts. Send"
                " fewer per request",
                "prompt",
            )
        try:
            thread.submit(self.job)
        except QueueFull as error:
            raise failure(error) from error
        except GeneratorClosed as error:
            raise unavailable(error) from error

    async def deltas(self) -> AsyncIterator[Delta]:
        """Deltas of all choices, until all have ended. Raises ApiError if the job failed."""
        text = ""
        while self.open:
            item = await self.inbox.get()
            if isinstance(item, Exception):
                self.open = 0
                raise failure(item) from item
            self.open -= item.finish_reason is not None
            text += item.text
            if self.turn and item.sequence is not None:
                whole = replace(item, text=text)
                await self.turn.told(item.sequence, text, self.shown and self.shown(whole))
            yield item

    async def give_up(self) -> None:
        """Remove an unanswered request from its session."""
        if self.turn:
            await self.turn.give_up()

    async def answers(self) -> list[Delta]:
        """One complete delta per choice, in order. Only for a job that does not stream."""
        return sorted([delta async for delta in self.deltas()], key=lambda delta: delta.index)


def unavailable(error: GeneratorClosed) -> ApiError:
    """Refusal of a request, because the server is stopping or the engine has failed."""
    failed = isinstance(error, EngineFailed)
    return ApiError(503, ENGINE_FAILED if failed else "the server is stopping")


def failure(error: Exception) -> ApiError:
    """Answer for work that the engine refuses or has ended with an error."""
    if isinstance(error, QueueFull):
        return ApiError(429, str(error), code="rate_limit_exceeded", headers={"Retry-After": "1"})
    if isinstance(error, EngineFailed):
        return ApiError(500, ENGINE_FAILED)
    if isinstance(error, GeneratorClosed):
        return unavailable(error)
    if isinstance(error, RecordError):
        return ApiError(500, "the exchange could not be written to the record")
    return bad_request(str(error), "max_tokens")  # the request cannot fit into the KV cache


def noise_key(prompt: Sequence[int]) -> str:
    """Key of a prompt for the sampling noise.

    With the same seed, equal prompts get the same completions, and different prompts get different
    noise.
    """
    return "serve:" + ",".join(map(str, prompt))
