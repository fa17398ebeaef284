"""Episodes and generators for tests of the driver."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from tests.rollout.fake_generator import FakeGenerator

from sixfold.environment.episode import Action, End, MakeEpisode, Observation
from sixfold.renderer.renderer import Renderer
from sixfold.rollout.base import groups_in_order
from sixfold.rollout.driver import Driver
from sixfold.rollout.generator import Sampled, SampleKey
from sixfold.rollout.player import Limits, Player
from sixfold.types import Group, Message, SamplingParams, Task

Step = Callable[[Action], Coroutine[Any, Any, Any]]


class Scripted:
    """Starts with the task's prompt, and answers each reply with the next element of `steps`."""

    def __init__(self, task: Task, *steps: Any) -> None:
        self.task = task
        self.steps = list(steps)
        self.actions: list[Action] = []

    async def start(self) -> Observation:
        prompt = self.task.prompt
        return Observation(text=prompt) if isinstance(prompt, str) else Observation(messages=prompt)

    async def step(self, action: Action) -> Any:
        self.actions.append(action)
        step = self.steps.pop(0)
        return await step(action) if asyncio.iscoroutinefunction(step) else step


def scripted(*steps: Any) -> MakeEpisode:
    return lambda task: Scripted(task, *steps)


class Recording(FakeGenerator):
    """Records every call: (tokens before, key, completion)."""

    def __init__(self, renderer: Renderer, script: Any = None, **options: Any) -> None:
        super().__init__(renderer, script, **options)
        self.sampled: list[tuple[list[int], SampleKey, Sampled]] = []

    async def generate(
        self, tokens: Sequence[int], params: SamplingParams, key: SampleKey, **options: Any
    ) -> Sampled:
        found = await super().generate(tokens, params, key, **options)
        self.sampled.append((list(tokens), key, found))
        return found

    async def sleep(self) -> None: ...


def letters(renderer: Renderer, end: int | None) -> Callable[..., list[int]]:
    """Script of replies: a few letters, which end with the end token or at the limit of tokens."""
    ids = [renderer.plain(letter)[-1] for letter in "abcxyz"]

    def script(tokens: Sequence[int], params: SamplingParams, key: SampleKey) -> list[int]:
        rng = random.Random(repr((tuple(tokens), params.seed, key)))
        reply = rng.choices(ids, k=rng.randint(1, params.max_tokens))
        return [*reply[:-1], end] if end is not None and rng.random() < 0.7 else reply

    return script


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def played(
    generator: Any,
    renderer: Renderer,
    make: MakeEpisode,
    tasks: Sequence[Task],
    *,
    samples: int = 1,
    limits: Limits | None = None,
    params: SamplingParams | None = None,
    stops: tuple[str, ...] = (),
    scorer: Any = None,
) -> tuple[list[Group], dict[str, float]]:
    """Groups and metrics of one call of a driver."""
    limits = limits or Limits(tokens=1000, turns=8, step_s=5.0)
    player = Player(generator, renderer, limits, make, stops, "tests")
    driver = Driver(player, params or SamplingParams(max_tokens=6), samples)
    groups = asyncio.run(groups_in_order(driver.play(tasks, 0, scorer), tasks))
    return groups, driver.stats()


__all__ = ["Action", "End", "Observation"]
