"""Run a coroutine to its end from ordinary code."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run_blocking(coroutine: Coroutine[Any, Any, T]) -> T:
    """Result of a coroutine, which runs in an event loop of its own in this thread.

    It also works inside a running event loop, such as that of a notebook. That loop stands still
    meanwhile.
    """
    outer = asyncio._get_running_loop()
    asyncio._set_running_loop(None)
    try:
        # With a factory, the runner does not change the thread's current event loop.
        with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
            return runner.run(coroutine)
    finally:
        asyncio._set_running_loop(outer)
