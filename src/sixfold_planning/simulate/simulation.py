"""The simulation: a queue of events, and the rules of the three topologies."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import replace
from random import Random

from sixfold.errors import UserError

from .engine import GroupRun, SamplerPool
from .groups import Groups
from .outcome import Clocks, Outcome, StepRecord, Tokens, shares, step_record
from .settings import Failures, Settings
from .timing import Timing

MOST_RESTARTS = 200
"""The simulation ends with an error after this many restarts from the same checkpoint."""


class Simulation:
    """One simulation, to be run once.

    At most `(version + bound + 1) * prompts` groups are started and not discarded, where `version`
    counts the updates of the engines' weights (AReaL, arXiv:2505.24298, section 5.1). This alone
    does not bound the staleness, because short samples overtake long ones. A batch therefore takes
    the groups that started first. It waits for unfinished groups if its successors could not take
    all others in time: of those that version `v` or an older one started, at most
    `(v + bound - trained) * prompts` may be left. The limit above makes that always possible.

    Weights arrive while engines decode in the async topology. A weight sync then hides behind
    sampling and training, but the next one cannot start before it ends.
    """

    def __init__(self, timing: Timing, groups: Groups, settings: Settings) -> None:
        self._timing, self._groups, self._settings = timing, groups, settings
        self._random, self._chance = Random(settings.seed), Random(f"{settings.seed}/failures")
        self._pool = SamplerPool(timing)
        self._events: list[tuple[float, int, int, Callable[[], None]]] = []
        self._number = self._epoch = 0
        self._now = 0.0
        self._version = self._weights = self._checkpoint = 0
        self._started = 0
        self._live: dict[GroupRun, None] = {}
        self._finished: list[GroupRun] = []
        self._attempts: list[int] = []
        self._batch: list[GroupRun] = []
        self._began = 0.0
        self._publishing: float | None = None
        self._records: list[StepRecord] = []
        self._clocks = Clocks()
        self._tokens = Tokens()
        self._ended = self._equal = self._failures = self._restarts = 0

    def run(self) -> Outcome:
        """Simulate, and summarise.

        Raises:
            UserError: if failures are so frequent that no checkpoint is reached.
        """
        settings = self._settings
        start: Clocks | None = None
        if settings.failures is not None:
            self._schedule_failure(settings.failures)
        self._proceed()
        while self._version < settings.filling + settings.steps:
            self._now, _, epoch, action = heapq.heappop(self._events)
            if epoch in (self._epoch, -1):
                action()
            if start is None and self._version == settings.filling:
                start = self._read_clocks()
        assert start is not None
        used = shares(settings, self._timing, start, self._read_clocks())
        tokens = replace(
            self._tokens,
            sampled=sum(engine.tokens for engine in self._pool.engines),
            unfinished=self._unfinished(),
        )
        return Outcome(
            shares=used,
            total_seconds=self._now,
            records=tuple(self._records[settings.filling :]),
            groups=self._ended,
            equal=self._equal / self._ended,
            failures=self._failures,
            tokens=tokens,
        )

    def _at(self, time: float, action: Callable[[], None], *, always: bool = False) -> None:
        """Call `action` at a time. Unless `always`, a restart of the run cancels it."""
        self._number += 1
        epoch = -1 if always else self._epoch
        heapq.heappush(self._events, (time, self._number, epoch, action))

    def _proceed(self) -> None:
        self._publish()
        self._train()
        self._fill()

    # Sampling

    def _fill(self) -> None:
        """Start groups until the bound on staleness is reached."""
        settings = self._settings
        limit = self._weights + settings.bound + 1
        if settings.barrier:
            # Discarded groups are replaced when a round of sampling has ended.
            if self._live:
                return
            # Otherwise two pools would sample two batches before the first update.
            limit = min(limit, self._version + bool(self._batch) + 1)
        while self._started < limit * settings.prompts:
            drawn = self._groups.draw(self._random, settings.samples)
            attempt = self._attempts.pop() if self._attempts else 1
            group = GroupRun(drawn.lengths, drawn.mixed, attempt)
            self._started += 1
            self._live[group] = None
            self._pool.submit(group)
        self._dispatch()

    def _dispatch(self) -> None:
        for index in self._pool.dispatch(self._now, self._weights):
            self._reschedule(index)

    def _reschedule(self, index: int) -> None:
        engine = self._pool.engines[index]
        time, generation = engine.next_event(), engine.generation

        def event() -> None:
            if engine.generation == generation:
                self._decoded(index)

        if len(engine):
            self._at(time, event)

    def _decoded(self, index: int) -> None:
        """An engine has reached its next event."""
        ended = self._pool.engines[index].finish(self._now)
        complete = False
        for group, length in ended:
            group.waiting -= 1
            group.ended += length
            if not group.waiting:
                self._complete(group)
                complete = True
        if ended:
            self._pool.changed(index)
            self._dispatch()
        self._reschedule(index)
        if complete:
            self._proceed()

    def _complete(self, group: GroupRun) -> None:
        """All samples of a group have ended."""
        del self._live[group]
        self._ended += 1
        self._equal += not group.mixed
        if group.mixed or group.attempt >= self._settings.attempts:
            self._finished.append(group)
        else:
            self._tokens.discarded += group.tokens
            self._attempts.append(group.attempt + 1)
            self._started -= 1

    # Training

    def _train(self) -> None:
        """Train the groups that started first, if the others can keep the bound on staleness."""
        prompts = self._settings.prompts
        if self._batch or len(self._finished) < prompts:
            return
        if self._settings.barrier and self._weights < self._version:
            return
        self._finished.sort(key=lambda group: group.begun or 0)  # stable: then by completion
        others = [*self._finished[prompts:], *self._live]
        begun = sorted(group.begun for group in others if group.begun is not None)
        due = self._version - self._settings.bound
        if any(place >= (version - due) * prompts for place, version in enumerate(begun)):
            return
        self._batch, self._finished = self._finished[:prompts], self._finished[prompts:]
        self._began = self._now
        record = step_record(self._batch, self._version)
        seconds = self._timing.learn(record.tokens / (prompts * self._settings.samples))
        self._at(self._now + seconds, lambda: self._trained(record))

    def _trained(self, record: StepRecord) -> None:
        self._records.append(record)
        self._clocks.training += self._now - self._began
        self._tokens.trained += record.tokens
        self._batch = []
        self._version += 1
        failures = self._settings.failures
        every = failures.checkpoint_steps if failures else 0
        if every and self._version % every == 0:
            self._checkpoint, self._restarts = self._version, 0
        self._proceed()

    def _publish(self) -> None:
        """Send the newest weights to the engines, unless a sync is under way."""
        barrier = self._settings.barrier
        if self._publishing is not None or self._weights == self._version:
            return
        if barrier and (self._live or self._attempts):
            return
        self._publishing, version = self._now, self._version
        self._at(self._now + self._timing.sync, lambda: self._published(version))

    def _published(self, version: int) -> None:
        self._count_sync()
        self._weights = version
        self._proceed()

    def _count_sync(self) -> None:
        if self._publishing is not None and self._settings.barrier:
            self._clocks.sync += self._now - self._publishing
        self._publishing = None

    # Failures

    def _schedule_failure(self, failures: Failures) -> None:
        rate = failures.rate(self._settings.devices(self._timing))
        self._at(
            self._now + self._chance.expovariate(rate), lambda: self._fail(failures), always=True
        )

    def _fail(self, failures: Failures) -> None:
        """A device fails: one engine restarts, or the whole run if the device trains."""
        self._failures += 1
        restarted = self._now + failures.restart_seconds
        device = self._chance.randrange(self._settings.devices(self._timing))
        if device < self._timing.training_devices:
            self._restart(failures, restarted)
            return
        self._schedule_failure(failures)
        index = self._chance.randrange(len(self._pool.engines))
        engine = self._pool.engines[index]
        if not engine.up:
            return
        engine.advance(self._now)
        self._tokens.lost += engine.in_flight
        engine.up = False
        self._pool.requeue(engine.drop())
        self._dispatch()
        self._at(restarted, lambda: self._up_again(index))

    def _up_again(self, index: int) -> None:
        self._pool.engines[index].up = True
        self._pool.changed(index)
        self._dispatch()

    def _restart(self, failures: Failures, restarted: float) -> None:
        """Return to the last checkpoint. Nothing fails until the restart is over."""
        self._restarts += 1
        if self._restarts > MOST_RESTARTS:
            raise UserError(
                f"devices fail so often that {MOST_RESTARTS} restarts in a row reach no checkpoint"
                f" after step {self._checkpoint}: lower checkpoint.every, or raise --mtbf"
            )
        self._pool.advance(self._now)
        self._count_sync()
        if self._batch:
            self._clocks.training += self._now - self._began
        undone = sum(record.tokens for record in self._records[self._checkpoint :])
        self._tokens.trained -= undone
        self._tokens.lost += undone + self._unfinished()
        del self._records[self._checkpoint :]
        self._pool.clear()
        self._live.clear()
        self._finished, self._batch, self._attempts = [], [], []
        self._version = self._weights = self._checkpoint
        self._started = self._version * self._settings.prompts
        self._epoch += 1

        def go_on() -> None:
            self._schedule_failure(failures)
            self._proceed()

        self._at(restarted, go_on)

    # Results

    def _unfinished(self) -> float:
        """Tokens of groups that are not trained yet."""
        held = sum(group.tokens for group in [*self._finished, *self._batch])
        return held + sum(group.ended for group in self._live) + self._pool.in_flight

    def _read_clocks(self) -> Clocks:
        self._pool.advance(self._now)
        sampling = sum(engine.busy for engine in self._pool.engines)
        load = sum(engine.load for engine in self._pool.engines)
        training = self._clocks.training + (self._now - self._began if self._batch else 0.0)
        return Clocks(self._now, sampling, load, training, self._clocks.sync)
