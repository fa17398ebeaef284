"""The event loop of a run reports code that blocks it."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import threading
import time

import pytest

from sixfold import event_loop
from sixfold.checks.scorer import together


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_loop, "BLOCKED_S", 0.1)


async def blocking_step() -> None:
    time.sleep(0.6)


async def waiting_step() -> None:
    await asyncio.sleep(0.6)


def test_code_that_blocks_the_loop_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    loop = event_loop.EventLoop()
    with caplog.at_level(logging.WARNING, "sixfold"):
        loop.run(blocking_step())
    loop.close()
    (record,) = caplog.records
    said = record.getMessage()
    assert f"{__file__}:" in said and "(blocking_step)" in said and "asyncio.to_thread" in said


def test_waiting_is_not_reported_and_no_thread_is_left(caplog: pytest.LogCaptureFixture) -> None:
    loop = event_loop.EventLoop()
    with caplog.at_level(logging.WARNING, "sixfold"):
        loop.run(waiting_step())
    loop.close()
    assert not caplog.records
    assert not [t for t in threading.enumerate() if t.name == "event-loop-watch"]


def test_tasks_of_a_loop_in_the_background_go_on_between_calls() -> None:
    loop, count = event_loop.BackgroundLoop(), 0

    async def counting() -> None:
        nonlocal count
        while True:
            count += 1
            await asyncio.sleep(0)

    async def begin() -> asyncio.Task[None]:
        return asyncio.create_task(counting())

    task = loop.run(begin())
    seen = count
    while count <= seen:
        time.sleep(0.001)
    loop.close()
    assert task.cancelled()
    loop.close()
    assert not [t for t in threading.enumerate() if t.name == "event-loop"]


def test_an_interrupt_ends_the_tasks_of_a_loop_in_the_background() -> None:
    loop, freed = event_loop.BackgroundLoop(), []

    async def waiting() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            freed.append(True)

    async def begin() -> None:
        other = asyncio.create_task(waiting())
        await asyncio.sleep(0)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        await other

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # nohup ignores it
    try:
        with pytest.raises(KeyboardInterrupt):
            loop.run(begin())
    finally:
        signal.signal(signal.SIGINT, before)
    assert freed == [True]
    loop.close()


def test_an_interrupt_within_one_of_several_tasks_is_reported_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    loop, freed = event_loop.EventLoop(), []

    async def interrupted() -> None:
        raise KeyboardInterrupt

    async def waiting() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            freed.append(True)

    with pytest.raises(KeyboardInterrupt):
        loop.run(together([waiting(), interrupted()]))
    assert freed == [True]
    loop.close()
    gc.collect()
    assert not caplog.records  # "Task exception was never retrieved"
