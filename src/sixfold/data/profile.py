"""Stored profile: pass rates of tasks, as rollouts of one model have measured them. No torch.

    {"profile": 1, "key": {"weights": ..., "template": ..., "sampling": ..., "verifier": ...}}
    {"task": ..., "id": ..., "seed": ..., "solved": 3, "rewards": [1.0, 0.0, ...], ...}

A profile is a JSONL file. Its first line says what the figures depend on: another model, chat
template, sampling or verifier has a profile of its own. Each further line has the rollouts of one
task under one seed. Lines of one task add up; a repeated line counts once, because equal seeds give
equal rollouts. Tasks are named by a hash of prompt and answer (`task_key`), so a profile holds for
other files and other ids.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..files.appended import AppendedFile
from ..files.durable import disk_errors
from ..seeds import seed_bytes
from ..types import Task

FORMAT = 1
KEY_BYTES = 16
"""Bytes of a task's key, and of a profile's digest: no two tasks share one."""


def task_key(task: Task) -> str:
    """Name of a task in profiles: a hash of its prompt, its world and its answer, not of its id.

    The prompt is what the model reads, with the texts that the recipe puts around it. A number and
    its text are the same answer.
    """
    answer = task.answer
    if not isinstance(answer, str):
        answer = json.dumps(answer, sort_keys=True, default=str)
    text = json.dumps([task.prompt_key, task.world, answer])
    return seed_bytes(text, KEY_BYTES, "profile").hex()


@dataclass(frozen=True)
class ProfileKey:
    """What pass rates depend on.

    Args:
        weights: hash of the model's weights.
        template: hash of its tokenizer and chat template.
        sampling: settings of sampling, such as temperature and the longest reply.
        verifier: settings of the rewards, and what counts as solved.
    """

    weights: str
    template: str
    sampling: Mapping[str, Any]
    verifier: Mapping[str, Any]

    @property
    def digest(self) -> str:
        """Hash of the key, for names of files."""
        return seed_bytes(json.dumps(asdict(self), sort_keys=True), KEY_BYTES, "profile").hex()

    def difference(self, other: ProfileKey) -> str:
        """Name of the first part in which two keys differ, such as "sampling.top_p", or ""."""
        for name in ("weights", "template"):
            if getattr(self, name) != getattr(other, name):
                return name
        for name in ("sampling", "verifier"):
            mine, theirs = getattr(self, name), getattr(other, name)
            for setting in sorted({*mine, *theirs}):
                if mine.get(setting) != theirs.get(setting):
                    return f"{name}.{setting}"
        return ""


@dataclass(frozen=True, slots=True)
class Measurement:
    """Rollouts of one task under one seed.

    Args:
        task: key of the task (`task_key`).
        id: id of the task when it was measured, for readers.
        seed: seed of the sampling noise.
        solved: number of rollouts that solve the task.
        rewards: reward of each rollout whose check did not fail.
        failed: number of rollouts whose check failed.
        prompt_tokens: tokens of the prompt.
        tokens: sampled tokens of all rollouts.
        truncated: number of rollouts that a limit has cut.
        others: how many rollouts give each answer that is not the reference. None: unknown, as in
            lines that an earlier release has written.
    """

    task: str
    id: str
    seed: int
    solved: int
    rewards: tuple[float, ...]
    failed: int = 0
    prompt_tokens: int = 0
    tokens: int = 0
    truncated: int = 0
    others: Mapping[str, int] | None = None


@dataclass(frozen=True, slots=True)
class TaskProfile:
    """What is known of a task.

    Args:
        measured: its rollouts, one entry per seed. At least one.
    """

    measured: tuple[Measurement, ...]

    @property
    def solved(self) -> int:
        """Number of rollouts that solve the task."""
        return sum(one.solved for one in self.measured)

    @property
    def samples(self) -> int:
        """Number of rollouts whose check did not fail."""
        return sum(len(one.rewards) for one in self.measured)

    @property
    def rollouts(self) -> int:
        """Number of rollouts, those with failed checks included."""
        return sum(len(one.rewards) + one.failed for one in self.measured)

    @property
    def rate(self) -> float | None:
        """Share of the rollouts that solve the task. None if all checks failed."""
        return self.solved / self.samples if self.samples else None

    @property
    def rival(self) -> tuple[str, int]:
        """The commonest answer that is not the reference, and its rollouts. ("", 0): none."""
        counts: Counter[str] = Counter()
        for one in self.measured:
            counts.update(one.others or {})
        return counts.most_common(1)[0] if counts else ("", 0)

    @property
    def compared(self) -> int:
        """Number of rollouts whose answers are known: those that `rival` is counted among."""
        return sum(len(one.rewards) for one in self.measured if one.others is not None)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return self.measured[-1].prompt_tokens

    @property
    def mean_tokens(self) -> float:
        """Mean number of sampled tokens per rollout."""
        return sum(one.tokens for one in self.measured) / max(self.rollouts, 1)


class Profile:
    """Pass rates of tasks under one model. Empty at first.

    Attributes:
        tasks: what is known, by `task_key`, in the order of the first measurements.
    """

    def __init__(self, key: ProfileKey) -> None:
        self.key = key
        self.tasks: dict[str, TaskProfile] = {}

    def find(self, task: Task | str) -> TaskProfile | None:
        """What is known of a task. None if it was not measured.

        Args:
            task: the task, or its key.
        """
        return self.tasks.get(task if isinstance(task, str) else task_key(task))

    def rate(self, task: Task | str) -> float | None:
        """Pass rate of a task, or of a key. None if it was not measured."""
        found = self.find(task)
        return found.rate if found else None

    def add(self, new: Measurement) -> bool:
        """Add rollouts. Those of a seed that is already there count once.

        Returns:
            False if they were already there.

        Raises:
            UserError: they are there with other figures.
        """
        known = self.tasks.get(new.task, TaskProfile(()))
        for one in known.measured:
            if one.seed == new.seed:
                if (one.solved, one.rewards) != (new.solved, new.rewards):
                    raise UserError(
                        f"the task {new.id!r} was measured twice with seed {new.seed} and other"
                        " rewards, so the verifier or the model was not the same. Delete one of the"
                        " lines, or measure into a new file"
                    )
                return False
        self.tasks[new.task] = TaskProfile((*known.measured, new))
        return True


def read_profile(path: str | Path) -> Profile:
    """Read a profile. A last line that a killed process has left unfinished does not count.

    Raises:
        UserError: the file cannot be read, or is no profile. Names the line.
    """
    profile, _ = _read(Path(path))
    return profile


@dataclass(frozen=True)
class Measured:
    """What a profile says about the tasks of a run as a whole.

    Args:
        prompt_tokens: mean tokens of a prompt.
        completion_tokens: mean sampled tokens of a rollout. Every task counts once, however many
            rollouts it has.
    """

    rates: tuple[float, ...]
    prompt_tokens: float
    completion_tokens: float


def measured(path: str | Path) -> Measured:
    """What a profile says as a whole.

    Raises:
        UserError: the file is missing, is no profile, or has no task.
    """
    tasks = [one for one in read_profile(path).tasks.values() if one.rate is not None]
    if not tasks:
        raise UserError(f"{path} has no task: measure some with a stage stratify of sixfold data")
    return Measured(
        tuple(one.rate for one in tasks if one.rate is not None),
        sum(one.prompt_tokens for one in tasks) / len(tasks),
        sum(one.mean_tokens for one in tasks) / len(tasks),
    )


class ProfileFile:
    """A profile that grows on the disk. A process that dies loses at most the line it is writing.

    Args:
        path: the file. Made if missing, with its folder.

    Raises:
        UserError: the file has another key, or cannot be read or written.
    """

    def __init__(self, path: Path, key: ProfileKey) -> None:
        with disk_errors(f"cannot write {path}"):
            path.parent.mkdir(parents=True, exist_ok=True)
        self.profile, whole = Profile(key), 0
        if path.exists() and path.stat().st_size:
            with suppress(_Unbegun):
                self.profile, whole = _read(path)
        if differs := self.profile.key.difference(key):
            raise UserError(
                f"{path} is the profile of another model or task: its {differs} differs. Name"
                " another file, or delete this one"
            )
        if path.exists():
            with disk_errors(f"cannot write {path}"):
                os.truncate(path, whole)  # a line that a killed process has left unfinished
        self._file = AppendedFile(path, _warn)
        if not whole:
            self._append({"profile": FORMAT, "key": asdict(key)})

    def add(self, new: Measurement) -> None:
        """Add rollouts, on the disk too.

        Raises:
            UserError: the seed is there with other figures, or the disk refuses the line.
        """
        if self.profile.add(new):
            self._append(asdict(new))

    def close(self) -> None:
        self._file.close()

    def _append(self, line: Mapping[str, Any]) -> None:
        self._file.append(json.dumps(line).encode() + b"\n", to_disk=True)


def _warn(line: str) -> None:
    print(f"WARNING: {line}", file=sys.stderr, flush=True)


class _Unbegun(UserError):
    """A file without a whole first line."""


def _read(path: Path) -> tuple[Profile, int]:
    """The profile, and the bytes of its whole lines."""
    profile: Profile | None = None
    whole = 0
    with disk_errors(f"cannot read {path}"):
        for number, line in _lines(path):
            where = f"{path}, line {number}"
            try:
                record = json.loads(line)
                if profile is None:
                    profile = Profile(_key(record))
                else:
                    profile.add(_measurement(record))
            except UserError as error:
                raise UserError(f"{where}: {error}") from error
            except (ValueError, TypeError, KeyError) as error:
                what = "no measurement" if profile else "no first line of a profile"
                raise UserError(f"{where}: this is {what} ({line[:60]!r})") from error
            whole += len(line)
    if profile is None:
        raise _Unbegun(f"{path} is no profile: it has no whole line")
    return profile, whole


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Whole lines with their numbers, from 1."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.endswith(b"\n"):
                yield number, line


def _key(record: Mapping[str, Any]) -> ProfileKey:
    if record["profile"] != FORMAT:
        raise UserError(
            f"the profile has format {record['profile']}, and this release reads {FORMAT}"
        )
    return ProfileKey(**record["key"])


def _measurement(record: Mapping[str, Any]) -> Measurement:
    made = Measurement(**{**record, "rewards": tuple(map(float, record["rewards"]))})
    if not 0 <= made.solved <= len(made.rewards):
        raise UserError(f"{made.solved} of {len(made.rewards)} rollouts are solved")
    return made
