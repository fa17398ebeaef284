"""Where tasks come from: the arithmetic generator, reasoning-gym, a file, a dataset folder, or the hub.

Invariants: the same configuration and seed give the same tasks in the same order; no prompt is in both halves; both come with notes on
whatever was dropped. `datasets` is imported only for folders and the hub.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from itertools import islice
from math import comb
from pathlib import Path
from typing import Any

from sixfold.config import DataConfig
from sixfold.data.files import FILE_TYPES, Row, read_file
from sixfold.data.rows import rows_to_tasks
from sixfold.data.task_set import TaskSet, prompt_key
from sixfold.environment.arithmetic import arithmetic_tasks
from sixfold.environment.gym import gym_tasks
from sixfold.errors import UserError, nearest
from sixfold.hub_names import not_a_hub_id
from sixfold.types import Task

ARITHMETIC_TASKS = 20_000  # generated where data.limit does not say how many; fewer where fewer sums exist


def load_tasks(data: DataConfig, *, seed: int, rewards: tuple[str, ...]) -> TaskSet:
    """The tasks of a recipe. rewards: names of the rewards that will check them, for the fields they need.

    Raises UserError, with file and line where there is one, for a source that is missing, empty or malformed.
    """
    if "reasoning_gym" in rewards and data.source != "reasoning_gym":
        raise UserError(f"reward 'reasoning_gym' scores tasks of data.source = 'reasoning_gym' only, not of {data.source!r}")
    if data.source == "arithmetic":
        return _set_aside(_sums(data, seed), data.heldout, seed)
    if data.source == "reasoning_gym":
        gym = data.reasoning_gym
        return _set_aside(gym_tasks(gym.tasks, gym.size, seed)[: data.limit or None], data.heldout, seed)
    splits = _read_splits(data)
    train = rows_to_tasks(splits[data.split], data, name=data.split, rewards=rewards)
    if not train:
        raise UserError(f"dataset {data.source!r} has 0 rows in split {data.split!r}")
    if not data.heldout_split:
        return _set_aside(train, data.heldout, seed)
    heldout = rows_to_tasks(splits[data.heldout_split], data, name=data.heldout_split, rewards=rewards)
    if not heldout:
        raise UserError(f"dataset {data.source!r} has 0 rows in split {data.heldout_split!r}")
    return _disjoint(train, heldout)


def _sums(data: DataConfig, seed: int) -> list[Task]:
    terms, digits = data.arithmetic.terms, data.arithmetic.digits
    count = data.limit or min(ARITHMETIC_TASKS, comb(10**digits + terms - 1, terms))
    return arithmetic_tasks(count, terms=terms, digits=digits, seed=seed)


def _set_aside(tasks: list[Task], count: int, seed: int) -> TaskSet:
    """`count` of `tasks` become the held-out ones: those whose hash of seed and id is smallest, whatever their order in the list."""
    if count >= len(tasks):
        raise UserError(f"data.heldout = {count} of {len(tasks)} tasks leaves none to train on: lower it")
    heldout = sorted(tasks, key=lambda task: blake2b(f"{seed}:{task.id}".encode(), digest_size=8).digest())[:count]
    chosen = {task.id for task in heldout}
    return _disjoint([task for task in tasks if task.id not in chosen], heldout)


def _disjoint(train: list[Task], heldout: list[Task]) -> TaskSet:
    """Training rows whose prompt is also held out are dropped, and a note says how many."""
    prompts = {prompt_key(task) for task in heldout}
    kept = [task for task in train if prompt_key(task) not in prompts]
    dropped = len(train) - len(kept)
    if not kept:
        raise UserError(f"dataset has 0 usable rows ({len(train)} read, {dropped} dropped: their prompts are held out)")
    notes = [f"{dropped} training rows dropped: their prompts also occur in the held-out tasks"] if dropped else []
    return TaskSet(kept, heldout, notes)


def _read_splits(data: DataConfig) -> dict[str, list[Row]]:
    """The rows of the training split and of the held-out split, if one is named. For a file, the held-out split is another file."""
    path = Path(data.source)
    if path.suffix in FILE_TYPES:
        splits = {data.split: read_file(path, data.limit)}
        if data.heldout_split:
            if Path(data.heldout_split).suffix not in FILE_TYPES:
                raise UserError(f"{path} has no splits: data.heldout_split is another file, or empty, not {data.heldout_split!r}")
            splits[data.heldout_split] = read_file(Path(data.heldout_split), data.limit)
        return splits
    dataset = _load_dataset(data)
    return {split: _rows(dataset, split, data) for split in (data.split, data.heldout_split) if split}


def _rows(dataset: Mapping[str, Any], split: str, data: DataConfig) -> list[Row]:
    if split not in dataset:
        raise UserError(f"dataset {data.source!r} has no split {split!r}; it has {', '.join(dataset)}.{nearest(split, list(dataset))}")
    rows = islice(dataset[split], data.limit or None)
    return [Row(f"{data.source} ({split}), row {number}", dict(fields)) for number, fields in enumerate(rows, start=1)]


def _load_dataset(data: DataConfig) -> Mapping[str, Any]:
    """Split name -> rows, from a folder (as `save_to_disk` wrote it, or of data files) or from the hub."""
    folder = Path(data.source)
    if not folder.exists() and (reason := not_a_hub_id(data.source)):
        raise UserError(f"data.source = {data.source!r}: {reason}")
    import datasets

    try:
        if (folder / "dataset_dict.json").is_file():
            return datasets.load_from_disk(data.source)
        if (folder / "state.json").is_file():
            return {data.split: datasets.load_from_disk(data.source)}
        return datasets.load_dataset(data.source, data.subset or None)
    except RuntimeError as error:  # `datasets` runs no code of a repository, and says so this way
        if "script" not in str(error):
            raise UserError(_unloadable(data, folder, error)) from error
        raise UserError(f"dataset {data.source!r} requires executing repository code; not supported") from error
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:  # unreachable, unknown, gated, malformed: all the user's to mend
        raise UserError(_unloadable(data, folder, error)) from error


def _unloadable(data: DataConfig, folder: Path, error: Exception) -> str:
    lines = str(error).strip().splitlines()
    reason = f"{type(error).__name__}: {lines[0].rstrip('.') if lines else 'no reason given'}"
    if folder.is_dir():
        return f"cannot load the dataset folder {data.source!r}: {reason}"
    hint = nearest(data.source, ["arithmetic", "reasoning_gym"])
    return f"cannot load dataset {data.source!r}: no such folder in {Path.cwd()}, and the hub gave {reason}.{hint}"
