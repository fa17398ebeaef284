"""Token ids of prompts, kept by prompt text and within a limit of memory."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable
from hashlib import blake2b

from ..types import Task

CACHED_TOKENS = 1 << 24
"""Tokens that the cache holds: 64 MiB at 4 bytes each. Tokenizing a prompt again costs about 1 ms."""


class PromptCache:
    """Least-recently-used cache from prompt to token ids.

    The key is the prompt itself, never the task's id: two tasks with one id must not share a prompt.
    Ids are stored as 32-bit integers. A list of Python integers would take about 36 bytes per token.

    Args:
        capacity: tokens that are kept before the least recently used prompts are dropped.
    """

    def __init__(self, capacity: int = CACHED_TOKENS) -> None:
        self.capacity = capacity
        self.tokens = 0
        self._kept: OrderedDict[bytes, array[int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, task: Task, make: Callable[[Task], list[int]]) -> list[int]:
        """Token ids of the task's prompt as a new list. Calls `make` if the prompt is not cached."""
        key = _digest(task)
        found = self._kept.get(key)
        if found is not None:
            self._kept.move_to_end(key)
            return found.tolist()
        ids = make(task)
        self._kept[key] = array("i", ids)
        self.tokens += len(ids)
        while self.tokens > self.capacity:
            _, dropped = self._kept.popitem(last=False)
            self.tokens -= len(dropped)
        return list(ids)


def _digest(task: Task) -> bytes:
    """16 bytes that are equal exactly for equal prompts. Text and a chat of one message differ."""
    parts = [task.prompt] if isinstance(task.prompt, str) else [text for m in task.prompt for text in (m["role"], m["content"])]
    hashed = blake2b(digest_size=16, person=b"text" if isinstance(task.prompt, str) else b"chat")
    for part in parts:
        encoded = part.encode("utf-8", "surrogatepass")
        hashed.update(len(encoded).to_bytes(8, "little"))
        hashed.update(encoded)
    return hashed.digest()
