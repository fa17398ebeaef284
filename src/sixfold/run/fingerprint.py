"""Fingerprints of tasks, prompt tokens and rewards, compared when a run is resumed. No torch.

Each part of the tasks is hashed separately, so that an error message can name the part that
differs.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import re
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..environment.grade import Array
from ..environment.named import load_object
from ..environment.registry import EPISODES, reward_row
from ..environment.tools.episode import Equipped
from ..event_loop import run_blocking
from ..plugins import module_spec
from ..recipe.adapter_folder import folder_hash
from ..recipe.reward_models import is_address, reward_model_name, reward_model_paths
from ..recipe.schema import RewardScoringConfig
from ..types import Task

PARTS = {
    "ids": "their ids",
    "prompts": "their prompts",
    "answers": "their answers",
    "traces": "their worked solutions",
    "columns": "other columns of their rows",
    "tokens": "the tokens of their prompts",
}
"""Hashed part of a task -> its name in messages."""

TOKENS_ALONE = (
    "the text of the prompts is the same, so the chat template or the tokenizer has changed. A"
    " template may insert today's date. Set the earlier value in model.template_args, such as"
    " date_string=26 Jul 2024 for Llama 3.2, or start a new run"
)


_ADDRESS = re.compile(r" at 0x[0-9a-f]+")

_VERSION = "version "
"""Start of the fingerprint of a registered reward."""


def tasks_fingerprint(
    tasks: Sequence[Task], encode: Callable[[Task], Iterable[int]]
) -> dict[str, Any]:
    """Number of tasks, and a hash of each part over all tasks in order.

    Args:
        tasks: tasks of one split.
        encode: returns the prompt tokens of a task.
    """
    digests = {part: hashlib.sha256() for part in PARTS}
    for task in tasks:
        values = {
            "ids": task.id,
            "prompts": task.prompt,
            "answers": task.answer,
            "traces": task.trace,
            "columns": task.columns,
        }
        for part, value in values.items():
            digests[part].update(_text(value) + b"\0")
        digests["tokens"].update(array("q", encode(task)).tobytes() + b"\0")
    return {
        "count": len(tasks),
        **{part: digest.hexdigest()[:16] for part, digest in digests.items()},
    }


def tasks_difference(saved: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Describe how two task fingerprints differ. Empty if they are equal."""
    if saved == now:
        return ""
    if saved["count"] != now["count"]:
        return f"there were {saved['count']}, now there are {now['count']}"
    changed = [part for part in PARTS if saved[part] != now[part]]
    if changed == ["tokens"]:
        return f"{PARTS['tokens']} differ, but {TOKENS_ALONE}"
    named = [
        part
        for part in changed
        if part != "tokens" and (part != "columns" or set(changed) <= {"columns", "tokens"})
    ]
    return f"{' and '.join(PARTS[part] for part in named)} differ"


def rewards_fingerprint(
    rewards: Sequence[str | Callable[..., Any]], scoring: RewardScoringConfig | None = None
) -> list[list[str]]:
    """Name and code hash of each reward, or of a class of episodes.

    For a registered reward, it is the version of its row. For another name, the hash covers the
    file that contains the function. For a function or class, it covers its source. Imported modules
    are not included. The hash is empty if no source is found, as for a function typed into a shell.

    Args:
        rewards: names, or Python callables.
        scoring: how servers of reward models are asked which models they have.

    Raises:
        UserError: if a server of a reward model cannot be asked.
    """
    return [_fingerprint(reward, scoring) for reward in rewards]


def _fingerprint(
    reward: str | Callable[..., Any], scoring: RewardScoringConfig | None = None
) -> list[str]:
    if isinstance(reward, str) and (paths := reward_model_paths(reward)):
        hashes = [_model_hash(path, scoring or RewardScoringConfig()) for path in paths]
        name, source = reward_model_name(reward), " ".join(hashes).encode()
    elif isinstance(reward, str):
        row = reward_row(reward)
        if row.version:
            return [reward, f"{_VERSION}{row.version}"]
        name, source = reward, _file_of(row.spec)
    else:
        name, source = (
            getattr(reward, "__qualname__", type(reward).__qualname__),
            _source_of(reward),
        )
    return [name, hashlib.sha256(source).hexdigest()[:16] if source else ""]


def _model_hash(path: str, scoring: RewardScoringConfig) -> str:
    """Hash of a reward model's folder; what a server says of its model; or a hub id."""
    if is_address(path):
        served = load_object("sixfold.reward_model.served:ServedModel")  # imports torch
        return str(run_blocking(served(path, scoring).identity()))
    folder = Path(path).expanduser()
    return folder_hash(folder) if folder.is_dir() else path


def episode_fingerprint(name: str, make: Callable[..., Any]) -> list[str]:
    """Name and code hash of an environment, as `rewards_fingerprint`.

    Args:
        name: `environment.episode`.
        make: makes the episodes.
    """
    if name in EPISODES and (version := EPISODES.row(name).version):
        return [name, f"{_VERSION}{version}"]
    return _fingerprint(make.make if isinstance(make, Equipped) else make)


def rewards_difference(saved: Sequence[Sequence[str]], now: Sequence[Sequence[str]]) -> list[str]:
    """Names of the rewards whose code is known in both fingerprints and differs.

    Rewards are compared by position, because a file may have moved. A version is compared with a
    version only: runs of earlier releases have the hash of a file, and that of `Equipped` for any
    environment.
    """
    pairs = zip(saved, now, strict=False)
    return [
        name
        for (old, before), (name, after) in pairs
        if old != Equipped.__name__
        and before
        and after
        and before != after
        and before.startswith(_VERSION) == after.startswith(_VERSION)
    ]


def _text(value: Any) -> bytes:
    """JSON of a value, identical in every process."""
    return json.dumps(_stable(value)).encode()


def _stable(value: Any) -> Any:
    """Value as JSON, independent of the process.

    Keys of a mapping may have any type. Sets are sorted and addresses removed, because both differ
    between processes.
    """
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Mapping):
        entries = {
            key if isinstance(key, str) else _shown(key): _stable(inner)
            for key, inner in value.items()
        }
        return dict(sorted(entries.items()))
    if isinstance(value, list | tuple):
        return [_stable(inner) for inner in value]
    if isinstance(value, set | frozenset):
        return f"{type(value).__name__} {sorted(_shown(inner) for inner in value)}"
    if isinstance(value, Array) and not isinstance(value, type):
        return _stable(value.tolist())  # repr omits the middle of a long array
    return _shown(value)


def _shown(value: Any) -> str:
    """repr without memory addresses: `<Image at 0x7f...>` differs in the next process."""
    return _ADDRESS.sub("", repr(value))


def _file_of(spec: str) -> bytes:
    module = spec.rpartition(":")[0]
    path = Path(module)
    if not module.endswith(".py"):
        found = module_spec(module)
        path = Path(found.origin) if found and found.origin else path
    return path.read_bytes() if path.is_file() else b""


def _source_of(reward: Callable[..., Any]) -> bytes:
    try:
        has_source = inspect.isroutine(reward) or inspect.isclass(reward)
        return inspect.getsource(reward if has_source else type(reward)).encode()
    except (OSError, TypeError):
        return b""
