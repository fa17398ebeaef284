"""Answers requests for samples with a `Generator`, one task each, in one event loop.

A message is a pickled list of requests, tables with a number `id` and a key "do". They run
together. A reply has the same `id`:

    generate  tokens [id], params, key, stops, priority
              -> sampled (`rollout/generator.py`)
    score     tokens [id], temperature
              -> logp of all tokens but the first
    abort     ends the request with this number, if it still runs
              -> aborted: true

A request that can never run is answered with `refused`: the reason. Any other exception ends `run`.
Empty notes are heartbeats.
"""

from __future__ import annotations

import asyncio
import pickle
import threading
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from functools import partial
from types import MappingProxyType
from typing import Any

from ..processes.program import Requests
from ..rollout.generator import Activity, Generator

BEAT_S = 1.0

Kinds = Mapping[str, Callable[..., Coroutine[Any, Any, dict[str, Any]]]]
"""Value of "do" -> function that answers such requests. Its arguments are their other entries."""


class GeneratorServer:
    """Answers the requests that another process sends over one connection.

    Args:
        requests: the connection: requests come from it, and replies go to it.
        generator: samples.
        activity: returns the counters that every reply has as `activity`.
        kinds: more kinds of requests.
    """

    def __init__(
        self,
        requests: Requests,
        generator: Generator,
        activity: Callable[[], Activity | None] = lambda: None,
        kinds: Kinds = MappingProxyType({}),
    ) -> None:
        self._requests = requests
        self._generator = generator
        self._activity = activity
        self._kinds: Kinds = {"generate": self._generate, "score": self._score, **kinds}
        self._tasks: dict[int, asyncio.Task[dict[str, Any]]] = {}
        self._ended = False
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        """Serve until the peer hangs up. Requests that then run are cancelled, and have ended.

        Raises:
            BrokenPipeError: the peer has gone.
            Exception: of a request that should have run.
        """
        threading.Thread(target=self._receive, daemon=True).start()
        try:
            while not self._failed.done():
                self._requests.note()
                await asyncio.wait([self._failed], timeout=BEAT_S)
            self._failed.result()
        finally:
            self._ended = True
            for task in (open_tasks := [*self._tasks.values()]):
                task.cancel()
            if open_tasks:
                await asyncio.wait(open_tasks)

    def _receive(self) -> None:
        """Read requests, in a thread: otherwise the peer would wait for the engine."""
        loop, failure = self._failed.get_loop(), None
        try:
            for body in self._requests:
                loop.call_soon_threadsafe(self._take, pickle.loads(body))
        except Exception as error:  # noqa: BLE001  ends `run`, and the peer hears why
            failure = error
        with suppress(RuntimeError):  # the event loop has ended
            loop.call_soon_threadsafe(self._end, failure)

    def _end(self, error: Exception | None = None) -> None:
        if self._failed.done():
            return
        if error:
            self._failed.set_exception(error)
        else:
            self._failed.set_result(None)

    def _take(self, requests: list[dict[str, Any]]) -> None:
        for request in () if self._ended else requests:
            number, do = request.pop("id"), request.pop("do")
            if do == "abort":
                self._abort(number)
                continue
            task = asyncio.create_task(self._kinds[do](**request))
            self._tasks[number] = task
            task.add_done_callback(partial(self._answer, number))

    def _abort(self, number: int) -> None:
        task = self._tasks.get(number)
        if task is None:
            self._reply(number, aborted=True)
        else:
            task.cancel()  # if it has just ended, its answer is on its way

    def _answer(self, number: int, task: asyncio.Task[dict[str, Any]]) -> None:
        del self._tasks[number]
        if task.cancelled():
            self._reply(number, aborted=True)
        elif (error := task.exception()) is None:
            self._reply(number, **task.result())
        elif isinstance(error, ValueError):  # of this request alone
            self._reply(number, refused=str(error))
        elif isinstance(error, Exception):
            self._end(error)

    def _reply(self, number: int, **reply: Any) -> None:
        if self._ended:
            return
        told = {"id": number, "last": True, "activity": self._activity()}
        with suppress(BrokenPipeError):  # the next heartbeat reports it
            self._requests.note(pickle.dumps(told | reply))

    async def _generate(self, **request: Any) -> dict[str, Any]:
        return {"sampled": await self._generator.generate(**request)}

    async def _score(self, tokens: list[int], temperature: float) -> dict[str, Any]:
        return {"logp": await self._generator.score(tokens, temperature)}
