"""The generators for the contract suite, each with access to the state of its engine."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from fake_generator import FakeGenerator
from torch import Tensor

from sixfold.engine.engine import Engine
from sixfold.model.causal_lm import CausalLM
from sixfold.model.loading import Policy
from sixfold.renderer.renderer import Renderer
from sixfold.rollout.engine_generator import EngineGenerator
from sixfold.rollout.generator import Generator


@dataclass
class Subject:
    """A generator under test.

    Attributes:
        generator: the generator.
        renderer: renders prompts for it.
        context: maximum number of tokens of a prompt with its completion.
        held: what the engine holds for calls, such as running sequences and blocks in use. All are
            0 if it holds nothing.
        fail: makes the engine fail in its next step.
        other_weights: weights of another model of the same shape.
        cannot: name of a test that the engine cannot pass -> the reason.
    """

    generator: Generator
    renderer: Renderer
    context: int
    held: Callable[[], tuple[int, ...]]
    fail: Callable[[], None]
    other_weights: Mapping[str, Tensor]
    cannot: Mapping[str, str] = field(default_factory=dict)


class Make(Protocol):
    """Makes a subject that serves at most `max_running` calls at the same time."""

    def __call__(self, max_running: int = 64) -> Subject: ...


def slow_down(engine: Engine, broken: list[bool]) -> None:
    """Make steps so slow that calls overlap. Steps fail once `broken` has items."""
    step = engine.step

    def slower() -> Any:
        if broken:
            raise RuntimeError("out of memory")
        time.sleep(0.002)
        return step()

    engine.step = slower  # type: ignore[method-assign]


def other_weights(policy: Policy) -> dict[str, Tensor]:
    noise = torch.Generator().manual_seed(1)
    return {
        name: p.detach() + 0.1 * torch.randn(p.shape, generator=noise)
        for name, p in policy.model.named_parameters()
    }


@contextmanager
def engines(policy: Policy, **sizes: Any) -> Iterator[Make]:
    """Embedded engines."""
    made: list[EngineGenerator] = []

    def make(max_running: int = 64) -> Subject:
        engine = Engine(
            CausalLM(copy.deepcopy(policy.model)),
            **{"kv_tokens": 4096, "max_running": max_running, **sizes},
        )
        renderer = Renderer(policy.tokenizer, policy.stop_token_ids)
        generator = EngineGenerator(engine, renderer)
        made.append(generator)
        broken: list[bool] = []
        slow_down(engine, broken)

        def held() -> tuple[int, ...]:
            usage = engine.usage()
            return usage.waiting, usage.running, usage.used, engine.scheduler.reservation.reserved

        return Subject(
            generator, renderer, 4096, held, lambda: broken.append(True), other_weights(policy)
        )

    yield make
    for generator in made:
        generator.close()
        assert not generator._thread._thread.is_alive()


@contextmanager
def fakes(policy: Policy) -> Iterator[Make]:
    """The fake generator that other tests use."""

    def make(max_running: int = 64) -> Subject:
        renderer = Renderer(policy.tokenizer, policy.stop_token_ids)
        generator = FakeGenerator(renderer, context=4096, max_running=max_running)
        return Subject(
            generator,
            renderer,
            4096,
            lambda: (generator.running,),
            lambda: generator.fail("the engine has failed"),
            other_weights(policy),
        )

    yield make


GENERATORS: Mapping[str, Callable[..., Any]] = {"engine": engines, "fake": fakes}
"""Name -> context manager that takes a policy and yields a `Make`."""
