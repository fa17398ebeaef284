"""A generator that steps its engine in the event loop, so that time is counted in engine steps."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import count
from typing import Any

from sixfold.engine.engine import Engine
from sixfold.engine.sequence import Request
from sixfold.environment.episode import Action, End, Observation
from sixfold.model.loading import Policy
from sixfold.renderer.renderer import Renderer
from sixfold.rollout.base import groups_in_order
from sixfold.rollout.branches import Branching
from sixfold.rollout.driver import Driver
from sixfold.rollout.generator import Sampled, SampleKey
from sixfold.rollout.player import Limits, Player
from sixfold.types import Group, SamplingParams, Task

TURNS_OF_THE_LOOP = 12
"""Event-loop iterations until every coroutine that a step has resumed waits again."""


@dataclass(frozen=True)
class Asked:
    """A call of `generate`: its key, its prompt tokens, and how many of them were in the cache."""

    key: SampleKey
    tokens: int
    reused: int


@dataclass(frozen=True)
class Step:
    """An engine step: open requests, sequences that decoded, and sampled tokens."""

    ready: int
    rows: int
    sampled: int


class SteppedGenerator:
    """Generator on an engine. Between two steps, all resumed coroutines run until they wait again.

    So a run is a function of its inputs. If the engine is idle, the clock jumps to the end of the
    next tool call.

    Args:
        engine: the engine.
        length: number of tokens of a reply, from its key and the number of tokens before it. None:
            the limit.
    """

    def __init__(
        self, engine: Engine, length: Callable[[SampleKey, int], int] | None = None
    ) -> None:
        self.engine = engine
        self.version = 0
        self.now = 0
        self.asked: list[Asked] = []
        self.steps: list[Step] = []
        self._length = length
        self._open: dict[tuple[Request, int], asyncio.Future[Sampled]] = {}
        self._tools: list[tuple[int, int, int, asyncio.Future[None]]] = []
        self._order = count()
        self._arriving: list[tuple[Any, ...]] = []
        self._clock: asyncio.Task[None] | None = None

    async def generate(
        self,
        tokens: Sequence[int],
        params: SamplingParams,
        key: SampleKey,
        *,
        stops: Sequence[str] = (),
        priority: int = 0,
    ) -> Sampled:
        if self._length is not None:
            most = min(params.max_tokens, self._length(key, len(tokens)))
            params = replace(params, max_tokens=most)
        found: asyncio.Future[Sampled] = asyncio.get_running_loop().create_future()
        self._arriving.append((tuple(tokens), params, key, priority, found))
        self._wind()
        sampled = await found
        self.asked.append(Asked(key, len(tokens), sampled.reused))
        return sampled

    async def tool(self, steps: int) -> None:
        """Wait for a number of engine steps."""
        done = asyncio.get_running_loop().create_future()
        at = self.now + steps, len(self._tools) + len(self.asked)
        heappush(self._tools, (*at, next(self._order), done))
        self._wind()
        await done

    async def sleep(self) -> None: ...

    def _wind(self) -> None:
        if self._clock is None or self._clock.done():
            self._clock = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while True:
            for _ in range(TURNS_OF_THE_LOOP):
                await asyncio.sleep(0)
            self._admit()
            if self._tools and (self._tools[0][0] <= self.now or not self.engine.busy):
                self.now = max(self.now, self._tools[0][0])
                heappop(self._tools)[-1].set_result(None)
            elif self.engine.busy:
                self._step()
            else:
                return

    def _admit(self) -> None:
        """Start the new calls. Calls that differ only in the sample are one request."""
        groups: dict[Any, list[tuple[Any, ...]]] = {}
        for call in self._arriving:
            tokens, params, key, priority, _ = call
            groups.setdefault((tokens, params, key.name, key.origin, priority), []).append(call)
        self._arriving.clear()
        for (tokens, params, name, origin, priority), calls in groups.items():
            samples = [key.sample for _, _, key, _, _ in calls]
            request = self.engine.add(name, [*tokens], params, samples, priority, origin=origin)
            self._open |= {(request, call[2].sample): call[4] for call in calls}

    def _step(self) -> None:
        ready, stats = len(self._open), self.engine.stats
        rows, sampled = stats.decode_rows, stats.decoded_tokens
        for s in self.engine.step():
            done = Sampled(
                s.tokens[len(s.request.prompt) :],
                s.logp,
                s.version,
                s.finish_reason or "error",
                s.reused,
                s.seconds,
            )
            self._open.pop((s.request, s.sample)).set_result(done)
        self.now += 1
        self.steps.append(Step(ready, stats.decode_rows - rows, stats.decoded_tokens - sampled))


class Tooled:
    """Episode of `turns` replies. A tool call between them takes `delay(task, turn)` steps."""

    def __init__(
        self,
        task: Task,
        generator: SteppedGenerator,
        turns: int,
        delay: Callable[[Task, int], int],
        said: str = "+1=",
    ) -> None:
        self.task, self.left, self.said = task, turns, said
        self._wait, self._delay = generator.tool, delay

    async def start(self) -> Observation:
        return Observation(text=str(self.task.prompt))

    async def step(self, action: Action) -> Observation | End:
        self.left -= 1
        if not self.left:
            return End(1.0)
        await self._wait(self._delay(self.task, self.left))
        return Observation(text=self.said)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tooled:
        copied = object.__new__(Tooled)
        copied.__dict__ |= self.__dict__
        return copied


def play_tooled(
    generator: SteppedGenerator,
    renderer: Renderer,
    tasks: Sequence[Task],
    *,
    turns: int,
    delay: Callable[[Task, int], int] = lambda task, turn: 0,
    samples: int = 1,
    tokens: int = 12,
    branching: Branching | None = None,
    said: str = "+1=",
) -> list[Group]:
    """Play `Tooled` episodes. Returns a group per task."""

    def make(task: Task) -> Tooled:
        return Tooled(task, generator, turns, delay, said)

    limits = Limits(4000, turns, None)
    player = Player(generator, renderer, limits, make, (), "tools")  # type: ignore[arg-type]
    driver = Driver(player, SamplingParams(max_tokens=tokens), samples, branching)
    return asyncio.run(groups_in_order(driver.play(tasks, 0), tasks))


def endless(policy: Policy) -> Renderer:
    """Renderer without end tokens: an untrained model samples them at any place."""
    renderer = Renderer(policy.tokenizer, ())
    return renderer


def drawn(low: int, high: int) -> Callable[..., int]:
    """Function that returns a random number from `low` to `high`, seeded by its arguments."""
    return lambda *given: random.Random(repr(given)).randint(low, high)
