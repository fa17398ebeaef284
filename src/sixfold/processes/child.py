"""A Python program that answers requests over a private pipe: the parent's side.

Contract, for every program that `Child` starts:

- It is started by exec, never by fork: this is safe beside torch's threads, and copies no lock.
- Requests and replies are bytes after a header (`program.HEADER`). Replies carry numbers and come
  in the order of the requests. A reply with an unexpected number or a malformed message counts as
  the death of the process, so an answer can never reach the wrong request. A message from another
  process, such as a forked copy of the program, is ignored.
- Every wait can have a time limit. A note from the program restarts the time limit.
- The next read detects a death. It first delivers the messages that were sent before.
- The program has its own process group, so Ctrl-C at the terminal does not reach it: the run
  finishes its step, then closes it.
- The program and all processes that it has started end on `close`, or when this process ends for
  any reason. Ignoring signals does not prevent it.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from . import program
from .program import ANSWER, ERROR, HEADER, MARK, NOTE, REQUEST

STOP_TIMEOUT_S = 5.0  # time for a supervisor to end its process tree
_READ_BYTES = 1 << 18
_LAST_BYTES, _LAST_LINES = 8192, 5


class ChildError(RuntimeError):
    """A request got no answer."""


class ChildEnded(ChildError):
    """The process is dead or counts as dead. The text continues "the process ..."."""


class ChildSilent(ChildError):
    """The process has sent nothing, or read nothing, for too long. Close it."""


class RequestFailed(ChildError):
    """The program raised an exception. The text is its traceback."""


class Message(NamedTuple):
    """A message of the program: an answer, or a note that comes before the next answer."""

    is_answer: bool
    body: bytes


class Peer:
    """Sends requests to a program, and reads its replies (`program.Requests`).

    Args:
        requests: descriptor to write requests to. It must not block.
        replies: descriptor to read replies from.
        limit: maximum bytes of a reply.

    Attributes:
        pid: process of the program. 0 before its first message.
        replies: descriptor to poll before `arrived`.
        requests: descriptor to poll before `flush`.
        closed: True once `close` was called.
    """

    def __init__(self, requests: int, replies: int, limit: int = 1 << 40) -> None:
        self.requests, self.replies = requests, replies
        self.pid = 0
        self.closed = False
        self._limit = limit
        self._asked = self._answered = 0  # number of the last request, and of the last answer
        self._unread = bytearray()
        self._unsent: deque[memoryview] = deque()

    @property
    def owed(self) -> int:
        """Number of answers that have not arrived."""
        return self._asked - self._answered

    def send(self, body: bytes, timeout_s: float | None = None) -> None:
        """Send a request. If the process has died, the next read reports it, not this call.

        Args:
            timeout_s: maximum seconds in which the process reads nothing. None: no limit.

        Raises:
            ChildSilent: if the process stops reading.
        """
        self.post(body)
        while not self.flush():
            _wait_for(self.requests, select.POLLOUT, timeout_s)

    def post(self, body: bytes, answers: int = 1) -> bool:
        """Send as much of a request as is possible without waiting.

        Args:
            answers: number of answers that the program gives to the request. 0: it may send notes.

        Returns:
            True if everything is sent. Otherwise call `flush` when `requests` is writable.
        """
        header = HEADER.pack(MARK, REQUEST, answers, self._asked + 1, len(body))
        self._unsent.append(memoryview(header + body))
        self._asked += answers
        return self.flush()

    def flush(self) -> bool:
        """Send what `post` has left, without waiting. True if everything is sent."""
        try:
            while self._unsent:
                rest = self._unsent[0][os.write(self.requests, self._unsent[0]) :]
                if rest:
                    self._unsent[0] = rest
                else:
                    self._unsent.popleft()
        except BlockingIOError:
            return False
        except BrokenPipeError:  # the next read reports the death
            self._unsent.clear()
        return True

    def receive(self, timeout_s: float | None = None) -> bytes:
        """Wait for all answers that are owed, and return the last one.

        Args:
            timeout_s: maximum seconds without a message. None: no limit.

        Raises:
            ChildEnded: if the process has ended, or sent something that is not a reply.
            ChildSilent: if no message has come for `timeout_s`.
            RequestFailed: if the program raised an exception.
        """
        body = b""
        while self.owed:
            if message := self._next():
                body = message.body
            else:
                self._read(timeout_s)
        return body

    def arrived(self) -> Iterator[Message]:
        """Messages that have arrived. Call it when `replies` is readable, and take all of them.

        It never waits: after a signal, an event loop may call a reader twice for one message.

        Raises:
            ChildEnded: as in `receive`, after the messages that came before.
            RequestFailed: if the program raised an exception.
        """
        poll = select.poll()
        poll.register(self.replies, select.POLLIN)
        if poll.poll(0):
            self._read(None)
        while message := self._next():
            yield message

    def _read(self, timeout_s: float | None) -> None:
        """Read once from the pipe."""
        if timeout_s is not None:
            _wait_for(self.replies, select.POLLIN, timeout_s)
        try:
            data = os.read(self.replies, _READ_BYTES)
        except ConnectionResetError:
            data = b""
        if not data:
            raise self._death()
        self._unread += data

    def _next(self) -> Message | None:
        """Remove the next message from the buffer. None if it is not complete."""
        while len(self._unread) >= HEADER.size:
            mark, kind, pid, number, length = HEADER.unpack_from(self._unread)
            if mark != MARK or length > self._limit:
                raise ChildEnded("sent something that is not a reply")
            end = HEADER.size + length
            if len(self._unread) < end:
                return None
            body = bytes(self._unread[HEADER.size : end])
            del self._unread[:end]
            self.pid = self.pid or pid
            if pid == self.pid:
                return self._check_message(kind, number, body)
        return None

    def _check_message(self, kind: bytes, number: int, body: bytes) -> Message:
        # A program that sends notes of its own accord may also fail while no answer is owed.
        expected = (ANSWER, NOTE, ERROR) if self.owed else (NOTE, ERROR)
        if number != self._answered + 1 or kind not in expected:
            raise ChildEnded("sent a reply to another request")
        if kind != NOTE and self.owed:
            self._answered = number
        if kind == ERROR:
            raise RequestFailed(body.decode(errors="replace"))
        return Message(kind == ANSWER, body)

    def close(self, grace_s: float = program.GRACE_S) -> None:
        """End the connection, and what has been started for it."""
        raise NotImplementedError

    def _death(self) -> ChildEnded:
        """Error that says why the program sends nothing any more."""
        raise NotImplementedError


class Child(Peer):
    """A program in another process.

    Args:
        target: module of Sixfold, or path of a file, that defines `serve(requests: Requests)`.
        python: interpreter for a file. None: this interpreter, with the same import path.
        descriptors: file descriptors that the program inherits under the same numbers.
        keeps_output: keep standard output and error for `last_words`, off the terminal.
        output: descriptor for standard output and error. None: those of this process.
        reply_limit: maximum bytes of a reply.

    Attributes:
        process: the supervisor. Its exit code is that of the program.
    """

    def __init__(
        self,
        target: str,
        *,
        python: str | None = None,
        environment: Mapping[str, str] | None = None,
        descriptors: Sequence[int] = (),
        keeps_output: bool = False,
        output: int | None = None,
        reply_limit: int = 1 << 40,
    ) -> None:
        # A file, not a pipe: nobody reads a pipe, so it would fill up and block the process.
        self._output = tempfile.TemporaryFile() if keeps_output else None  # noqa: SIM115
        variables = {**os.environ, **(environment or {})}
        if python is None:
            # As Python itself, skip entries that are not text, e.g. a Path of a notebook.
            folders = [folder or os.getcwd() for folder in sys.path if isinstance(folder, str)]
            variables["PYTHONPATH"] = os.pathsep.join(folders)
        (requests, own), (own_replies, replies) = os.pipe(), os.pipe()
        os.set_blocking(own, False)
        super().__init__(own, own_replies, reply_limit)
        # -P: the files beside program.py must not shadow modules.
        command = [python or sys.executable, "-P", program.__file__]
        try:
            self.process = subprocess.Popen(
                [*command, str(os.getpid()), str(requests), str(replies), target],
                stdin=subprocess.DEVNULL,
                stdout=self._output or output,
                stderr=self._output or output,
                pass_fds=(requests, replies, *descriptors),
                process_group=0,
                env=variables,
            )
        except OSError:
            os.close(self.requests)
            os.close(self.replies)
            raise
        finally:
            os.close(requests)
            os.close(replies)

    def last_words(self) -> str:
        """The last lines of the output that `keeps_output` keeps, indented."""
        if self._output is None:
            return ""
        self._output.seek(max(0, self._output.seek(0, os.SEEK_END) - _LAST_BYTES))
        return last_lines(self._output.read().decode(errors="replace"))

    def close(self, grace_s: float = program.GRACE_S) -> None:
        """End the program and all processes that it has started: close its pipe, then kill them.

        Args:
            grace_s: time to end by itself. More than `program.GRACE_S` has no effect.
        """
        if self.closed:
            return
        self.closed = True
        os.close(self.requests)
        try:
            self.process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self.process.terminate()
        try:
            self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            # A process that waits for a broken disk or device cannot be killed. Leave it.
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(STOP_TIMEOUT_S)
        os.close(self.replies)
        if self._output is not None:
            self._output.close()

    def _death(self) -> ChildEnded:
        try:
            code = self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return ChildEnded("closed its pipe")
        if code >= 0:
            return ChildEnded(f"ended with exit code {code}")
        memory = "; the machine may be out of memory" if code == -signal.SIGKILL else ""
        return ChildEnded(f"was killed by {_signal_name(-code)}{memory}")


def supervised(command: Sequence[str]) -> list[str]:
    """Command line that runs a command and ends all that it has started when it ends, in whatever
    session. It also ends when its standard input is closed, or this process ends.
    """
    inner = [str(os.getpid()), "0", "1", program.COMMAND, *command]
    return [sys.executable, "-P", program.__file__, *inner]


def last_lines(text: str) -> str:
    """The last lines of a text, indented: for the end of an error message."""
    lines = text.strip().splitlines()[-_LAST_LINES:]
    return "\n".join(f"  {line}" for line in lines) or "  (nothing)"


def _signal_name(number: int) -> str:
    return {s.value: s.name for s in signal.Signals}.get(number, f"signal {number}")


def _wait_for(descriptor: int, event: int, timeout_s: float | None) -> None:
    poll = select.poll()
    poll.register(descriptor, event)
    if not poll.poll(None if timeout_s is None else 1000 * timeout_s):
        raise ChildSilent(f"no sign of life for {timeout_s:g} s")
