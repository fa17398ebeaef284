"""The contract of generators, tested on every generator."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine, Iterator
from dataclasses import replace
from typing import Any, TypeVar

import pytest
from generator_subjects import GENERATORS, Make, Subject
from outside_subjects import OUTSIDE

from sixfold.model.loading import Policy
from sixfold.rollout.generator import GeneratorClosed, Sampled, SampleKey
from sixfold.types import SamplingParams

T = TypeVar("T")
SLOW = [  # they start processes, and Ray starts a cluster
    pytest.param(name, marks=[pytest.mark.slow, *[pytest.mark.nightly] * (name == "ray")])
    for name in OUTSIDE
]
PARAMS = SamplingParams(max_tokens=12, temperature=0.9, seed=3)
PROMPTS = [[3 + (5 * i + 3 * j) % 40 for j in range(n)] for i, n in enumerate((1, 7, 16, 33))]


@pytest.fixture(scope="module", params=[*GENERATORS, *SLOW])
def make(request: pytest.FixtureRequest, policy: Policy) -> Iterator[Make]:
    with {**GENERATORS, **OUTSIDE}[request.param](policy) as it:
        yield it


@pytest.fixture
def subject(make: Make, request: pytest.FixtureRequest) -> Subject:
    made = make()
    if reason := made.cannot.get(request.function.__name__):
        pytest.skip(reason)
    return made


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in a new event loop, with a time limit."""

    async def bounded() -> T:
        async with asyncio.timeout(60):
            return await work

    return asyncio.run(bounded())


def outcome(sampled: Sampled) -> tuple[Any, ...]:
    return (sampled.tokens, sampled.logp, sampled.version, sampled.finish_reason, sampled.text)


async def freed(subject: Subject) -> None:
    """Wait until the engine holds nothing. A server notices a closed connection with a delay."""
    async with asyncio.timeout(5):
        while any(subject.held()):
            await asyncio.sleep(0.001)


async def busy(subject: Subject, *, running: int = 1) -> None:
    """Wait until calls have reached the engine."""
    while sum(subject.held()) < running:
        await asyncio.sleep(0)


def test_streams_have_the_length_of_the_completion(subject: Subject) -> None:
    async def play() -> None:
        for i, prompt in enumerate(PROMPTS):
            s = await subject.generator.generate(prompt, PARAMS, SampleKey(f"t{i}"))
            assert len(s.tokens) == len(s.logp) == len(s.version) == PARAMS.max_tokens
            assert (s.finish_reason, s.text, s.kept) == ("length", None, None)
            assert set(s.version) == {subject.generator.version}
            assert all(x < 0 for x in s.logp)
            assert 0 <= s.reused <= len(prompt) and s.seconds >= 0

    run(play())


@pytest.mark.mostly_nightly(3)
def test_the_same_key_gives_the_same_tokens_whatever_else_runs(make: Make) -> None:
    keys = [
        (prompt, replace(PARAMS, seed=seed, max_tokens=n), SampleKey(f"t{i}", k))
        for i, prompt in enumerate(PROMPTS)
        for seed, n in ((3, 12), (4, 7))
        for k in range(3)
    ]

    async def alone(subject: Subject) -> list[tuple[Any, ...]]:
        return [outcome(await subject.generator.generate(*key)) for key in keys]

    async def together(subject: Subject, order: list[int]) -> list[tuple[Any, ...]]:
        found: dict[int, tuple[Any, ...]] = {}

        async def one(i: int) -> None:
            for _ in range(i % 4):
                await asyncio.sleep(0.003)
            found[i] = outcome(await subject.generator.generate(*keys[i], priority=i % 3))

        await asyncio.gather(*map(one, order))
        return [found[i] for i in range(len(keys))]

    expected = run(alone(make()))
    assert len({str(tokens) for tokens, *_ in expected}) == len(keys)
    order = list(range(len(keys)))
    assert run(together(make(), order)) == expected
    random.Random(0).shuffle(order)
    assert run(together(make(max_running=3), order)) == expected


def test_the_same_key_twice_at_once(subject: Subject) -> None:
    async def play() -> None:
        one, two, other = await asyncio.gather(
            *(subject.generator.generate(PROMPTS[1], PARAMS, SampleKey("t", k)) for k in (1, 1, 2))
        )
        assert outcome(one) == outcome(two) != outcome(other)

    run(play())


def test_a_later_turn_draws_fresh_noise_and_a_replay_the_same(subject: Subject) -> None:
    """If the prompt ends with the first part of a completion and has the same origin, the sampled
    tokens are the rest of the completion. With another origin they differ.
    """
    prompt = PROMPTS[1]

    async def play() -> None:
        generate = subject.generator.generate
        whole = await generate(prompt, PARAMS, SampleKey("t", 1))
        for cut in (1, 5):
            params = replace(PARAMS, max_tokens=PARAMS.max_tokens - cut)
            start = prompt + whole.tokens[:cut]
            rest = await generate(start, params, SampleKey("t", 1, origin=len(prompt)))
            assert rest.tokens == whole.tokens[cut:]
            assert rest.logp == pytest.approx(whole.logp[cut:], abs=1e-5)
            fresh = await generate(start, params, SampleKey("t", 1))
            assert fresh.tokens != rest.tokens

    run(play())


def test_a_replay_of_a_later_turn_draws_the_same(subject: Subject) -> None:
    async def play() -> None:
        generate = subject.generator.generate
        start = PROMPTS[1] + [9, 8, 7]
        later = SampleKey("t", 1, origin=len(PROMPTS[1]))
        first = await generate(start, PARAMS, later)
        assert outcome(await generate(start, PARAMS, later)) == outcome(first)
        assert (await generate(start, PARAMS, SampleKey("t", 1))).tokens != first.tokens

    run(play())


@pytest.mark.nightly
def test_a_cancelled_call_holds_nothing_and_leaves_others_unchanged(make: Make) -> None:
    subject = make(max_running=4)
    params = replace(PARAMS, max_tokens=40)

    async def alone() -> list[Any]:
        return [
            outcome(await subject.generator.generate(PROMPTS[2], params, SampleKey("t", k)))
            for k in range(6)
        ]

    async def play() -> list[Any]:
        tasks = [
            asyncio.create_task(subject.generator.generate(PROMPTS[2], params, SampleKey("t", k)))
            for k in range(10)
        ]
        await asyncio.sleep(0)
        tasks[9].cancel()  # before the engine has seen it
        await busy(subject)
        for k in (6, 7, 8):  # running, and waiting
            tasks[k].cancel()
            with pytest.raises(asyncio.CancelledError):
                await tasks[k]
        kept = await asyncio.gather(*tasks[:6])
        await asyncio.gather(tasks[9], return_exceptions=True)
        return [outcome(s) for s in kept]

    expected = run(alone())
    assert run(play()) == expected
    run(freed(subject))

    async def all_of_them() -> None:
        tasks = [
            asyncio.create_task(
                subject.generator.generate(PROMPTS[2], replace(params, max_tokens=3000), key)
            )
            for key in (SampleKey("t", 0), SampleKey("t", 1), SampleKey("u", 0))
        ]
        await busy(subject)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await freed(subject)

    run(all_of_them())


def test_a_larger_priority_is_served_first(make: Make) -> None:
    subject = make(max_running=1)
    ended: list[int] = []

    async def play() -> None:
        async def one(priority: int) -> None:
            await subject.generator.generate(
                PROMPTS[1], PARAMS, SampleKey(f"p{priority}"), priority=priority
            )
            ended.append(priority)

        first = asyncio.create_task(one(100))
        await busy(subject)
        await asyncio.gather(*map(one, (-1, 0, 7, 3)))
        await first

    run(play())
    assert ended == [100, 7, 3, 0, -1]


def test_stop_strings_cut_the_same_completion(subject: Subject) -> None:
    async def play() -> None:
        for k in range(6):
            key = SampleKey("t", k)
            free = await subject.generator.generate(PROMPTS[1], PARAMS, key)
            texts = [
                subject.renderer.decode(free.tokens[:n]) for n in range(1, len(free.tokens) + 1)
            ]
            stop = texts[-1][len(texts[-1]) // 2 :][:2]
            cut = next(n for n, text in enumerate(texts, 1) if stop in text)
            got = await subject.generator.generate(PROMPTS[1], PARAMS, key, stops=["%%", stop])
            assert (got.tokens, got.finish_reason) == (free.tokens[:cut], "stop")
            assert got.text == texts[cut - 1][: texts[cut - 1].index(stop)]
            assert len(got.logp) == len(got.version) == cut
            never = await subject.generator.generate(PROMPTS[1], PARAMS, key, stops=["%%"])
            assert outcome(never) == outcome(free)

    run(play())


def test_stop_tokens_end_a_completion(subject: Subject) -> None:
    async def play() -> None:
        free = await subject.generator.generate(PROMPTS[1], PARAMS, SampleKey("t"))
        stop = free.tokens[5]
        params = replace(PARAMS, stop_token_ids=(stop,))
        got = await subject.generator.generate(PROMPTS[1], params, SampleKey("t"))
        assert got.tokens == free.tokens[: free.tokens.index(stop) + 1]
        assert got.finish_reason == "stop"

    run(play())


def test_weights_change_under_running_calls(subject: Subject) -> None:
    params = replace(PARAMS, max_tokens=100)
    key = SampleKey("t")

    async def play() -> None:
        generate = subject.generator.generate
        old = await generate(PROMPTS[1], params, key)
        running = asyncio.create_task(generate(PROMPTS[1], params, key))
        await busy(subject)
        assert await subject.generator.load(subject.other_weights, 5) == 1
        assert subject.generator.version == 5
        mixed = await running
        changed = mixed.version.index(5)
        assert mixed.version == [0] * changed + [5] * (100 - changed)
        assert mixed.tokens[:changed] == old.tokens[:changed] and mixed.tokens != old.tokens
        new = await generate(PROMPTS[1], params, key)
        assert set(new.version) == {5} and new.tokens != old.tokens

    run(play())


def test_a_version_must_grow(subject: Subject) -> None:
    async def play() -> None:
        generate = subject.generator.generate
        await subject.generator.load(subject.other_weights, 5)
        new = await generate(PROMPTS[1], PARAMS, SampleKey("t"))
        for version in (4, 5):
            with pytest.raises(ValueError, match="version"):
                await subject.generator.load(subject.other_weights, version)
        assert outcome(await generate(PROMPTS[1], PARAMS, SampleKey("t"))) == outcome(new)

    run(play())


def test_scores_are_the_log_probs_of_sampling(subject: Subject) -> None:
    async def play() -> None:
        prompt = PROMPTS[2]
        params = replace(PARAMS, temperature=1.0)
        sampled, other = await asyncio.gather(
            subject.generator.generate(prompt, params, SampleKey("t")),
            subject.generator.score(PROMPTS[3]),
        )
        scores = await subject.generator.score(prompt + sampled.tokens)
        assert len(scores) == len(prompt) + len(sampled.tokens) - 1
        assert scores[len(prompt) - 1 :] == pytest.approx(sampled.logp, abs=1e-5)
        assert await subject.generator.score(PROMPTS[3]) == other
        assert await subject.generator.score([7]) == []

    run(play())


@pytest.mark.parametrize(
    ("tokens", "changes", "origin"),
    [
        ([], {}, None),
        ([5, 6], {"max_tokens": 0}, None),
        ([5, 6], {"max_tokens": 1_000_000}, None),
        ([5, 6], {}, 3),
        ([5, 6], {}, -1),
    ],
)
def test_an_impossible_request_is_refused_and_harmless(
    subject: Subject, tokens: list[int], changes: dict[str, int], origin: int | None
) -> None:
    async def play() -> None:
        other = asyncio.create_task(subject.generator.generate(PROMPTS[1], PARAMS, SampleKey("t")))
        with pytest.raises(ValueError):
            await subject.generator.generate(
                tokens, replace(PARAMS, **changes), SampleKey("u", origin=origin)
            )
        await other
        await freed(subject)

    run(play())


async def long_calls(subject: Subject, count: int) -> list[asyncio.Task[Any]]:
    """Start calls of many tokens, and wait until one of them runs."""
    params = replace(PARAMS, max_tokens=2000)
    made: list[asyncio.Task[Any]] = [
        asyncio.create_task(subject.generator.generate(PROMPTS[1], params, SampleKey("t", k)))
        for k in range(count)
    ]
    await busy(subject)
    return made


def test_close_ends_waiting_calls(make: Make) -> None:
    subject = make(max_running=1)

    async def play() -> None:
        tasks = await long_calls(subject, 3)
        tasks.append(asyncio.create_task(subject.generator.score(PROMPTS[3] * 40)))
        await asyncio.sleep(0)
        subject.generator.close()
        subject.generator.close()
        for found in await asyncio.gather(*tasks[:3], return_exceptions=True):
            assert isinstance(found, GeneratorClosed)
        await asyncio.gather(tasks[3], return_exceptions=True)
        await all_refused(subject)

    run(play())
    run(freed(subject))


def test_a_failure_of_the_engine_ends_all_calls(make: Make) -> None:
    subject = make(max_running=2)

    async def play() -> None:
        tasks = await long_calls(subject, 4)
        subject.fail()
        for found in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(found, GeneratorClosed)
        await all_refused(subject)

    run(play())
    subject.generator.close()


async def all_refused(subject: Subject) -> None:
    for work in (
        subject.generator.generate(PROMPTS[1], PARAMS, SampleKey("t")),
        subject.generator.score(PROMPTS[1]),
        subject.generator.load(subject.other_weights, 9),
    ):
        with pytest.raises(GeneratorClosed):
            await work


def test_a_generator_serves_one_event_loop_after_another(subject: Subject) -> None:
    async def one() -> Any:
        return outcome(await subject.generator.generate(PROMPTS[1], PARAMS, SampleKey("t")))

    async def left() -> None:
        asyncio.create_task(one())  # noqa: RUF006
        await busy(subject)

    first = run(one())
    run(left())  # the loop ends while the call runs: it is cancelled
    run(freed(subject))
    assert run(one()) == first
