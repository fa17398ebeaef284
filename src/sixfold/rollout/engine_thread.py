"""The thread that owns an engine. Other threads submit jobs and receive deltas.

The thread steps the engine while there is work. Commands arrive through a queue, which is emptied
between two steps. A job therefore joins the running batch at the next step, and an abort frees the
blocks of a sequence before the next token. Deltas are sent to the event loop once per step, and
only if there are any.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from math import exp
from queue import SimpleQueue
from typing import TypeVar

from ..engine.engine import Engine
from ..engine.sequence import Request
from ..engine.sequence import Sequence as EngineSequence
from ..engine.weights import NamedTensors
from ..processes.deadline import Pulse
from ..renderer.renderer import Renderer
from ..timeline import Busy
from ..types import FinishReason
from .engine_guard import ended, fail
from .engine_job import Choice, Delta, Job, RecordError, refuse_all, send_all
from .generator import GeneratorClosed, Peers
from .scoring_queue import ScoringQueue
from .thread_settings import ThreadSettings

log = logging.getLogger("sixfold.engine")
T = TypeVar("T")

USAGE_SECONDS = 0.05
"""Largest age of `EngineThread.usage` in a busy engine, in seconds. Measuring it takes up to 1 % of
a step.
"""
HELD_S = 0.001
"""Pause of an engine whose step sampled nothing, because tokens are due for other weights."""
EXIT_SECONDS = 10.0
"""Longest wait for the last step when the interpreter exits."""


class QueueFull(RuntimeError):
    """Too many prompts are waiting."""


class EngineFailed(GeneratorClosed):
    """A step of the engine failed. All requests are refused from then on."""


class VersionNotGreater(ValueError):
    """New weights must have a greater version than the current weights."""


@dataclass(frozen=True)
class _Command:
    """Work for the engine's thread, done between two steps of the engine.

    Attributes:
        run: does the work.
        refuse: called with the reason, instead of `run`, if the thread ends first.
    """

    run: Callable[[], None]
    refuse: Callable[[GeneratorClosed], None]


class EngineThread:
    """Runs an engine in its own thread and serves jobs with it.

    The thread starts with the first command. It ends at `close`, when the interpreter exits, and
    when the object is no longer used. Between two commands the thread does not touch the engine:
    while no job is open, the owner of the engine may use it directly.

    Args:
        engine: the engine.
        renderer: decodes completions. Used only by this thread. None if no job has text.
        max_queue: maximum number of prompts that may wait to start; None for no limit.

    Attributes:
        aborted: number of jobs with an aborted choice.
        rate: sampled tokens per second.
        usage: running sequences and KV cache blocks. Other threads may read it.
        failure: the error that ended the thread, or None.
        pulse: signs of life: every command and every step of the engine.
        busy: the time in which the engine computes.
    """

    def __init__(
        self, engine: Engine, renderer: Renderer | None, max_queue: int | None = None
    ) -> None:
        self.engine = engine
        self.max_queue = max_queue
        self.aborted = 0
        self.rate = Rate()
        self.usage = engine.usage()
        self.failure: BaseException | None = None
        self.pulse = Pulse()
        self.busy = Busy()
        self._renderer = renderer
        self._commands: SimpleQueue[_Command | None] = SimpleQueue()
        self._choices: dict[tuple[Request, int], Choice] = {}
        self._watched: set[Choice] = set()
        self._scoring = ScoringQueue(engine)
        self._outgoing: dict[asyncio.AbstractEventLoop, list[tuple[Job, Delta | Exception]]] = {}
        self._arriving = 0
        self._lock = threading.Lock()
        self._closing = False
        self._measured = 0.0
        # The thread holds only a weak reference while it waits. Otherwise it would keep the engine,
        # with its KV cache, of an owner that forgot to close it.
        self._thread = threading.Thread(
            target=_serve,
            args=(weakref.ref(self), self._commands, ThreadSettings.here()),
            name="engine",
            daemon=True,
        )
        weakref.finalize(self, _end, self._thread, self._commands)

    @property
    def waiting(self) -> int:
        """Number of prompts with samples that have not started."""
        return self._arriving + len(self.engine.scheduler.waiting)

    def submit(self, *jobs: Job) -> None:
        """Queue jobs for the engine. They join the same step.

        Their deltas go to the event loop that runs in the caller.

        Raises:
            QueueFull: if too many prompts are waiting.
            GeneratorClosed: after `close`, or after a failure of the engine.
        """
        for job in jobs:
            job.loop = asyncio.get_running_loop()
        prompts = sum(len(job.prompts) for job in jobs)
        with self._lock:
            self._check_open()
            if self.max_queue is not None and self.waiting + prompts > self.max_queue:
                raise QueueFull(f"{self.waiting} prompts are already waiting. Try again later")
            self._arriving += prompts
            # Under the lock: otherwise a job accepted while the thread ends would get no answer.
            self._send(partial(self._admit_all, jobs), partial(refuse_all, jobs))

    def abort(self, job: Job, choice: int | None = None) -> Future[None]:
        """Abort a job, or one of its choices. Does nothing if it has ended.

        Args:
            job: the job.
            choice: index of the choice; None for all.

        Returns:
            Future that is done when the engine holds nothing for the job or the choice.
        """
        done: Future[None] = Future()
        with self._lock:
            if self._closing or self.failure is not None or self._thread.ident is None:
                done.set_result(None)
            else:
                self._send(partial(self._drop, job, choice, done), lambda _: ended(done))
        return done

    def load(self, tensors: NamedTensors, version: int) -> Future[int]:
        """Load weights between two steps, while jobs are running (`Engine.load_weights`).

        Args:
            tensors: the new weights, by name.
            version: version of the new weights. It must be greater than the current one.

        Returns:
            Future with the number of running sequences that continue with the new weights. After
            these errors the old weights stay in use: VersionNotGreater, and ValueError for tensors
            that do not fit the model.

        Raises:
            GeneratorClosed: after `close`, or after a failure of the engine.
        """
        return self.call(partial(load_newer, tensors, version))

    def call(self, function: Callable[[Engine], T]) -> Future[T]:
        """Run `function(engine)` in the engine's thread, between two steps.

        Returns:
            Future with the result, or with the function's error.

        Raises:
            GeneratorClosed: after `close`, or after a failure of the engine.
        """
        done: Future[T] = Future()
        with self._lock:
            self._check_open()
            self._send(partial(self._call, function, done), partial(fail, done))
        return done

    def close(self, timeout: float | None = None) -> bool:
        """Abort all jobs and end the thread. A second call does nothing.

        Returns:
            False if the thread did not end within `timeout` seconds.
        """
        with self._lock:
            self._closing = True
        return _end(self._thread, self._commands, timeout)

    def _check_open(self) -> None:
        if self._closing or self.failure is not None:
            raise self._closed_error() from self.failure

    def _closed_error(self) -> GeneratorClosed:
        if self.failure is None:
            return GeneratorClosed("the generator is closed")
        failed = EngineFailed(f"the engine has failed: {self.failure!r}")
        failed.__cause__ = self.failure
        return failed

    def _send(self, run: Callable[[], None], refuse: Callable[[GeneratorClosed], None]) -> None:
        """Queue a command. Starts the thread if it does not run yet. Needs the lock."""
        if self._thread.ident is None:
            self._thread.start()
        self.pulse.begin()
        self._commands.put(_Command(run, refuse))

    # The rest runs in the engine's thread.

    def work(self, command: _Command) -> bool:
        """Run a command, then step until there is nothing to do.

        Returns:
            False if the thread must end.
        """
        try:
            self.pulse.beat()
            self._do(command)
            while True:
                while not self._commands.empty():
                    if self._closing or (following := self._commands.get()) is None:
                        return False
                    self._do(following)
                    self.pulse.beat()
                if not (self.engine.busy or self._scoring.busy):
                    self.pulse.end()
                    return True
                with self.busy:
                    self._advance()
                self.pulse.beat()
        except Exception as error:  # thread boundary: without this, waiting callers would hang
            log.exception("the engine has failed; all further requests are refused")
            error.add_note(f"{len(self.engine.scheduler.running)} running sequences")
            with self._lock:
                self.failure = error
            return False

    def _do(self, command: _Command) -> None:
        """Run a command. An error in it ends the engine, and is also sent to the caller."""
        try:
            command.run()
        except Exception as error:
            with self._lock:
                self.failure = error
            command.refuse(self._closed_error())
            raise

    def _advance(self) -> None:
        """Compute one engine step and one piece of scoring, and send the new deltas."""
        if self.engine.busy:
            self._step()
        scored = self._scoring.step()
        if scored is not None:
            self._start(scored)
        now = time.perf_counter()
        if now - self._measured > USAGE_SECONDS or not self.engine.busy:
            self.usage, self._measured = self.engine.usage(), now
        # Last: once a caller has its answer, it may use the engine.
        self._deliver()

    def _admit_all(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            self._admit(job)

    def _admit(self, job: Job) -> None:
        if job.scored:
            self._scoring.add(job)
        else:
            self._start(job)
        self._deliver()

    def _start(self, job: Job) -> None:
        """Add the job to the engine. A job with max_tokens = 0 is answered immediately."""
        if job.params.max_tokens == 0:
            self._leave_queue(len(job.prompts))
            for i in range(job.choices):
                self._post(job, Delta(i, finish_reason="length"))
            return
        for i, (name, prompt) in enumerate(zip(job.names, job.prompts, strict=True)):
            try:
                with self._lock:  # so that `waiting` counts the prompt once
                    request = self.engine.add(
                        name,
                        prompt,
                        job.params,
                        list(job.samples),
                        job.priority,
                        adapter=job.adapter,
                        constraint=job.constraint,
                        origin=job.origin,
                        due=job.due,
                    )
                    self._arriving -= 1
            except ValueError as error:  # the request can never run
                self._abort(job, None)
                self._leave_queue(len(job.prompts) - i)
                self._post(job, error)
                return
            job.requests.append(request)
            for k, sample in enumerate(job.samples):
                choice = Choice(job, i * len(job.samples) + k, self._renderer)
                self._choices[request, sample] = choice
                if choice.watched:
                    self._watched.add(choice)

    def _leave_queue(self, prompts: int) -> None:
        """Subtract prompts that do not wait for the engine any more."""
        with self._lock:
            self._arriving -= prompts

    def _call(self, function: Callable[[Engine], T], done: Future[T]) -> None:
        if not done.set_running_or_notify_cancel():
            return
        try:
            result = function(self.engine)
        except Exception as error:  # the caller must get the error
            done.set_exception(error)
            if self.engine.weights.torn:
                raise
            return
        done.set_result(result)

    def _step(self) -> None:
        sampled = self.engine.stats.decoded_tokens
        finished = self.engine.step()
        sampled = self.engine.stats.decoded_tokens - sampled
        self.rate.add(sampled)
        if not sampled and self.engine.scheduler.holds:
            time.sleep(HELD_S)  # every sequence may wait for other weights
        ended: list[Delta] = []
        for sequence in finished:
            choice = self._choices[sequence.request, sequence.sample]
            stopped = choice.advance(sequence)
            reason = sequence.finish_reason or "error"
            ended.append(self._give_out(sequence, choice, reason, stopped))
        if self._watched:
            for sequence in list(self.engine.scheduler.running):
                choice = self._choices[sequence.request, sequence.sample]
                if choice.watched:
                    ended += self._look_at(sequence, choice)
        for delta in ended:
            # Only now: a stop string may have ended other samples in this step.
            if delta.sequence is not None:
                request = delta.sequence.request
                floor = self.engine.scheduler.floor(request)
                delta.peers = Peers(request.count, request.count - request.unfinished, floor)

    def _look_at(self, sequence: EngineSequence, choice: Choice) -> list[Delta]:
        """Send new text of a running sequence, or end it. Returns its last delta if it ended."""
        if choice.advance(sequence):
            self.engine.end(sequence, "stop")
            return [self._give_out(sequence, choice, "stop", stopped=True)]
        if choice.job.stream and choice.has_text:
            self._post(choice.job, choice.take())
        return []

    def _give_out(
        self, sequence: EngineSequence, choice: Choice, reason: FinishReason, stopped: bool
    ) -> Delta:
        """End a choice: write it to the record, then send it to the caller.

        Returns:
            The last delta, even if the record failed.
        """
        del self._choices[sequence.request, sequence.sample]
        self._watched.discard(choice)
        reason = "stop" if stopped else reason
        error = self._record(sequence, choice, reason)
        last = choice.last(sequence, reason, stopped)
        self._post(choice.job, error or last)
        return last

    def _record(
        self, sequence: EngineSequence, choice: Choice, reason: FinishReason
    ) -> RecordError | None:
        """Write a choice to the record, if there is one. Returns the error if that fails."""
        if choice.job.record is None:
            return None
        try:
            choice.job.record(choice.index, sequence, choice.text, reason)
        except RecordError as error:
            return error
        return None

    def _drop(self, job: Job, choice: int | None, done: Future[None]) -> None:
        if self._scoring.drop(job):
            self._leave_queue(len(job.prompts))
            self.aborted += 1
        else:
            self._abort(job, choice)
        self.usage = self.engine.usage()
        ended(done)

    def _abort(self, job: Job, choice: int | None) -> None:
        width, wanted = len(job.samples), range(job.choices) if choice is None else (choice,)
        started = {
            (job.requests[i // width], job.samples[i % width])
            for i in wanted
            if i // width < len(job.requests)
        }
        opened = {key: self._choices[key] for key in started if key in self._choices}
        # Count first: another thread that sees no open choices must also see the new count.
        self.aborted += bool(opened)
        for key in opened:
            del self._choices[key]
        self._watched -= set(opened.values())
        for request in {request: None for request, _ in opened}:
            samples = {sample for owner, sample in opened if owner is request}
            for sequence in self.engine.abort(request, samples):
                aborted = opened[request, sequence.sample]
                aborted.advance(sequence)
                self._record(sequence, aborted, "aborted")

    def end(self) -> None:
        """Send an error to every open job, including jobs that are still in the queue."""
        with self._lock:
            self._closing = True
        error = self._closed_error()
        while not self._commands.empty():
            if (command := self._commands.get()) is not None:
                command.refuse(error)
        open_jobs = [*self._scoring.jobs, *(choice.job for choice in self._choices.values())]
        for job in dict.fromkeys(open_jobs):
            if self.failure is None:  # a failed engine is left as it is
                self._drop(job, None, Future())
            self._post(job, error)
        self._choices.clear()
        self._deliver()

    def _post(self, job: Job, message: Delta | Exception) -> None:
        if job.loop is not None:
            self._outgoing.setdefault(job.loop, []).append((job, message))

    def _deliver(self) -> None:
        """Send all new messages, in one call per event loop."""
        for loop, messages in self._outgoing.items():
            send_all(loop, messages)
        self._outgoing = {}


def load_newer(tensors: NamedTensors, version: int, engine: Engine) -> int:
    """Load weights of a greater version. Returns the number of sequences that go on with them.

    Raises:
        VersionNotGreater: if it is not greater. The old weights stay in use.
    """
    check_newer(version, engine)
    engine.load_weights(tensors, version)
    return len(engine.scheduler.running)


def check_newer(version: int, engine: Engine) -> None:
    """Check that new weights have a greater version than those of an engine.

    Raises:
        VersionNotGreater: if they do not.
    """
    if version <= engine.version:
        raise VersionNotGreater(
            f"version = {version} must be greater than the version of the current weights,"
            f" {engine.version}"
        )


def _serve(
    owner: weakref.ref[EngineThread],
    commands: SimpleQueue[_Command | None],
    settings: ThreadSettings,
) -> None:
    settings.apply()
    while True:
        command = commands.get()
        thread = owner()
        if thread is None:
            return
        if command is None or not thread.work(command):
            thread.end()
            return
        del command, thread  # the next `get` waits: hold no reference meanwhile


def _end(
    thread: threading.Thread,
    commands: SimpleQueue[_Command | None],
    timeout: float | None = EXIT_SECONDS,
) -> bool:
    """End the thread after its current step. Returns False if that takes longer than `timeout`."""
    if thread.ident is None:
        return True
    commands.put(None)
    if thread is not threading.current_thread():
        thread.join(timeout)
    return not thread.is_alive()


RATE_SECONDS = 10.0
"""Time constant of a rate."""


class Rate:
    """Events per second, as an exponentially weighted sum.

    With s = RATE_SECONDS, an event has the weight exp(-age / s) / s, so the sum over a steady
    stream equals its rate. One thread may add events; any thread may read the rate.
    """

    def __init__(self) -> None:
        self._state = (0.0, 0.0)  # one tuple: a reader in another thread never sees half an update

    def add(self, count: float, now: float | None = None) -> None:
        """Add `count` events at time `now`, in seconds of a monotonic clock."""
        now = time.monotonic() if now is None else now
        self._state = (self.value(now) + count / RATE_SECONDS, now)

    def value(self, now: float | None = None) -> float:
        """Events per second at time `now`. It decays to 0 without events."""
        rate, at = self._state
        return rate * exp((at - (time.monotonic() if now is None else now)) / RATE_SECONDS)
