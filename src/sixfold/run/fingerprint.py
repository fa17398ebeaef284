"""Fingerprints of what a run is trained and measured on: tasks, prompt tokens, rewards. A resumed run compares them. No torch.

Tasks are hashed part by part, so that a refusal can say which part differs.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import json
import re
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from ..environment.rewards import BUILT_IN
from ..types import Task

PARTS = {
    "ids": "their ids",
    "prompts": "their prompts",
    "answers": "their answers",
    "traces": "their worked solutions",
    "columns": "other columns of their rows",
    "tokens": "the tokens of their prompts",
}
"""Part of a task that is hashed -> what a message calls it."""

TOKENS_ALONE = (
    "the text of the prompts is the same: the chat template writes something else now, such as today's date, or the tokenizer does. "
    "Give the template the earlier value in model.template_args, such as date_string=26 Jul 2024 for Llama 3.2, or start a new run"
)


@runtime_checkable
class _Array(Protocol):
    """An array of numpy or torch."""

    def tolist(self) -> Any: ...


_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def tasks_fingerprint(tasks: Sequence[Task], encode: Callable[[Task], Iterable[int]]) -> dict[str, Any]:
    """Count of the tasks, and a hash of each part of all of them in order.

    Args:
        tasks: tasks of one split.
        encode: gives the prompt tokens of a task.
    """
    digests = {part: hashlib.sha256() for part in PARTS}
    for task in tasks:
        values = {"ids": task.id, "prompts": task.prompt, "answers": task.answer, "traces": task.trace, "columns": task.columns}
        for part, value in values.items():
            digests[part].update(_text(value) + b"\0")
        digests["tokens"].update(array("q", encode(task)).tobytes() + b"\0")
    return {"count": len(tasks), **{part: digest.hexdigest()[:16] for part, digest in digests.items()}}


def tasks_difference(saved: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """What differs between two fingerprints of tasks, in words; empty where nothing does."""
    if saved == now:
        return ""
    if saved["count"] != now["count"]:
        return f"there were {saved['count']}, now there are {now['count']}"
    changed = [part for part in PARTS if saved[part] != now[part]]
    if changed == ["tokens"]:
        return f"{PARTS['tokens']} differ; {TOKENS_ALONE}"
    named = [part for part in changed if part != "tokens" and (part != "columns" or set(changed) <= {"columns", "tokens"})]
    return f"{' and '.join(PARTS[part] for part in named)} differ"


def rewards_fingerprint(rewards: Sequence[str | Callable[..., Any]]) -> list[list[str]]:
    """Name and hash of the code of each reward: of the file that holds it, or of the function's own source where it has no name.

    What that file imports is not looked at. The hash is empty where no source can be found, as for a function typed into a shell.
    """
    found = []
    for reward in rewards:
        name = reward if isinstance(reward, str) else getattr(reward, "__qualname__", type(reward).__qualname__)
        source = _file_of(reward) if isinstance(reward, str) else _source_of(reward)
        found.append([name, hashlib.sha256(source).hexdigest()[:16] if source else ""])
    return found


def rewards_difference(saved: Sequence[Sequence[str]], now: Sequence[Sequence[str]]) -> list[str]:
    """Names of the rewards whose code is known then and now, and differs. They are compared in order: a file may have moved."""
    pairs = zip(saved, now, strict=False)
    return [name for (_, before), (name, after) in pairs if before and after and before != after]


def _text(value: Any) -> bytes:
    """JSON of a value, the same in every process."""
    return json.dumps(_stable(value)).encode()


def _stable(value: Any) -> Any:
    """The value as JSON. An object may have keys of any type; sets and objects have an order that differs from process to process."""
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Mapping):
        entries = {key if isinstance(key, str) else _shown(key): _stable(inner) for key, inner in value.items()}
        return dict(sorted(entries.items()))
    if isinstance(value, list | tuple):
        return [_stable(inner) for inner in value]
    if isinstance(value, set | frozenset):
        return f"{type(value).__name__} {sorted(_shown(inner) for inner in value)}"
    if isinstance(value, _Array) and not isinstance(value, type):
        return _stable(value.tolist())  # repr leaves out the middle of a long array
    return _shown(value)


def _shown(value: Any) -> str:
    """repr without addresses in memory: `<Image at 0x7f...>` is at another one in the next process."""
    return _ADDRESS.sub("", repr(value))


def _file_of(name: str) -> bytes:
    source = BUILT_IN.get(name, name).rpartition(":")[0]
    path = Path(source)
    if not source.endswith(".py"):
        spec = importlib.util.find_spec(source)
        path = Path(spec.origin) if spec and spec.origin else path
    return path.read_bytes() if path.is_file() else b""


def _source_of(reward: Callable[..., Any]) -> bytes:
    try:
        return inspect.getsource(reward if inspect.isroutine(reward) else type(reward)).encode()
    except (OSError, TypeError):
        return b""
