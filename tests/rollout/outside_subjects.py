"""Generators outside this process for the contract suite: vLLM's worker on a stand-in for vLLM, a
fake SGLang server, a real `sixfold serve` on loopback, and vLLM itself where SIXFOLD_VLLM_PYTHON
names an interpreter that has it.

Starting a generator takes seconds, so several tests share a subject until its weights have changed
or it was closed.
"""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import pytest
import ray
from fake_sglang import FakeSglang
from generator_subjects import Make, Subject, other_weights, slow_down
from tests.forked_programs import fork_programs
from tests.server.serving import running
from vllm_processes import ARGUMENTS, use_fake, weights

from sixfold.backends.ray_cluster import connected
from sixfold.backends.sampler_process import SamplerProcess
from sixfold.backends.sglang_server import SglangServer
from sixfold.backends.sixfold_server import SixfoldServer
from sixfold.backends.vllm_process import VllmProcess, vllm_config
from sixfold.engine.engine import Engine
from sixfold.model.loading import Policy, load_policy
from sixfold.recipe.schema import (
    EngineConfig,
    ModelConfig,
    ProcessPlacement,
    RayPlacement,
    ScratchConfig,
)
from sixfold.renderer.renderer import Renderer
from sixfold.rollout.generator import wait_for
from sixfold.run.samplers import start_samplers

CONTEXT = 4096
VLLM_PYTHON = os.environ.get("SIXFOLD_VLLM_PYTHON", "")
OLDER = "a run puts earlier weights back after it has evaluated newer ones"
SEEDED = "its noise depends on a seed per request, not on the position of a token"

Start = Callable[[Policy, int, ExitStack], Subject]


@contextmanager
def kept(start: Start, policy: Policy) -> Iterator[Make]:
    """Subjects that are used again while they are unchanged."""
    made: dict[int, Subject] = {}
    with ExitStack() as ending:
        unusable: set[int] = set()

        def make(max_running: int = 64) -> Subject:
            subject = made.get(max_running)
            if subject is None or subject.generator.version != 0 or id(subject) in unusable:
                subject = start(policy, max_running, ending)
                close, fail = subject.generator.close, subject.fail

                def mark(work: Callable[[], None], own: Subject) -> None:
                    unusable.add(id(own))
                    work()

                subject.generator.close = partial(mark, close, subject)  # type: ignore
                subject.fail = partial(mark, fail, subject)
                made[max_running] = subject
            return subject

        yield make


def vllm(policy: Policy, max_running: int, ending: ExitStack, python: str = "") -> Subject:
    renderer = Renderer(policy.tokenizer, policy.stop_token_ids)
    arguments = {**ARGUMENTS, "max_model_len": CONTEXT, "max_num_seqs": max_running}
    arguments["max_num_batched_tokens"] = CONTEXT
    with pytest.MonkeyPatch.context() as patch:
        if not python:
            use_fake(patch)
        config = vllm_config(policy.model.config, type(policy.model).__name__)
        generator = VllmProcess(config, policy.model.dtype, arguments, renderer, python)
        generator.ready()
    ending.callback(generator.close)
    wait_for(generator.load(weights(policy), 0))
    return Subject(
        generator,
        renderer,
        CONTEXT,
        lambda: (len(generator._link._calls),),
        generator._child.process.kill,
        named_twice(policy),
        {
            "test_a_later_turn_draws_fresh_noise_and_a_replay_the_same": SEEDED,
            "test_a_version_must_grow": OLDER,
        },
    )


def real_vllm(policy: Policy, max_running: int, ending: ExitStack) -> Subject:
    """vLLM itself. On a CPU it needs heads of 32."""
    sizes = ScratchConfig(
        hidden_size=64,
        layers=2,
        heads=2,
        kv_heads=1,
        head_dim=32,
        intermediate_size=64,
        context=CONTEXT,
    )
    own = load_policy(ModelConfig(scratch=sizes), seed=3, device="cpu")
    return vllm(own, max_running, ending, VLLM_PYTHON)


def sglang(policy: Policy, max_running: int, ending: ExitStack) -> Subject:
    renderer = Renderer(policy.tokenizer, policy.stop_token_ids)
    server = FakeSglang(renderer.copy(), CONTEXT, max_running)
    ending.callback(server.stop)
    config = vllm_config(policy.model.config, type(policy.model).__name__)
    generator = SglangServer(server.url, config, policy.model.dtype, renderer)
    wait_for(generator.check())
    generator.version = 0  # like the fake generator

    def fail() -> None:
        server.loop.call_soon_threadsafe(server.fake.fail, "out of memory")

    return Subject(
        generator,
        renderer,
        CONTEXT,
        lambda: (server.fake.running,),
        fail,
        named_twice(policy),
        {
            "test_a_later_turn_draws_fresh_noise_and_a_replay_the_same": SEEDED,
            "test_weights_change_under_running_calls": "SGLang waits for running requests",
            "test_a_version_must_grow": OLDER,
        },
    )


def sixfold(policy: Policy, max_running: int, ending: ExitStack) -> Subject:
    renderer = Renderer(policy.tokenizer, policy.stop_token_ids)
    broken: list[bool] = []

    def prepare(engine: Engine) -> None:
        slow_down(engine, broken)

    own = copy.copy(policy)
    object.__setattr__(own, "model", copy.deepcopy(policy.model))
    object.__setattr__(own, "context", CONTEXT)
    server = ending.enter_context(
        running(own, prepare, allow_weight_updates=True, max_running=max_running, kv_tokens=CONTEXT)
    )
    config = vllm_config(policy.model.config, type(policy.model).__name__)
    generator = SixfoldServer(server.url, config, policy.tokenizer)
    ending.callback(generator.close)
    wait_for(generator.connect())
    wait_for(generator.load(weights(policy), 0))

    def held() -> tuple[int, ...]:
        usage = server.engine.usage()
        return usage.waiting, usage.running, usage.used

    return Subject(
        generator,
        renderer,
        CONTEXT,
        held,
        lambda: broken.append(True),
        named_twice(policy),
        {"test_a_version_must_grow": OLDER},
    )


def apart(
    kind: type[ProcessPlacement] | type[RayPlacement],
    policy: Policy,
    max_running: int,
    ending: ExitStack,
) -> Subject:
    """Two processes with engines, of which none is replaced."""
    renderer = Renderer(policy.tokenizer, policy.stop_token_ids)
    if kind is RayPlacement:
        ending.enter_context(connected("", 20, 60.0))  # for all subjects
    with pytest.MonkeyPatch.context() as patch:
        fork_programs(patch)
        generator = start_samplers(
            # A narrow engine is that of the test of priorities, which are those of one queue.
            kind(samplers=2 if max_running > 1 else 1, restarts=0),
            EngineConfig(max_running=max_running),
            CONTEXT,
            policy,
            renderer,
            None,
            60.0,
            ending,
        )
    wait_for(generator.load(dict(policy.model.named_parameters()), 0))

    def fail() -> None:
        for place in generator.places:
            process: Any = place.process
            if isinstance(process, SamplerProcess):
                os.kill(process.child.pid, signal.SIGKILL)
            else:
                ray.kill(process.actor)

    return Subject(
        generator,
        renderer,
        CONTEXT,
        lambda: tuple(place.calls for place in generator.places),
        fail,
        other_weights(policy),
        {
            "test_weights_change_under_running_calls": (
                "a call may reach the engine after the weights; tests/run/test_placement.py"
            ),
        },
    )


def named_twice(policy: Policy) -> Mapping[str, Any]:
    """`other_weights`, with tied weights under each of their names."""
    made = other_weights(policy)
    names = {id(p): name for name, p in policy.model.named_parameters()}
    twice = policy.model.named_parameters(remove_duplicate=False)
    return {name: made[names[id(p)]] for name, p in twice}


OUTSIDE: Mapping[str, Any] = {
    "vllm": partial(kept, vllm),
    "sglang": partial(kept, sglang),
    "sixfold": partial(kept, sixfold),
    "processes": partial(kept, partial(apart, ProcessPlacement)),
    "ray": partial(kept, partial(apart, RayPlacement)),
    **({"real vllm": partial(kept, real_vllm)} if VLLM_PYTHON else {}),
}
"""Name -> context manager, as in `GENERATORS`."""
