"""Convert what reward functions return to Python numbers.

They may return tensors, arrays, numpy scalars and awaitables. Neither torch nor numpy is imported:
arrays of every library have `tolist`.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import threading
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Protocol, SupportsFloat, runtime_checkable


@runtime_checkable
class Array(Protocol):
    """A tensor, an array, or a scalar of an array library."""

    def tolist(self) -> Any: ...


def number(value: Any) -> float:
    """One number as a float. An array must have exactly one entry.

    Raises:
        TypeError: for text, None, lists, complex numbers and arrays of several entries.
        ValueError: for an integer that is too large for a float.
    """
    plain = value.tolist() if isinstance(value, Array) else value
    if isinstance(value, Array):
        while isinstance(plain, list) and len(plain) == 1:
            plain = plain[0]
    if not isinstance(plain, SupportsFloat):
        raise TypeError(f"returned {type(value).__name__}, not a number")
    try:
        return float(plain)
    except OverflowError as error:
        raise ValueError("returned an integer that is too large for a float") from error


def entries(values: Any) -> list[Any]:
    """Entries of a list, tuple, generator, tensor, array or column of rewards.

    Raises:
        TypeError: for anything else, including text and dictionaries.
    """
    plain = values.tolist() if isinstance(values, Array) else values
    try:
        if not isinstance(plain, str | bytes | Mapping):
            return [
                (
                    entry[0]
                    if isinstance(values, Array) and isinstance(entry, list) and len(entry) == 1
                    else entry
                )
                for entry in plain
            ]
    except TypeError:
        pass
    raise TypeError(f"returned {type(values).__name__}, not a list of rewards")


def awaited(value: Any) -> Any:
    """`value`, or its result if it is awaitable.

    The awaitable runs in an event loop in a separate thread: the caller may be inside a running
    loop (a notebook). All calls share this loop, because clients that a reward keeps between calls
    stay bound to one loop.
    """
    if not inspect.isawaitable(value):
        return value
    future = asyncio.run_coroutine_threadsafe(_result(value), reward_loop())
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


def reward_loop() -> asyncio.AbstractEventLoop:
    """The event loop in which the async rewards of this process run, in a thread of its own."""
    return _loop(os.getpid())


@lru_cache(maxsize=1)
def _loop(process: int) -> asyncio.AbstractEventLoop:
    """Event loop of `process`.

    A forked child does not inherit its parent's threads and needs its own.
    """
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="async-rewards", daemon=True).start()
    return loop


async def _result(awaitable: Any) -> Any:
    return await awaitable
