"""Cache from prompts to their token ids, with a memory limit."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from hashlib import blake2b

from ..types import Task

CACHED_TOKENS = 1 << 24
"""Tokens that the cache holds: 64 MiB at 4 bytes each. Tokenizing a prompt takes about 1 ms."""


class PromptCache:
    """Least-recently-used cache from prompt to token ids.

    The key is a hash of the prompt, not the task's id: two tasks with the same id may have
    different prompts. Ids are stored as 32-bit integers. A list of Python integers would take about
    36 bytes per token.

    Args:
        capacity: most tokens in the cache. Beyond it, the least recently used prompts are dropped.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.tokens = 0
        self._kept: OrderedDict[bytes, array[int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def get(
        self, tasks: Sequence[Task], make: Callable[[Sequence[Task]], list[list[int]]]
    ) -> list[list[int]]:
        """Token ids of each task's prompt, as new lists.

        Args:
            tasks: tasks whose prompts are needed.
            make: tokenizes prompts. It is called at most once, with the tasks that are not cached.
        """
        keys = [_digest(task) for task in tasks]
        absent = {key: task for key, task in zip(keys, tasks, strict=True) if key not in self._kept}
        made = dict(zip(absent, make(list(absent.values())), strict=True)) if absent else {}
        found = [list(made[key]) if key in made else self._lookup(key) for key in keys]
        for key, ids in made.items():
            self._keep(key, ids)
        return found

    def _lookup(self, key: bytes) -> list[int]:
        self._kept.move_to_end(key)
        return self._kept[key].tolist()

    def _keep(self, key: bytes, ids: list[int]) -> None:
        self._kept[key] = array("i", ids)
        self.tokens += len(ids)
        while self.tokens > self.capacity:
            _, dropped = self._kept.popitem(last=False)
            self.tokens -= len(dropped)


def _digest(task: Task) -> bytes:
    """Hash of the prompt that the model reads (16 bytes)."""
    return blake2b(task.prompt_key.encode("utf-8", "surrogatepass"), digest_size=16).digest()
