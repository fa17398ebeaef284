"""Reward functions that the tests name by file: ours and TRL's, well-behaved and not."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from typing import Any

from sixfold.checks.limits import blame_answer
from sixfold.types import Task


def length(completion: str, task: Task) -> float:
    print("rewards may print")
    return float(len(completion))


_seen: list[str] = []


def events_since_the_last_check(completion: str, task: Task) -> float:
    """Number of files opened, folders listed and processes started since the previous check."""
    if completion not in _seen:  # the first check

        def note(event: str, _: tuple[Any, ...]) -> None:
            if event.startswith(("open", "os.", "subprocess.", "import")):
                _seen.append(event)

        _seen.append(completion)
        sys.addaudithook(note)
    events = len(_seen) - 1
    del _seen[1:]
    return float(events)


def torch_is_loaded(completion: str, task: Task) -> float:
    return float("torch" in sys.modules)


def told(completion: str, task: Task) -> Any:
    """Does what the completion says."""
    if completion == "hang":
        time.sleep(60)
    if completion == "spin":
        signal.alarm(0)
        while True:
            pass
    if completion == "crash":
        os.kill(os.getpid(), signal.SIGKILL)
    if completion == "exit":
        sys.exit(3)
    if completion == "raise":
        raise ValueError("two\nlines")
    return {"nan": float("nan"), "inf": float("inf"), "text": "1.0", "none": None}.get(
        completion, 1.0
    )


def process(completion: str, task: Task) -> float:
    return float(os.getpid())


def trl_letters(completions: list[Any], letter: list[str], **kwargs: Any) -> list[float | None]:
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [
        None if wanted == "?" else float(text.count(wanted))
        for text, wanted in zip(texts, letter, strict=True)
    ]


async def trl_async(prompts: list[Any], completions: list[Any]) -> list[float]:
    await asyncio.sleep(0)
    return [float(len(p) + len(c)) for p, c in zip(prompts, completions, strict=True)]


def trl_record(
    prompts: list[Any], completions: list[Any], completion_ids: list[list[int]], **kwargs: Any
) -> list[float]:
    raise ValueError(json.dumps([prompts, completions, completion_ids, sorted(kwargs)]))


def trl_short(completions: list[Any]) -> list[float]:
    return [1.0]


def trl_hang(completions: list[Any]) -> list[float]:
    time.sleep(60)
    return [1.0] * len(completions)


def forked(completion: str, task: Task) -> float:
    """Forks a child that ends the reward in the way that the completion says. The reward of the
    parent is the length of the completion.
    """
    child = os.fork()
    if child == 0:
        if completion == "raise":
            raise ValueError("in the child")
        if completion == "exit":
            sys.exit(0)
        return -1.0
    os.waitpid(child, 0)
    return float(len(completion))


async def forked_async(completion: str, task: Task) -> float:
    """Like `forked`, but inside the event loop."""
    return forked(completion, task)


def stray(completion: str, task: Task) -> float:
    """Writes the completion, a character per byte, to every descriptor that it can find, as a
    library that prints to odd descriptors would.
    """
    for descriptor in range(3, 512):
        try:
            if completion:
                os.write(descriptor, completion.encode("latin-1"))
        except OSError:
            pass
    return 1.0


def starts_daemons(completion: str, task: Task) -> float:
    """Start three processes without waiting for them: a child, a child in its own session, and an
    orphaned grandchild. Returns the pid of the session.
    """
    subprocess.Popen(["sleep", "100"])
    escaped = subprocess.Popen(["sleep", "100"], start_new_session=True)
    subprocess.run(
        [
            sys.executable,
            "-c",
            "import subprocess; subprocess.Popen(['sleep', '100'], start_new_session=True)",
        ],
        check=True,
    )
    if completion == "hang":
        time.sleep(60)
    if completion == "crash":
        os.kill(os.getpid(), signal.SIGKILL)
    return float(escaped.pid)


def deaf(completion: str, task: Task) -> float:
    """Ignores every signal that can be ignored, reports its pid, and hangs."""
    for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}:
        signal.signal(number, signal.SIG_IGN)
    print(os.getpid(), flush=True)
    while True:
        time.sleep(60)


def blames(completion: str, task: Task) -> Any:
    """Does what the completion says. If the completion asks for it, calls `blame_answer` first."""
    if completion.startswith("blame "):
        blame_answer()
    return told(completion.removeprefix("blame "), task)


_running: list[int] = [0, 0]


async def told_async(completion: str, task: Task) -> float:
    """Does what the completion says. Returns the largest number of concurrent checks so far."""
    _running[0] += 1
    _running[1] = max(_running)
    word, _, seconds = completion.partition(" ")
    try:
        await asyncio.sleep(float(seconds or 0.0))
        if word == "hang":
            await asyncio.sleep(60)
        if word == "block":
            time.sleep(60)
        if word == "crash":
            os.kill(os.getpid(), signal.SIGKILL)
        if word == "exit":
            sys.exit(3)
        if word == "raise":
            raise ValueError("two\nlines")
        if word == "stubborn":
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(60)
            await asyncio.sleep(60)
        if word == "process":
            return float(os.getpid())
    finally:
        _running[0] -= 1
    return float(_running[1])


async def length_async(completion: str, task: Task) -> float:
    """The completion's length, after what it says."""
    await told_async(completion.partition("|")[0], task)
    return float(len(completion))


def length_told(completion: str, task: Task) -> float:
    """The completion's length, after what it says."""
    word, _, seconds = completion.partition("|")[0].partition(" ")
    time.sleep(float(seconds or 0.0))
    if word == "junk":
        stray("junk\n" * 20, task)
    told(word, task)
    return float(len(completion))


async def starts_daemons_async(completion: str, task: Task) -> float:
    """Start a process without waiting for it. Returns its pid after a number of seconds."""
    escaped = subprocess.Popen(["sleep", "100"], start_new_session=True)
    await asyncio.sleep(float(completion))
    return float(escaped.pid)
