"""The pipes of a running job: writes its input, and reads its output up to a limit."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from contextlib import suppress

_READ_BYTES = 1 << 18


class Streams:
    """Pipes in the running event loop.

    Args:
        most: maximum bytes of all outputs together.
        overflow: called once when there is more.

    Attributes:
        full: True if there was more.
    """

    def __init__(
        self,
        outputs: Sequence[int],
        stdin: int,
        content: bytes,
        most: int,
        overflow: Callable[[], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._read = {descriptor: bytearray() for descriptor in outputs}
        self._outputs = list(outputs)
        self._open = {*outputs, stdin}
        self._unsent = memoryview(content)
        self._room = most
        self._overflow = overflow
        self.full = False
        for descriptor in outputs:
            self._loop.add_reader(descriptor, self._receive, descriptor)
        self._loop.add_writer(stdin, self._send, stdin)

    def output(self, index: int) -> bytes:
        """What has been read from one output."""
        return bytes(self._read[self._outputs[index]])

    def drain(self) -> None:
        """Read what is left in the pipes, without waiting."""
        for descriptor in self._outputs:
            while descriptor in self._open and not self.full and self._receive(descriptor):
                pass

    def close(self) -> None:
        for descriptor in list(self._open):
            self._close(descriptor)

    def _receive(self, descriptor: int) -> bool:
        """Read once. False if there is nothing."""
        try:
            data = os.read(descriptor, _READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self._close(descriptor)
            return False
        self._read[descriptor] += data[: self._room]
        if len(data) > self._room:
            self.full = True
            for output in self._outputs:
                self._loop.remove_reader(output)
            self._overflow()
        self._room = max(0, self._room - len(data))
        return True

    def _send(self, descriptor: int) -> None:
        """Write as much of the input as the pipe takes."""
        with suppress(BlockingIOError):
            try:
                while self._unsent:
                    self._unsent = self._unsent[os.write(descriptor, self._unsent) :]
            except BrokenPipeError:  # the program does not read it
                pass
            self._close(descriptor)

    def _close(self, descriptor: int) -> None:
        self._loop.remove_reader(descriptor)
        self._loop.remove_writer(descriptor)
        self._open.remove(descriptor)
        os.close(descriptor)
