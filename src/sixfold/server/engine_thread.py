"""The thread that owns the engine. It steps while there is work; requests and their aborts come in through a queue, deltas go out once a step.

Nobody else touches the engine. Between two steps it takes in what has arrived, so a request joins the running batch at once and the blocks of a
client that left are free before the next token.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue

from ..engine.engine import Engine
from ..engine.sequence import Request
from ..engine.sequence import Sequence as EngineSequence
from ..engine.weights import NamedTensors
from ..types import FinishReason
from .api_error import ApiError, bad_request
from .job import Choice, Delta, Job, noise_key
from .rate import Rate
from .record import Recorder
from .scoring_queue import ScoringQueue

log = logging.getLogger("sixfold.server")

_FAILED = ApiError(500, "the engine has failed: see the server's log")


class EngineThread:
    """max_queue: prompts that may wait to start; beyond it a request is refused. decode: token ids -> text, called by this thread alone.
    opened: the think tag that a prompt ends with, for the record.

    aborted: requests given up. rate: of sampled tokens. usage: how full the engine was after its last step, for readers in other threads.
    """

    def __init__(
        self,
        engine: Engine,
        decode: Callable[[Sequence[int]], str],
        max_queue: int,
        recorder: Recorder | None = None,
        opened: Callable[[Sequence[int]], str] = lambda prompt: "",
    ) -> None:
        self.engine = engine
        self.max_queue = max_queue
        self.aborted = 0
        self.rate = Rate()
        self.usage = engine.usage()
        self.failure: BaseException | None = None
        self._decode = decode
        self._opened = opened
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
        """Prompts that were accepted and have samples that have not started."""
        return self._waiting

    def start(self) -> None:
        """Begin. Deltas are delivered to the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Hand a job to the engine. Raises ApiError: 429 when the queue is full, 503 when the server is stopping or the engine has failed."""
        prompts = len(job.prompts)
        if prompts > self.max_queue:
            raise bad_request(f"{prompts} prompts in one request, the queue holds {self.max_queue}", "prompt")
        with self._lock:
            self._check_open()
            if self._waiting + prompts > self.max_queue:
                raise ApiError(
                    429, f"{self._waiting} prompts wait already: try again later", code="rate_limit_exceeded", headers={"Retry-After": "1"}
                )
            self._waiting += prompts
            self._commands.put(partial(self._admit, job))  # under the lock: who ends the thread finds every accepted job in the queue

    def abort(self, job: Job) -> None:
        """Stop working for a client that left. Nothing happens for a job that has ended."""
        self._commands.put(partial(self._drop, job))

    def update_weights(self, tensors: NamedTensors, version: int) -> Future[int]:
        """Load weights between two steps, under running requests (`Engine.load_weights`). The future: how many sequences go on under the new ones.

        Its errors, after which the old weights serve on: ApiError 409 for a version that does not grow, 503 for a server that is stopping or has
        failed, ValueError for tensors that do not fit.
        """
        done: Future[int] = Future()
        with self._lock:
            self._check_open()
            self._commands.put(partial(self._load, tensors, version, done))
        return done

    def close(self, timeout: float) -> bool:
        """Abort what is left and end the thread. False when it did not end in time."""
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
        except Exception as error:  # the thread's boundary: whoever waits must hear of it, and nobody else would
            log.exception("the engine has failed; every request is refused from here on")
            with self._lock:
                self.failure = error
            self._end_all(_FAILED)
        if self._recorder is not None:
            self._recorder.close()

    def _take_commands(self) -> None:
        """All that have arrived; waits for one where there is nothing to step."""
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
        """Let the engine sample. A job that wants no tokens is answered at once."""
        if job.params.max_tokens == 0:
            self._left(len(job.prompts))
            self._outgoing += [(job, Delta(i, finish_reason="length")) for i in range(job.choices)]
            return
        for i, prompt in enumerate(job.prompts):
            try:
                request = self.engine.add(noise_key(prompt), prompt, job.params, list(range(job.n)), adapter=job.adapter, constraint=job.constraint)
            except ValueError as error:  # could never fit the cache
                self._drop(job)
                self._left(len(job.prompts) - i)
                self._outgoing.append((job, bad_request(str(error), "max_tokens")))
                return
            job.requests.append(request)
            for k in range(job.n):
                self._choices[request, k] = Choice(job, i * job.n + k, self._decode)

    def _load(self, tensors: NamedTensors, version: int, done: Future[int]) -> None:
        if not done.set_running_or_notify_cancel():
            return
        try:
            self._check_open()
            if version <= self.engine.version:
                raise ApiError(409, f"the weights have version {self.engine.version}: {version} is not newer", param="version")
            self.engine.load_weights(tensors, version)
        except Exception as error:  # whoever waits must hear of it; the engine goes on, as its weights are whole
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
        """The end of a choice: into the record, then to the client."""
        del self._choices[sequence.request, sequence.sample]
        recorded = self._record(sequence, choice, reason)
        self._outgoing.append((choice.job, choice.take(reason) if recorded else ApiError(500, "the exchange could not be recorded")))

    def _record(self, sequence: EngineSequence, choice: Choice, reason: FinishReason) -> bool:
        """False when there is a record and it cannot be written: a full disk, or a log-prob that is no number."""
        if self._recorder is None:
            return True
        job = choice.job
        asked = {"exchange": job.id, "created": job.created, "seed": job.params.seed, **job.asked}
        try:
            self._recorder.write(choice.trajectory(sequence, reason, self._opened(sequence.request.prompt)), asked)
        except (OSError, ValueError) as error:
            log.error("an exchange cannot be recorded: %s", error)
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
        open_choices = {key: self._choices.pop(key) for key in [(r, k) for r in job.requests for k in range(job.n)] if key in self._choices}
        for request in job.requests:
            for sequence in self.engine.abort(request):
                choice = open_choices[request, sequence.sample]
                choice.advance(sequence)
                self._record(sequence, choice, "aborted")
        self._left(before - len(self.engine.scheduler.waiting))
        self.aborted += bool(open_choices)
        job.requests.clear()

    def _left(self, prompts: int) -> None:
        """Prompts that wait no longer."""
        with self._lock:
            self._waiting -= prompts

    def _end_all(self, error: ApiError) -> None:
        """Every open job hears of the error, those too that the queue still holds."""
        while not self._commands.empty():
            self._commands.get()()
        for job in {*self._scoring.jobs, *(choice.job for choice in self._choices.values())}:
            self._drop(job)
            self._outgoing.append((job, error))
        self._choices.clear()
        self._deliver()

    def _deliver(self) -> None:
        """One call into the event loop for everything since the last."""
        if self._outgoing and self._loop is not None:
            try:
                self._loop.call_soon_threadsafe(_put_all, self._outgoing)
            except RuntimeError:  # the loop is closed: nobody is left to tell
                log.warning("%d messages for clients that are gone", len(self._outgoing))
            self._outgoing = []


def _put_all(messages: list[tuple[Job, Delta | Exception]]) -> None:
    for job, message in messages:
        job.inbox.put_nowait(message)
