"""One generator for all ranks of a machine. One rank owns it, and all ask it over a Unix socket.

The generator works in an event loop in a thread of its own. So it answers while its owner trains or
waits for the other ranks.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Coroutine, Mapping
from contextlib import ExitStack, suppress
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor

from ..backends.generator_server import GeneratorServer
from ..backends.linked_sampler import LinkedSampler
from ..errors import UserError
from ..event_loop import BackgroundLoop
from ..processes.child import ChildError, ChildSilent, RequestFailed, last_lines
from ..processes.connection import Connection
from ..processes.program import Requests
from ..rollout.generator import EngineLost, Generator


class SharedGenerator:
    """Serves a generator to the processes of this machine and user.

    Args:
        generator: samples. It is used in the event loop of this object alone.

    Attributes:
        path: path of the socket.
    """

    def __init__(self, generator: Generator) -> None:
        self._generator = generator
        # Paths of sockets are limited to about 100 characters.
        self._folder = TemporaryDirectory(prefix="sixfold-ranks-", dir="/tmp")
        self.path = f"{self._folder.name}/generator"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.path)
        self._listener.listen()
        self._listener.setblocking(False)
        self._loop = BackgroundLoop()
        self._tasks = set[asyncio.Task[None]]()
        self._loop.run(self._begin(self._accept()))

    async def load(self, weights: Mapping[str, Tensor], version: int) -> int:
        """As `Generator.load`. The weights are read in another thread."""
        return await asyncio.to_thread(self._loop.run, self._generator.load(weights, version))

    def close(self) -> None:
        """Hang up. The generator stays open. A second call does nothing."""
        with ExitStack() as ending:
            ending.callback(self._folder.cleanup)
            ending.callback(self._listener.close)
            ending.callback(self._loop.close)

    async def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self) -> None:
        while True:
            connection, _ = await asyncio.get_running_loop().sock_accept(self._listener)
            await self._begin(self._serve(connection))

    async def _serve(self, connection: socket.socket) -> None:
        """Answer the requests of one process until it hangs up."""
        connection.setblocking(True)
        with connection:
            requests = Requests(os.dup(connection.fileno()), connection.fileno())
            try:
                with suppress(BrokenPipeError):
                    await GeneratorServer(requests, self._generator).run()
            except Exception as error:  # noqa: BLE001  the other side raises it
                with suppress(BrokenPipeError):
                    requests.fail(str(error) if isinstance(error, UserError) else "")
            finally:
                with suppress(OSError):  # the other side has gone
                    connection.shutdown(socket.SHUT_RDWR)  # ends the thread that reads


class GeneratorOfRanks(LinkedSampler):
    """The shared generator of a machine, for one of its ranks. See `Generator`.

    Args:
        path: path of its socket.
        silence_s: longest time without a heartbeat while a call is open, in seconds.
        shared: it, if this rank has it.

    Attributes:
        version: version of the weights; -1 before the first `load`.

    Raises:
        EngineLost: the rank that has it has ended.
    """

    def __init__(self, path: str, silence_s: float, shared: SharedGenerator | None) -> None:
        super().__init__("the samplers of this machine", silence_s)
        self.version = -1
        self._shared = shared
        try:
            self._connect(Connection(path))
        except OSError as error:
            raise EngineLost(f"{self._name} cannot be reached: {error}") from error

    async def load(self, weights: Mapping[str, Tensor], version: int) -> int:
        """As `Generator.load`. All ranks must call it.

        Ranks that have no generator only read the weights, which all ranks gather together.
        """
        running = 0
        if self._shared:
            running = await self._shared.load(weights, version)
        else:
            for _ in weights.values():
                pass
        self.version = version
        return running

    async def sleep(self) -> None:
        """Does nothing: other ranks may still sample."""

    def close(self) -> None:
        """Hang up. Calls that are waiting raise GeneratorClosed."""
        if self._link:
            self._link.close()

    def _lost(self, error: ChildError) -> EngineLost:
        if isinstance(error, RequestFailed):
            return EngineLost(f"{self._name} failed:\n{last_lines(str(error))}")
        said = f": {error}" if isinstance(error, ChildSilent) else f" {error}"
        return EngineLost(f"the rank with {self._name}{said}")
