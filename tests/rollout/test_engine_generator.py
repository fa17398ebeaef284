"""The generator on the embedded engine shares requests, does not block the event loop, and ends its
thread.
"""

from __future__ import annotations

import asyncio
import gc
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sixfold import timeline
from sixfold.engine.engine import Engine
from sixfold.model.causal_lm import CausalLM
from sixfold.model.loading import Policy
from sixfold.renderer.renderer import Renderer
from sixfold.rollout import engine_generator
from sixfold.rollout.engine_generator import EngineGenerator
from sixfold.rollout.generator import GeneratorClosed, Sampled, SampleKey
from sixfold.run.interrupts import Interrupted, Interrupts
from sixfold.types import SamplingParams

PARAMS = SamplingParams(max_tokens=10, temperature=0.9, seed=3)
PROMPTS = [[3 + (5 * i + 3 * j) % 40 for j in range(n)] for i, n in enumerate((5, 20, 33))]


def make(policy: Policy, **sizes: Any) -> EngineGenerator:
    engine = Engine(CausalLM(policy.model), **{"kv_tokens": 2000, **sizes})
    return EngineGenerator(engine, Renderer(policy.tokenizer, policy.stop_token_ids))


@pytest.fixture
def generator(policy: Policy) -> Iterator[EngineGenerator]:
    made = make(policy)
    yield made
    made.close()


async def sample(generator: EngineGenerator, **changes: Any) -> list[Sampled]:
    """Three samples of every prompt."""
    params = replace(PARAMS, **changes)
    return await asyncio.gather(
        *(
            generator.generate(prompt, params, SampleKey(f"t{i}", k))
            for i, prompt in enumerate(PROMPTS)
            for k in range(3)
        )
    )


def test_a_failure_while_calls_are_admitted_ends_them(generator: EngineGenerator) -> None:
    """The engine has not queued them yet, so its failure would not answer them."""
    generator.engine.add = lambda *args, **named: 1 / 0  # type: ignore[method-assign]
    for _ in range(2):
        with pytest.raises(GeneratorClosed, match="ZeroDivisionError"):
            asyncio.run(asyncio.wait_for(sample(generator), 20))


def test_calls_of_one_iteration_of_the_loop_are_samples_of_one_request(
    policy: Policy, generator: EngineGenerator
) -> None:
    """The same requests, steps and counters as if they had been given to the engine directly."""
    added: list[tuple[str, list[int]]] = []
    add = generator.engine.add

    def noted(*args: Any, **named: Any) -> Any:
        added.append((args[0], list(args[3])))
        return add(*args, **named)

    generator.engine.add = noted  # type: ignore[method-assign]
    found = asyncio.run(sample(generator))
    assert added == [(f"t{i}", [0, 1, 2]) for i in range(3)]
    direct = Engine(CausalLM(policy.model), kv_tokens=2000)
    for i, prompt in enumerate(PROMPTS):
        direct.add(f"t{i}", prompt, PARAMS, [0, 1, 2])
    ended = sorted(direct.run(), key=lambda s: (s.request.key, s.sample))
    assert [s.tokens[len(s.request.prompt) :] for s in ended] == [s.tokens for s in found]
    assert [s.logp for s in ended] == [s.logp for s in found]
    assert generator.engine.stats == direct.stats
    # Two of the three samples of a prompt share it.
    assert sum(s.reused for s in found) == direct.stats.reused_tokens == 2 * 58
    again = asyncio.run(sample(generator))  # now the prefix cache holds the prompts
    assert sum(s.reused for s in found + again) == generator.engine.stats.reused_tokens
    assert generator.engine.stats.reused_tokens > 4 * 58


@pytest.mark.parametrize(
    "change",
    [
        {"params": replace(PARAMS, temperature=0.5)},
        {"key": SampleKey("u", 2)},
        {"key": SampleKey("t", 2, origin=4)},
        {"tokens": PROMPTS[1]},
        {"stops": ["x"]},
        {"priority": 1},
    ],
    ids=lambda change: next(iter(change)),
)
def test_calls_that_differ_are_requests_of_their_own(
    generator: EngineGenerator, change: dict[str, Any]
) -> None:
    arrivals: set[int] = set()
    add = generator.engine.add

    def noted(*args: Any, **named: Any) -> Any:
        request = add(*args, **named)
        arrivals.add(request.arrival)
        return request

    generator.engine.add = noted  # type: ignore[method-assign]
    first: dict[str, Any] = {"tokens": PROMPTS[0], "params": PARAMS, "key": SampleKey("t", 1)}
    second = first | {"key": SampleKey("t", 2)} | change

    async def play() -> None:
        await asyncio.gather(generator.generate(**first), generator.generate(**second))

    asyncio.run(play())
    assert len(arrivals) == 2


def test_only_steps_in_which_something_ended_wake_the_event_loop(
    generator: EngineGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play() -> tuple[int, int]:
        loop = asyncio.get_running_loop()
        await generator.call(lambda engine: None)  # the thread runs from here on
        woken: list[int] = []
        wake = loop.call_soon_threadsafe

        def noted(*args: Any, **named: Any) -> Any:
            woken.append(1)
            return wake(*args, **named)

        monkeypatch.setattr(loop, "call_soon_threadsafe", noted)
        before = generator.engine.stats.steps
        await asyncio.gather(
            sample(generator, max_tokens=5),
            sample(generator, max_tokens=40),
            sample(generator, max_tokens=40, temperature=0.0),
        )
        return len(woken), generator.engine.stats.steps - before

    woken, steps = asyncio.run(play())
    assert woken == 2 and steps >= 40


def test_the_engine_is_busy_in_its_steps_only(
    generator: EngineGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that only a step (1 s), a weight load (7 s) and idle time (100 s) move."""
    now, steps, engine = 0.0, 0, generator.engine
    for module in (timeline, engine_generator):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now))
    step = engine.step

    def counted() -> Any:
        nonlocal now, steps
        now, steps = now + 1, steps + 1
        return step()

    def load(*given: Any) -> None:
        nonlocal now
        now += 7

    engine.step, engine.load_weights = counted, load  # type: ignore[method-assign]

    async def play() -> list[Sampled]:
        nonlocal now
        found = await sample(generator)
        await generator.call(lambda engine: None)  # the step of the last answer ends before it
        now += 100
        await generator.load({}, 1)
        return found

    found = asyncio.run(play())
    (activity,) = generator.activities()
    assert steps > 9
    assert (activity.at, activity.busy_s) == (steps + 107, steps)
    assert activity.loaded == (steps + 100, steps + 107)
    assert activity.tokens == sum(len(s.tokens) for s in found)


def test_a_call_sees_the_engine_between_two_steps(generator: EngineGenerator) -> None:
    async def play() -> None:
        running = asyncio.create_task(sample(generator, max_tokens=60))
        seen = []
        while not running.done():
            seen.append(await generator.call(lambda e: (threading.current_thread().name, e.busy)))
        assert ("engine", True) in seen
        with pytest.raises(ZeroDivisionError):
            await generator.call(lambda engine: 1 // 0)
        assert len(await sample(generator)) == 9  # the engine goes on

    asyncio.run(play())


@pytest.mark.parametrize("threads", [1, 2])
def test_the_engine_computes_with_as_many_threads_as_its_caller(
    policy: Policy, threads: int
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    generator = make(policy)
    torch.set_num_threads(before)
    try:
        state = asyncio.run(
            generator.call(lambda engine: (torch.get_num_threads(), torch.is_grad_enabled()))
        )
        assert state == (threads, True)
    finally:
        generator.close()


def test_the_engine_computes_on_the_gpu_of_its_maker(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each thread has its own current GPU, on which kernels run (run.device = cuda:1)."""
    chosen: list[tuple[int, str]] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(
        torch.cuda,
        "set_device",
        lambda device: chosen.append((device, threading.current_thread().name)),
    )
    made = make(policy)
    asyncio.run(made.call(lambda engine: None))
    made.close()
    assert chosen == [(1, "engine")]


def test_a_signal_leaves_the_event_loop_and_frees_the_engine(generator: EngineGenerator) -> None:
    """The signal handler raises inside the event loop, as that of `run/interrupts.py` does. Then
    the same loop continues to work.
    """
    expected = asyncio.run(sample(generator))
    runner, interrupts = asyncio.Runner(), Interrupts(lambda text: None)

    async def play() -> None:
        running = asyncio.create_task(sample(generator, max_tokens=200))
        while not generator.engine.busy:
            await asyncio.sleep(0)
        signal.raise_signal(signal.SIGINT)
        await running

    async def cancel_all() -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    with runner:
        with interrupts, pytest.raises(Interrupted):
            runner.run(play())
        runner.run(cancel_all())
        assert not generator.engine.busy and generator.engine.usage().used == 0
        again = runner.run(sample(generator))
    assert [s.tokens for s in again] == [s.tokens for s in expected]


def test_a_call_that_is_cancelled_twice_does_not_stop_the_engine(
    generator: EngineGenerator,
) -> None:
    async def play() -> None:
        tasks = [asyncio.create_task(sample(generator, max_tokens=200)) for _ in range(2)]
        while not generator.engine.scheduler.running:
            await asyncio.sleep(0.001)
        holds = asyncio.create_task(generator.call(lambda engine: time.sleep(0.2)))
        await asyncio.sleep(0.05)
        for _ in range(2):  # the second time while the first waits for the engine's thread
            for task in tasks:
                task.cancel()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        await asyncio.gather(*tasks, return_exceptions=True)
        await holds
        assert len(await sample(generator)) == 9
        assert generator.engine.scheduler.blocks.used == 0

    asyncio.run(asyncio.wait_for(play(), 60))


def test_close_answers_calls_that_have_not_reached_the_engine(generator: EngineGenerator) -> None:
    """The engine is in a step when calls of every kind arrive, and then `close`."""
    begun, may_end = threading.Event(), threading.Event()
    step = generator.engine.step

    def held() -> Any:
        begun.set()
        assert may_end.wait(30)
        return step()

    generator.engine.step = held  # type: ignore[method-assign]

    async def play() -> list[Any]:
        works = [sample(generator), generator.score([5, 6]), generator.load({}, 9)]
        works += [generator.call(lambda engine: None), sample(generator, seed=4)]
        tasks = [asyncio.ensure_future(works[0])]
        while not begun.is_set():
            await asyncio.sleep(0)
        tasks += [asyncio.ensure_future(work) for work in works[1:]]
        gone = asyncio.ensure_future(generator.score([7, 8]))
        for _ in range(3):
            await asyncio.sleep(0)
        gone.cancel()
        await asyncio.sleep(0)
        threading.Timer(0.1, may_end.set).start()
        generator.close()
        with pytest.raises(asyncio.CancelledError):
            await gone
        return await asyncio.gather(*tasks, return_exceptions=True)

    async def bounded() -> list[Any]:
        return await asyncio.wait_for(play(), 30)

    assert [type(found) for found in asyncio.run(bounded())] == [GeneratorClosed] * 5
    assert generator.engine.usage().used == 0


def test_calls_of_an_event_loop_that_stopped_do_not_block_the_next(
    generator: EngineGenerator,
) -> None:
    loop = asyncio.new_event_loop()

    async def begin() -> asyncio.Task[list[Sampled]]:
        left = asyncio.create_task(sample(generator))
        await asyncio.sleep(0)  # the calls wait for the end of this iteration
        return left

    left = loop.run_until_complete(begin())
    found = asyncio.run(asyncio.wait_for(sample(generator), 30))
    assert len(found) == 9 and not left.done()
    left.cancel()
    with pytest.raises(asyncio.CancelledError):
        loop.run_until_complete(left)
    loop.close()


def test_an_owner_that_forgets_to_close_leaves_no_thread(policy: Policy) -> None:
    generator = make(policy)
    asyncio.run(sample(generator))
    thread, engine = generator._thread._thread, weakref.ref(generator.engine)
    assert thread.is_alive()
    del generator
    gc.collect()
    thread.join(10)
    assert not thread.is_alive() and engine() is None


def test_a_generator_without_calls_has_no_thread(policy: Policy) -> None:
    generator = make(policy)
    assert not generator._thread._thread.is_alive()
    generator.close()
    with pytest.raises(GeneratorClosed):
        asyncio.run(sample(generator))


def test_the_memory_of_the_cache_is_freed_between_rollouts_if_requested(policy: Policy) -> None:
    renderer = Renderer(policy.tokenizer)
    for release in (False, True):
        engine = Engine(CausalLM(policy.model), kv_tokens=2000)
        generator = EngineGenerator(engine, renderer, release_kv=release)

        async def play(generator: EngineGenerator = generator) -> list[list[int]]:
            first = await sample(generator)
            await generator.sleep()
            assert bool(generator.engine.runner.cache.tensors()) != generator.release_kv
            assert [s.tokens for s in first] == [s.tokens for s in await sample(generator)]
            return [s.tokens for s in first]

        asyncio.run(play())
        generator.close()


EXIT = """
import asyncio, sys, time
sys.path[:0] = sys.argv[1:]
from tests.conftest import make_tiny
from sixfold.engine.engine import Engine
from sixfold.model.attention import NAME
from sixfold.model.causal_lm import CausalLM
from sixfold.rollout.engine_generator import EngineGenerator
from sixfold.rollout.generator import SampleKey
from sixfold.types import SamplingParams
model = make_tiny("qwen3")
model.set_attn_implementation(NAME)
class NoRenderer:
    def copy(self): return self
generator = EngineGenerator(Engine(CausalLM(model), kv_tokens=100000), NoRenderer())
async def play():
    asyncio.create_task(generator.generate([3], SamplingParams(max_tokens=50000), SampleKey("t")))
    while generator.engine.stats.steps < 5:
        await asyncio.sleep(0)
loop = asyncio.new_event_loop()
loop.run_until_complete(play())
print("out", flush=True)
"""


@pytest.mark.nightly
@pytest.mark.slow
def test_the_interpreter_exits_while_a_call_runs() -> None:
    """The program ends during a completion of many minutes, without closing the generator."""
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", EXIT, *sys.path],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "out\n"), done.stderr
    assert time.monotonic() - began < 60


def test_calls_of_one_iteration_of_the_loop_join_the_same_step(
    generator: EngineGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if they are handed over slowly. Otherwise the peaks of the queue depend on timing."""
    waiting: list[int] = []
    step, put = Engine.step, generator._thread._send

    def counted(engine: Engine) -> Any:
        waiting.append(len(engine.scheduler.waiting))
        return step(engine)

    def slow(*command: Any) -> None:
        put(*command)
        time.sleep(0.02)

    monkeypatch.setattr(Engine, "step", counted)
    monkeypatch.setattr(generator._thread, "_send", slow)
    asyncio.run(sample(generator))
    assert waiting[0] == len(PROMPTS)
