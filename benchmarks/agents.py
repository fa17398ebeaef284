"""Measure how busy the engine is while tools are slow: `python benchmarks/agents.py`.

It plays 32 episodes of four turns with tools that take 0 to 2 seconds, and the same episodes with
tools that take no time. Both sides sample the same tokens. They alternate in one process.

Two figures are measured over the time in which at least one call of `generate` is open:

- busy: share of this time in which the engine computes a step. The rest is overhead of the engine's
  thread, the event loop and the environments.
- filled: tokens decoded per step, divided by the open calls (at most `max_running`). A step that
  only computes prompts decodes no token, so this figure includes the cost of observations.

The time in which all episodes wait for their tools is not included. It is shown as `idle`.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import torch

from sixfold.engine.engine import Engine
from sixfold.environment.episode import Action, End, Observation
from sixfold.model.causal_lm import CausalLM
from sixfold.model.loading import Policy, load_policy
from sixfold.recipe.schema import ModelConfig
from sixfold.recipe.schema.model import ScratchConfig
from sixfold.renderer.renderer import Renderer
from sixfold.rollout.base import groups_in_order
from sixfold.rollout.driver import Driver
from sixfold.rollout.engine_generator import EngineGenerator
from sixfold.rollout.generator import Sampled, SampleKey
from sixfold.rollout.player import Limits, Player
from sixfold.types import Group, SamplingParams, Task

BOUND = 0.9
"""Required ratio of both figures: with slow tools divided by without."""


@dataclass
class Meter:
    """Measures the engine's steps and the open calls of `generate`.

    Attributes:
        steps: (start, end, sampled tokens, open calls) of every engine step.
        open: number of calls that wait for their completion.
        spans: (start, end) of each time span with at least one open call.
        reused: prompt tokens from the cache, over all turns but the first.
        later: prompt tokens, over all turns but the first.
    """

    steps: list[tuple[float, float, int, int]] = field(default_factory=list)
    open: int = 0
    spans: list[tuple[float, float]] = field(default_factory=list)
    reused: int = 0
    later: int = 0
    _since: float = 0.0

    @contextmanager
    def call(self) -> Iterator[None]:
        """Count a call as open inside the `with` block."""
        if not self.open:
            self._since = time.perf_counter()
        self.open += 1
        try:
            yield
        finally:
            self.open -= 1
            if not self.open:
                self.spans.append((self._since, time.perf_counter()))

    def watch(self, engine: Engine) -> None:
        """Measure every step of an engine."""
        step = engine.step

        def measured() -> Any:
            began, sampled, ready = time.perf_counter(), engine.stats.decoded_tokens, self.open
            finished = step()
            ended = time.perf_counter()
            self.steps.append((began, ended, engine.stats.decoded_tokens - sampled, ready))
            return finished

        engine.step = measured  # type: ignore[method-assign]


class DrawnLengths(EngineGenerator):
    """Generator with random reply lengths (exponential distribution) that are equal in every run.

    Args:
        engine: samples the replies.
        renderer: decodes them.
        meter: measures the calls.
        mean: mean length of a reply in tokens.
    """

    def __init__(self, engine: Engine, renderer: Renderer, meter: Meter, mean: int) -> None:
        super().__init__(engine, renderer)
        self._meter = meter
        self._mean = mean

    async def generate(
        self, tokens: Sequence[int], params: SamplingParams, key: SampleKey, **more: Any
    ) -> Sampled:
        """Sample a reply of a random length."""
        rng = random.Random(f"{key.name}/{key.sample}/{len(tokens)}")
        length = min(params.max_tokens, 1 + int(rng.expovariate(1 / self._mean)))
        with self._meter.call():
            reply = await super().generate(tokens, replace(params, max_tokens=length), key, **more)
        if key.origin != len(tokens):
            self._meter.reused += reply.reused
            self._meter.later += len(tokens)
        return reply


class Tools:
    """Episode in which a tool runs after each reply but the last.

    Args:
        task: the task.
        turns: number of replies.
        seconds: maximum duration of a tool.
    """

    def __init__(self, task: Task, turns: int, seconds: float) -> None:
        self._task = task
        self._left = turns
        self._seconds = seconds

    async def start(self) -> Observation:
        return Observation(text=str(self._task.prompt))

    async def step(self, action: Action) -> Observation | End:
        self._left -= 1
        if not self._left:
            return End(1.0)
        rng = random.Random(f"{self._task.id}/{self._left}")
        if self._seconds:
            await asyncio.sleep(rng.uniform(0, self._seconds))
        return Observation(text=f"={rng.randrange(10**8):08d}+1=")


@dataclass(frozen=True)
class Figures:
    """Figures of one rollout.

    Attributes:
        wall: duration in seconds.
        open: time in seconds in which at least one call was open.
        busy: share of this time in which the engine computed a step.
        filled: decoded tokens per open call and step, at most `max_running` calls.
        rate: tokens per second of engine steps.
        reused: share of prompt tokens from the cache, over all turns but the first.
        tokens: number of sampled tokens.
    """

    wall: float
    open: float
    busy: float
    filled: float
    rate: float
    reused: float
    tokens: int


def measured(policy: Policy, given: argparse.Namespace, slots: int, seconds: float) -> Figures:
    """Play the episodes once.

    Args:
        policy: the model.
        given: options of the command line.
        slots: maximum number of running sequences (`max_running`).
        seconds: maximum duration of a tool.
    """
    engine = Engine(
        CausalLM(policy.model), kv_tokens=given.episodes * 4096, max_running=slots, block_size=16
    )
    renderer, meter = Renderer(policy.tokenizer, ()), Meter()
    meter.watch(engine)
    generator = DrawnLengths(engine, renderer, meter, given.mean)
    tasks = [
        Task(f"t{i}", "".join(f"{j}+" for j in range(i, i + 16))) for i in range(given.episodes)
    ]
    make: Callable[[Task], Tools] = lambda task: Tools(task, given.turns, seconds)  # noqa: E731
    player = Player(
        generator,
        renderer,
        Limits(4096, given.turns, None),
        make,
        (),
        "tools",
    )
    driver = Driver(player, SamplingParams(max_tokens=6 * given.mean), 1)
    began = time.perf_counter()
    try:
        groups = asyncio.run(groups_in_order(driver.play(tasks, 0), tasks))
    finally:
        generator.close()
    return _figures(groups, meter, slots, time.perf_counter() - began)


def _figures(groups: Sequence[Group], meter: Meter, slots: int, wall: float) -> Figures:
    opened = sum(end - start for start, end in meter.spans)
    computed = sum(end - start for start, end, _, _ in meter.steps)
    # Weighted by the duration of the steps: steps that compute prompts take longer.
    filled = sum((end - start) * tokens for start, end, tokens, _ in meter.steps)
    room = sum((end - start) * min(ready, slots) for start, end, _, ready in meter.steps)
    sampled = sum(t.sampled_length for g in groups for t in g.trajectories)
    return Figures(
        wall=wall,
        open=opened,
        busy=computed / opened,
        filled=filled / room,
        rate=sampled / computed,
        reused=meter.reused / max(1, meter.later),
        tokens=sampled,
    )


def main() -> None:
    """Measure both sides alternately for each number of slots, and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--episodes", type=int, default=32)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=2.0, help="longest time of a tool")
    parser.add_argument("--mean", type=int, default=64, help="mean length of a reply")
    parser.add_argument("--slots", type=int, nargs="+", default=[8, 32], help="max_running")
    parser.add_argument("--repeat", type=int, default=3, help="rollouts per side")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    sizes = ScratchConfig(
        layers=4, hidden_size=given.hidden, heads=4, kv_heads=2, head_dim=64, context=4096
    )
    policy = load_policy(ModelConfig(scratch=sizes), seed=0, device="cpu")
    measured(policy, given, given.slots[0], 0.0)  # compiles the kernels
    print(
        "slots  tools      wall s  open s  idle s   busy  filled  tokens per engine second  reused"
    )
    for slots in given.slots:
        sides: dict[float, list[Figures]] = {0.0: [], given.seconds: []}
        for _ in range(given.repeat):
            for seconds, found in sides.items():
                found.append(measured(policy, given, slots, seconds))
        middle = {
            seconds: Figures(*(median(column) for column in zip(*map(_row, found), strict=True)))
            for seconds, found in sides.items()
        }
        for seconds, f in middle.items():
            print(
                f"{slots:5}  0 to {seconds:g} s  {f.wall:6.1f}  {f.open:6.1f}"
                f"  {f.wall - f.open:6.1f}  {f.busy:5.1%}  {f.filled:6.1%}"
                f"  {f.rate:24.0f}  {f.reused:6.1%}"
            )
        assert len({f.tokens for found in sides.values() for f in found}) == 1
        quick, slow = middle.values()
        busy, filled = slow.busy / quick.busy, slow.filled / quick.filled
        met = "met" if min(busy, filled) >= BOUND else "MISSED"
        print(
            f"       with tools / without: busy {busy:.1%}, filled {filled:.1%}; {BOUND:.0%} {met}"
        )


def _row(figures: Figures) -> tuple[float, ...]:
    return tuple(vars(figures).values())


if __name__ == "__main__":
    main()
