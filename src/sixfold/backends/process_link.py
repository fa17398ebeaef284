"""Concurrent requests to a process that samples, in a thread of their own.

A request is a table with a number. The process sends any number of replies, as notes with the same
number (`vllm_worker.py`, `generator_server.py`). The thread is the only one that uses the pipe, so
a full pipe or a slow engine step never blocks an event loop.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import count
from queue import SimpleQueue
from typing import Any

from ..processes.child import ChildError, ChildSilent, Peer
from ..rollout.generator import GeneratorClosed

_READ_BYTES = 4096


Encode = Callable[[Sequence[Mapping[str, Any]]], list[bytes]]


def json_messages(requests: Sequence[Mapping[str, Any]]) -> list[bytes]:
    """One JSON message for each request."""
    return [json.dumps(request).encode() for request in requests]


class Call:
    """One request. Use it in the event loop that made it.

    Args:
        number: number of the request.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.ended = False
        self._loop = asyncio.get_running_loop()
        self._inbox: asyncio.Queue[dict[str, Any] | Exception] = asyncio.Queue()

    async def reply(self) -> dict[str, Any]:
        """Wait for the next reply.

        Raises:
            ValueError: the process refuses the request.
            GeneratorClosed: the process has ended, or `Link.close` was called.
        """
        item = await self._inbox.get()
        if isinstance(item, Exception):
            self.ended = True
            raise item
        self.ended = bool(item["last"])
        if refused := item.get("refused"):
            raise ValueError(str(refused))
        return item

    async def aborted(self) -> None:
        """Wait until the process has aborted the request."""
        while not isinstance(item := await self._inbox.get(), Exception):
            if item.get("aborted") or item["last"]:  # it may have ended before the abort arrived
                return

    def put(self, item: dict[str, Any] | Exception) -> None:
        with suppress(RuntimeError):  # the event loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._inbox.put_nowait, item)


class Link:
    """Sends requests to a child and delivers the replies.

    Requests that one iteration of the event loop makes are encoded together.

    Args:
        name: what the process is, for messages.
        child: the process. It has answered all requests so far.
        patience: longest time without a message while a request is open, in seconds.
        told: converts the end of the process to the error that callers get.
        encode: converts requests to messages.
        decode: converts a message to a reply.
    """

    def __init__(
        self,
        name: str,
        child: Peer,
        patience: Callable[[], float],
        told: Callable[[ChildError], GeneratorClosed],
        encode: Encode = json_messages,
        decode: Callable[[bytes], dict[str, Any]] = json.loads,
    ) -> None:
        self._name = name
        self._encode = encode
        self._decode = decode
        self._child = child
        self._patience = patience
        self._told = told
        self._numbers = count()
        self._lock = threading.Lock()
        self._calls: dict[int, Call] = {}
        self._made: list[Mapping[str, Any]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._posts: SimpleQueue[bytes] = SimpleQueue()
        self._lost: GeneratorClosed | None = None
        self._closing = False
        self._last = 0.0  # when the last message arrived, or the first open request was made
        self._wake, self._waker = os.pipe()
        os.set_blocking(self._waker, False)
        self._thread = threading.Thread(target=self._run, name=f"{name} link", daemon=True)
        self._thread.start()

    @asynccontextmanager
    async def call(self, request: Mapping[str, Any]) -> AsyncIterator[Call]:
        """Send a request. Leaving the block before its last reply aborts it.

        Raises:
            GeneratorClosed: the process has ended, or `close` was called.
        """
        call = Call(next(self._numbers))
        with self._lock:
            self._check_open()
            if not self._calls:
                self._last = time.monotonic()
            self._calls[call.number] = call
            self._post({"id": call.number, **request})
        try:
            yield call
        finally:
            await self._end(call)

    async def _end(self, call: Call) -> None:
        """Abort a call that is still open, and wait until the process has done so."""
        try:
            if not call.ended and self._lost is None and not self._closing:
                self._post({"id": call.number, "do": "abort"})
                await call.aborted()
        finally:
            with self._lock:
                del self._calls[call.number]

    def close(self) -> None:
        """End the thread and the process. Open calls raise GeneratorClosed."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
            self._wake_up()
        self._thread.join()
        self._child.close()
        os.close(self._wake)
        os.close(self._waker)

    def _check_open(self) -> None:
        if self._lost is not None:
            raise _again(self._lost)
        if self._closing:
            raise self._closed()

    def _closed(self) -> GeneratorClosed:
        return GeneratorClosed(f"{self._name} has been closed")

    def _post(self, request: Mapping[str, Any]) -> None:
        loop = asyncio.get_running_loop()
        if not self._made or self._loop is not loop:  # an earlier event loop may have ended
            self._loop = loop
            loop.call_soon(self._post_all)
        self._made.append(request)

    def _post_all(self) -> None:
        made, self._made = self._made, []
        for message in self._encode(made):
            self._posts.put(message)
        with self._lock:
            if not self._closing:
                self._wake_up()

    def _wake_up(self) -> None:
        with suppress(BlockingIOError):  # the pipe is full, so the thread wakes up anyway
            os.write(self._waker, b"x")

    def _run(self) -> None:
        """The thread: exchange messages until the process ends or `close` is called."""
        lost = self._closed()
        try:
            self._exchange()
        except ChildError as error:
            lost = self._told(error)
        finally:  # also after an unexpected error: nobody may wait for ever
            self._child.close(grace_s=0.0)
            with self._lock:
                self._lost = lost
                for call in self._calls.values():
                    call.put(_again(lost))

    def _exchange(self) -> None:
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        poll.register(self._child.replies, select.POLLIN)
        sent = True
        while not self._closing:
            ready = {descriptor for descriptor, _ in poll.poll(self._wait_ms())}
            if self._wake in ready:
                os.read(self._wake, _READ_BYTES)
                while not self._posts.empty():
                    self._child.post(self._posts.get(), answers=0)
            if sent and not self._child.flush():
                poll.register(self._child.requests, select.POLLOUT)
                sent = False
            elif not sent and self._child.flush():
                poll.unregister(self._child.requests)
                sent = True
            if self._child.replies in ready:
                self._last = time.monotonic()
                for message in self._child.arrived():
                    if message.body:  # otherwise it is a heartbeat
                        self._deliver(self._decode(message.body))
            if self._wait_ms() == 0:
                raise ChildSilent(f"no sign of life for {self._patience():g} s")

    def _wait_ms(self) -> float | None:
        """Time until the process counts as silent. None: no request is open."""
        if not self._calls:
            return None
        return max(0.0, 1000 * (self._last + self._patience() - time.monotonic()))

    def _deliver(self, reply: dict[str, Any]) -> None:
        with self._lock:
            call = self._calls.get(int(reply["id"]))
        if call is not None:  # otherwise nobody waits any more
            call.put(reply)


def _again(error: GeneratorClosed) -> GeneratorClosed:
    """Copy of an error. If several tasks raise the same object, it becomes its own context."""
    return type(error)(*error.args)
