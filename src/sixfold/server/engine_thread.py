"""The thread that owns the engine. Other threads may only read the engine's counters and version.

The thread steps the engine while there is work. Requests and aborts arrive through a queue, and
deltas are sent once per step. The queue is emptied between two steps. A request therefore joins the
running batch at the next step, and an abort frees the sequence's blocks before the next token.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue

from ..engine.engine import Engine
from ..engine.sequence import Request
from ..engine.sequence import Sequence as EngineSequence
from ..engine.weights import NamedTensors
from ..rollout.renderer.renderer import Renderer
from ..types import FinishReason
from .api_error import ApiError, bad_request
from .job import Choice, Delta, Job, noise_key
from .rate import Rate
from .record import Recorder
from .scoring_queue import ScoringQueue

log = logging.getLogger("sixfold.server")

_FAILED = ApiError(500, "the engine has failed: see the server's log")


class EngineThread:
    """Runs an engine in its own thread and serves jobs with it.

    Args:
        engine: stepped and changed only by this thread after `start`.
        renderer: decodes completions. Used only by this thread.
        max_queue: most prompts that may wait to start. Further requests are refused.
        recorder: records finished completions; None for no record.

    Attributes:
        aborted: number of aborted requests.
        rate: sampled tokens per second.
        usage: running sequences and KV cache blocks after the last step. Other threads may read it.
        failure: the error that ended the thread, or None.
    """

    def __init__(
        self,
        engine: Engine,
        renderer: Renderer,
        max_queue: int,
        recorder: Recorder | None = None,
    ) -> None:
        self.engine = engine
        self.max_queue = max_queue
        self.aborted = 0
        self.rate = Rate()
        self.usage = engine.usage()
        self.failure: BaseException | None = None
        self._renderer = renderer
        self._recorder = recorder
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._choices: dict[tuple[Request, int], Choice] = {}
        self._scoring = ScoringQueue(engine)
        self._outgoing: list[tuple[Job, Delta | Exception]] = []
        self._waiting = 0
        self._lock = threading.Lock()
        self._closing = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def waiting(self) -> int:
        """Number of accepted prompts with samples that have not started."""
        return self._waiting

    def start(self) -> None:
        """Start the thread. Deltas are sent to the event loop that is running in the caller."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Queue a job for the engine.

        Raises:
            ApiError: 400 for more prompts than the queue can hold, 429 if the queue is full, 503 if
                the server is stopping or the engine has failed.
        """
        prompts = len(job.prompts)
        if prompts > self.max_queue:
            raise bad_request(
                f"prompt: {prompts} prompts exceed the queue of {self.max_queue} prompts. Send"
                " fewer per request",
                "prompt",
            )
        with self._lock:
            self._check_open()
            if self._waiting + prompts > self.max_queue:
                raise ApiError(
                    429,
                    f"{self._waiting} prompts are already waiting. Try again later",
                    code="rate_limit_exceeded",
                    headers={"Retry-After": "1"},
                )
            self._waiting += prompts
            # Under the lock: otherwise a job accepted while the thread ends would get no answer.
            self._commands.put(partial(self._admit, job))

    def abort(self, job: Job) -> None:
        """Abort the job of a client that disconnected. Does nothing if the job has ended."""
        self._commands.put(partial(self._drop, job))

    def update_weights(self, tensors: NamedTensors, version: int) -> Future[int]:
        """Load weights between two steps, while requests are running (`Engine.load_weights`).

        Args:
            tensors: the new weights, by name.
            version: version of the new weights. It must be greater than the current one.

        Returns:
            Future with the number of running sequences that continue with the new weights. After
            these errors the old weights stay in use: ApiError 409 for a version that is not
            greater, ApiError 503 if the server is stopping or has failed, ValueError for tensors
            that do not fit the model.

        Raises:
            ApiError: 503 if the server is already stopping or has already failed.
        """
        done: Future[int] = Future()
        with self._lock:
            self._check_open()
            self._commands.put(partial(self._load, tensors, version, done))
        return done

    def close(self, timeout: float) -> bool:
        """Abort all jobs and end the thread. Returns False if it did not end within `timeout` s."""
        with self._lock:
            self._closing = True
        self._commands.put(lambda: None)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _check_open(self) -> None:
        if self._closing or self.failure is not None:
            raise ApiError(503, "the server is stopping" if self._closing else _FAILED.message)

    def _run(self) -> None:
        try:
            while not self._closing:
                self._take_commands()
                if self.engine.busy:
                    self._step()
                scored = self._scoring.step()
                if scored is not None:
                    self._start(scored)
                self.usage = self.engine.usage()
                self._deliver()
            self._end_all(ApiError(503, "the server is stopping"))
        except Exception as error:  # thread boundary: without this, waiting clients would hang
            log.exception("the engine has failed; all further requests are refused")
            with self._lock:
                self.failure = error
            self._end_all(_FAILED)
        if self._recorder is not None:
            self._recorder.close()

    def _take_commands(self) -> None:
        """Run all commands that have arrived. Waits for a command if there is nothing to step."""
        if not self.engine.busy and not self._scoring.busy:
            self._commands.get()()
        while not self._commands.empty():
            self._commands.get()()

    def _admit(self, job: Job) -> None:
        if self.failure is not None:
            self._outgoing.append((job, _FAILED))
        elif job.scored:
            self._scoring.add(job)
        else:
            self._start(job)

    def _start(self, job: Job) -> None:
        """Add the job to the engine. A job with max_tokens = 0 is answered immediately."""
        if job.params.max_tokens == 0:
            self._left(len(job.prompts))
            self._outgoing += [(job, Delta(i, finish_reason="length")) for i in range(job.choices)]
            return
        for i, prompt in enumerate(job.prompts):
            try:
                request = self.engine.add(
                    noise_key(prompt),
                    prompt,
                    job.params,
                    list(range(job.n)),
                    job.priority,
                    adapter=job.adapter,
                    constraint=job.constraint,
                )
            except ValueError as error:  # the request cannot fit into the KV cache
                self._drop(job)
                self._left(len(job.prompts) - i)
                self._outgoing.append((job, bad_request(str(error), "max_tokens")))
                return
            job.requests.append(request)
            for k in range(job.n):
                self._choices[request, k] = Choice(job, i * job.n + k, self._renderer)

    def _load(self, tensors: NamedTensors, version: int, done: Future[int]) -> None:
        if not done.set_running_or_notify_cancel():
            return
        try:
            self._check_open()
            if version <= self.engine.version:
                raise ApiError(
                    409,
                    f"version = {version} must be greater than the version of the current"
                    f" weights, {self.engine.version}",
                    param="version",
                )
            self.engine.load_weights(tensors, version)
        except Exception as error:  # the caller must hear of it; intact weights stay in use
            done.set_exception(error)
            if self.engine.weights.torn:
                raise
            log.warning("weights of version %d were not loaded: %s", version, error)
            return
        done.set_result(len(self.engine.scheduler.running))

    def _step(self) -> None:
        before, sampled = len(self.engine.scheduler.waiting), self.engine.stats.decoded_tokens
        finished = self.engine.step()
        self.rate.add(self.engine.stats.decoded_tokens - sampled)
        self._left(before - len(self.engine.scheduler.waiting))
        for sequence in finished:
            self._finish(sequence)
        for sequence in list(self.engine.scheduler.running):
            choice = self._choices[sequence.request, sequence.sample]
            if choice.watched:
                self._look_at(sequence, choice)

    def _look_at(self, sequence: EngineSequence, choice: Choice) -> None:
        if choice.advance(sequence):
            self.engine.end(sequence, "stop")
            self._give_out(sequence, choice, "stop")
        elif choice.job.stream and choice.has_text:
            self._outgoing.append((choice.job, choice.take()))

    def _finish(self, sequence: EngineSequence) -> None:
        choice = self._choices[sequence.request, sequence.sample]
        stopped = choice.advance(sequence)
        self._give_out(sequence, choice, "stop" if stopped else sequence.finish_reason or "error")

    def _give_out(self, sequence: EngineSequence, choice: Choice, reason: FinishReason) -> None:
        """End a choice: write it to the record, then send it to the client."""
        del self._choices[sequence.request, sequence.sample]
        recorded = self._record(sequence, choice, reason)
        self._outgoing.append(
            (
                choice.job,
                (
                    choice.take(reason)
                    if recorded
                    else ApiError(500, "the exchange could not be written to the record")
                ),
            )
        )

    def _record(self, sequence: EngineSequence, choice: Choice, reason: FinishReason) -> bool:
        """Write a choice to the record, if there is one.

        Returns:
            False if the record cannot be written: the disk is full, or a log-prob is NaN or
            infinite.
        """
        if self._recorder is None:
            return True
        job = choice.job
        asked = {"exchange": job.id, "created": job.created, "seed": job.params.seed, **job.asked}
        try:
            self._recorder.write(
                choice.trajectory(sequence, reason, self._renderer.opened(sequence.request.prompt)),
                asked,
            )
        except (OSError, ValueError) as error:
            log.error("an exchange could not be written to the record: %s", error)
            return False
        return True

    def _drop(self, job: Job) -> None:
        if self.failure is not None:
            return
        if self._scoring.drop(job):
            self._left(len(job.prompts))
            self.aborted += 1
            return
        before = len(self.engine.scheduler.waiting)
        open_choices = {
            key: self._choices.pop(key)
            for key in [(r, k) for r in job.requests for k in range(job.n)]
            if key in self._choices
        }
        for request in job.requests:
            for sequence in self.engine.abort(request):
                choice = open_choices[request, sequence.sample]
                choice.advance(sequence)
                self._record(sequence, choice, "aborted")
        self._left(before - len(self.engine.scheduler.waiting))
        self.aborted += bool(open_choices)
        job.requests.clear()

    def _left(self, prompts: int) -> None:
        """Subtract prompts that have stopped waiting."""
        with self._lock:
            self._waiting -= prompts

    def _end_all(self, error: ApiError) -> None:
        """Send the error to every open job, including jobs that are still in the queue."""
        while not self._commands.empty():
            self._commands.get()()
        for job in {*self._scoring.jobs, *(choice.job for choice in self._choices.values())}:
            self._drop(job)
            self._outgoing.append((job, error))
        self._choices.clear()
        self._deliver()

    def _deliver(self) -> None:
        """Send all new messages to the event loop in one call."""
        if self._outgoing and self._loop is not None:
            try:
                self._loop.call_soon_threadsafe(_put_all, self._outgoing)
            except RuntimeError:  # the event loop is closed
                log.warning(
                    "%d messages dropped: their clients have disconnected", len(self._outgoing)
                )
            self._outgoing = []


def _put_all(messages: list[tuple[Job, Delta | Exception]]) -> None:
    for job, message in messages:
        job.inbox.put_nowait(message)
