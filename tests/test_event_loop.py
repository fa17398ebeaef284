"""The event loop of a run reports code that blocks it."""

from __future__ import annotations

import asyncio
import logging
import threading
import time

import pytest

from sixfold import event_loop


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
