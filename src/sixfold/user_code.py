"""What the run does around calls of user code: rewards, environments, tools and agents.

- **Copies.** User code may change its arguments: pop from a list of the row, add to a message.
  Every call gets its own copy. So the task of the run stays as it was loaded, for all samples,
  epochs, evaluations and resumed runs.
- **Time.** Code in the thread of the run that blocks is interrupted at its time limit.
- **Processes.** A child that the code has forked ends when the call returns. It must not continue
  as a second copy of the run.
- **Settings.** Torch's defaults are those of the run again after every call.
"""

from __future__ import annotations

import copy
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Generator, Sequence
from contextvars import ContextVar
from dataclasses import fields, replace
from functools import cache, partial
from types import FrameType, ModuleType, TracebackType
from typing import Any, TypeVar

from .types import Task

T = TypeVar("T")

log = logging.getLogger("sixfold.user_code")

_CONSTANT = frozenset({str, int, float, bool, bytes, complex, type(None)})


def own_copy(value: T) -> T:
    """Copy of a value, for one call of user code.

    Tasks and values of JSON are copied fast. The parts of the copy are distinct even if parts of
    the original are one object. Other objects are copied by `copy.deepcopy`. What cannot be
    copied, such as a lock or a connection, is shared.
    """
    made: Any = _copy(value)
    return made  # type: ignore[no-any-return]


def _copy(value: Any) -> Any:
    kind = type(value)
    if kind in _CONSTANT:
        return value
    if kind is list:
        return [one if type(one) in _CONSTANT else _copy(one) for one in value]
    if kind is dict:
        return {key: _copy(one) for key, one in value.items()}
    if kind is tuple:
        return tuple(map(_copy, value))
    if isinstance(value, Task):
        parts = {one.name: getattr(value, one.name) for one in fields(value)}
        parts |= {"columns": dict(value.columns), "template_args": dict(value.template_args)}
        return replace(value, **{name: _copy(part) for name, part in parts.items()})
    if isinstance(value, tuple) and hasattr(value, "_make"):
        return value._make(map(_copy, value))  # a named tuple
    try:
        return copy.deepcopy(value)
    except Exception:  # noqa: BLE001 - boundary: the class of a user, whose __deepcopy__ fails
        return value


class Blocked(BaseException):
    """Raised in user code that has blocked the thread of the run until its time limit.

    It is no Exception, so the code does not take it for a failure of its own.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__(f"it blocked for {seconds:g} s")


LIMIT: ContextVar[float | None] = ContextVar("LIMIT", default=None)
"""Time limit of the `Called` around the running code, for further tasks that it starts."""

AGAIN_S = 1.0
"""Seconds after which code that ignores `Blocked` gets it again."""


class calling:
    """Context of a call of user code.

    Args:
        seconds: time limit of code that blocks. Only the main thread can be interrupted, in Python
            code and in waits of the standard library; others have no limit. None: no limit.

    Raises:
        Blocked: the code has blocked for `seconds`.
    """

    __slots__ = ("_alarm", "_armed", "_of_thread", "_process", "_seconds", "_timer", "_torch")

    def __init__(self, seconds: float | None = None) -> None:
        main = threading.current_thread() is threading.main_thread()
        self._seconds = seconds if main else None
        self._process = os.getpid()
        torch = sys.modules.get("torch")
        self._torch = torch if hasattr(torch, "get_default_device") else None
        self._armed = False

    def __enter__(self) -> None:
        if self._torch is not None:
            self._of_thread = [get() for _, get, _ in _of_thread(self._torch)]
            _shared.enter(self._torch)
        if self._seconds is not None:
            self._alarm = signal.signal(signal.SIGALRM, self._late)
            now = signal.setitimer(signal.ITIMER_REAL, max(self._seconds, 1e-3), AGAIN_S)
            self._timer = (*now, time.monotonic())
            self._armed = True  # last: before it, no `__exit__` would end the timer

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._armed:
            self._disarm()
        if os.getpid() != self._process:
            os._exit(1)
        if self._torch is not None:
            _put_back(_of_thread(self._torch), self._of_thread)
            _shared.leave(self._torch)

    def _late(self, number: int, frame: FrameType | None) -> None:
        outside = frame is not None and frame.f_code is calling.__exit__.__code__
        if self._armed and self._seconds is not None and not outside:
            raise Blocked(self._seconds)

    def _disarm(self) -> None:
        self._armed = False  # first: from now on, no alarm raises
        left, interval, since = self._timer
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self._alarm or signal.SIG_DFL)
        if left:  # a timer of the caller
            passed = time.monotonic() - since
            signal.setitimer(signal.ITIMER_REAL, max(left - passed, 1e-3), interval)


class Called:
    """Awaitable of an async call of user code. Each part between two waits is a `calling`.

    Args:
        call: makes the coroutine.
        seconds: time limit of a part that blocks. None: no limit.
    """

    def __init__(
        self, call: Callable[[], Coroutine[Any, Any, Any]], seconds: float | None = None
    ) -> None:
        self._call = call
        self._seconds = seconds

    def __await__(self) -> Generator[Any, Any, Any]:
        LIMIT.set(self._seconds)
        coroutine = self._call()
        go_on: Callable[[], Any] = partial(coroutine.send, None)
        while True:
            with calling(self._seconds):
                try:
                    waits_for = go_on()
                except StopIteration as end:
                    return end.value
            try:
                yield waits_for
                go_on = partial(coroutine.send, None)
            except BaseException as error:  # noqa: BLE001  the coroutine gets it, e.g. a cancellation
                go_on = partial(coroutine.throw, error)


Setting = tuple[str, Callable[[], Any], Callable[[Any], Any]]
"""Name of a setting of torch, and functions that read and change it."""


@cache
def _of_thread(torch: ModuleType) -> tuple[Setting, ...]:
    """Settings that each thread has for itself."""

    def set_device(device: Any) -> None:
        torch.set_default_device(None if device.type == "cpu" else device)

    return (
        ("gradients", torch.is_grad_enabled, torch.set_grad_enabled),
        ("number of threads", torch.get_num_threads, torch.set_num_threads),
        ("default device", lambda: torch.empty(0).device, set_device),
    )


@cache
def _of_process(torch: ModuleType) -> tuple[Setting, ...]:
    """Settings that all threads share."""
    deterministic = torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms
    precision = torch.get_float32_matmul_precision, torch.set_float32_matmul_precision
    return (
        ("default dtype", torch.get_default_dtype, torch.set_default_dtype),
        ("deterministic algorithms", *deterministic),
        ("precision of matrix products", *precision),
    )


class _Shared:
    """Settings of the process as they were when no user code ran."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running = 0
        self._before: list[Any] = []

    def enter(self, torch: ModuleType) -> None:
        with self._lock:
            if not self._running:
                self._before = [get() for _, get, _ in _of_process(torch)]
            self._running += 1

    def leave(self, torch: ModuleType) -> None:
        """A call has ended: restore the settings."""
        with self._lock:
            self._running -= 1
            _put_back(_of_process(torch), self._before)


_shared = _Shared()
_told: set[str] = set()


def _put_back(settings: Sequence[Setting], values: Sequence[Any]) -> None:
    """Restore settings, and warn once about each that was changed."""
    for (name, get, put), value in zip(settings, values, strict=True):
        changed = get()
        if changed == value:
            continue
        put(value)
        if name not in _told:
            _told.add(name)
            log.warning(
                "user code changed torch's %s from %s to %s for the whole process. The run keeps"
                " %s: set it only where you make tensors",
                *(name, value, changed, value),
            )
