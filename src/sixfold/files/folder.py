"""Folder of a run, `runs/NAME/`: file paths and the lock. Does not import torch.

Only one process at a time trains in a folder. It holds an `flock` on the file `.sixfold-run`, which
the kernel releases when the process ends for any reason. Reading needs no lock. The same file marks
the folder as a run: a folder without it is never replaced.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import re
import socket
import subprocess
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ..errors import UserError, nearest
from .durable import disk_errors, faultpoint, fsync_path, write_json_atomic
from .replace import has_result, move_aside, put_back, remove_replaced, replaced_folder

MARKER = ".sixfold-run"
ARTIFACT = "artifact.json"
"""Manifest of what a stage has made, in the folder of a finished stage."""
PACKAGES = ("sixfold", "torch", "transformers", "tokenizers", "safetensors", "numpy")

_ROLLOUT_FILE = re.compile(r"step-(\d{6,})\.jsonl\.zst")
_LEFTOVER = re.compile(r"\..+\.tmp-\d+")
_held_locks: set[int] = set()


def _drop_inherited_locks() -> None:
    """Without this, a forked worker that outlives a killed trainer would keep the run locked."""
    for descriptor in _held_locks:
        os.close(descriptor)
    _held_locks.clear()


os.register_at_fork(after_in_child=_drop_inherited_locks)


@dataclass
class RunFolder:
    """Paths of one run, and its lock. As a context manager it holds the lock.

    Example: `with open_run(path) as run: ...`
    """

    path: Path
    earlier: RunFolder | None = field(default=None, repr=False)
    """Run that this one replaces, moved aside and locked. None if it replaces none."""
    _lock: int | None = field(default=None, init=False, repr=False)
    _opened: int | None = field(default=None, init=False, repr=False)

    @property
    def recipe(self) -> Path:
        return self.path / "recipe.toml"

    @property
    def whole(self) -> Path:
        """Folder of the run that this one is a stage of. Otherwise its own path."""
        parent = self.path.parent
        staged = parent.name == "stages" and (parent.parent / "recipe.toml").is_file()
        return parent.parent if staged else self.path

    @property
    def stages(self) -> list[Path]:
        """Folders of its tables [[stages]], in their order. Empty for a run without stages."""
        with suppress(OSError, ValueError):
            tables = tomllib.loads(self.recipe.read_text(encoding="utf-8")).get("stages", [])
            if isinstance(tables, list):
                named = [table["name"] for table in tables if "name" in table]
                return [self.path / "stages" / str(name) for name in named]
        return []

    @property
    def environment(self) -> Path:
        """Versions, machine and command line of the run."""
        return self.path / "environment.json"

    @property
    def metrics(self) -> Path:
        """Metrics, one JSON line per step."""
        return self.path / "metrics.jsonl"

    @property
    def schedule(self) -> Path:
        """Schedule of an asynchronous run, one JSON line per step (`controller/schedule.py`)."""
        return self.path / "schedule.jsonl"

    @property
    def curriculum(self) -> Path:
        """What the curriculum decided, one JSON line each time (`controller/curriculum.py`)."""
        return self.path / "curriculum.jsonl"

    @property
    def dead_letters(self) -> Path:
        """Prompts that were set aside, one JSON line each (`controller/dead_letters.py`)."""
        return self.path / "dead_letters.jsonl"

    @property
    def trace(self) -> Path:
        """Timeline of the newest steps (`report/trace.py`), with `log.trace_steps`."""
        return self.path / "trace.json"

    @property
    def replay_of(self) -> Path:
        """Path of the schedule that the run replays. Only in a replay."""
        return self.path / "replay_of"

    @property
    def rollouts(self) -> Path:
        """Directory of the trajectories, one file per step."""
        return self.path / "rollouts"

    @property
    def checkpoints(self) -> Path:
        """Directory of the checkpoints, such as `step-000100/`."""
        return self.path / "checkpoints"

    @property
    def base(self) -> Path:
        """Base model of the run's adapters, if the run made it itself."""
        return self.path / "base"

    @property
    def summary(self) -> Path:
        """Final figures of the run."""
        return self.path / "summary.json"

    @property
    def heldout(self) -> Path:
        """Share solved of each held-out task by the final weights."""
        return self.path / "heldout.json"

    @property
    def samples(self) -> Path:
        """Completions of the same tasks before and after RL."""
        return self.path / "samples.json"

    def rollout_file(self, step: int) -> Path:
        return self.rollouts / f"step-{step:06d}.jsonl.zst"

    def lock(self) -> None:
        """Lock the folder until `unlock` or the end of the process.

        Raises:
            UserError: if another process holds the lock.
        """
        if self._lock in _held_locks:
            return
        with ExitStack() as on_failure, disk_errors(f"cannot lock {self.path}"):
            descriptor = os.open(self.path / MARKER, os.O_RDWR | os.O_CREAT, 0o644)
            on_failure.callback(os.close, descriptor)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(
                    f"{self.path} is locked by {self._owner()}: wait for it, stop it, or choose"
                    " another run.name"
                ) from None
            owner = {"pid": os.getpid(), "host": socket.gethostname(), "since": _now()}
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(owner).encode(), 0)
            self._opened = os.open(self.path, os.O_RDONLY)
            on_failure.pop_all()
        self._lock = descriptor
        _held_locks.update((descriptor, self._opened))

    def unlock(self) -> None:
        # A forked child does not hold the lock: the descriptor may now be another file's.
        for descriptor in (self._lock, self._opened):
            if descriptor is not None and descriptor in _held_locks:
                _held_locks.discard(descriptor)
                os.close(descriptor)
        self._lock = self._opened = None

    def keep_lock(self) -> None:
        """Lock the folder again if another program has deleted or replaced its lock file.

        Raises:
            UserError: if another process holds the new lock.
        """
        if self._lock not in _held_locks:
            return
        assert self._lock is not None
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(self._lock), os.stat(self.path / MARKER)):
                return
        self.unlock()
        self.lock()

    def displaced(self) -> str:
        """What became of the locked folder, if another program renamed or deleted it; else ""."""
        if self._opened not in _held_locks:
            return ""
        assert self._opened is not None
        try:
            if os.path.samestat(os.fstat(self._opened), os.stat(self.path)):
                return ""
        except (FileNotFoundError, NotADirectoryError):
            pass
        except OSError:  # a disk that does not answer: the next write reports it
            return ""
        found = self._present_path()
        return f"{self.path} was {f'renamed to {found}' if found else 'deleted'} during the run"

    def follow(self) -> bool:
        """Go on in the new place of a folder that was renamed, or create a deleted one again.

        Returns:
            True if the folder was created again. It then lacks the recipe.

        Raises:
            UserError: if the disk refuses it, or another folder is there now.
        """
        if found := self._present_path():
            self.path = found
            return False
        with disk_errors(f"cannot create {self.path} again"):
            self.path.mkdir(parents=True)
        self.unlock()
        self.lock()
        with disk_errors(f"cannot prepare {self.path}"):
            self.rollouts.mkdir()
            self.checkpoints.mkdir()
        return True

    def _present_path(self) -> Path | None:
        """Present path of the locked folder. None if it was deleted, or on macOS."""
        with suppress(OSError):
            assert self._opened is not None
            path = Path(os.readlink(f"/proc/self/fd/{self._opened}"))
            if os.path.samestat(os.fstat(self._opened), os.stat(path)):
                return path
        return None

    def __enter__(self) -> RunFolder:
        self.lock()
        return self

    def __exit__(self, *_: object) -> None:
        """Release the lock. If the run made no checkpoint, put the run that it replaced back."""
        if self.earlier and replaced_folder(self.path).is_dir() and not has_result(self.path):
            put_back(self.path)
        self.unlock()
        if self.earlier:
            self.earlier.unlock()

    def says_of_earlier(self) -> str:
        """Line about the replaced run, shown when the process ends. Empty if there is none."""
        if not self.earlier or not self.earlier.path.is_dir():
            return ""
        if has_result(self.path):
            return f"the replaced run is kept in {self.earlier.path} until the new run has finished"
        return f"the new run made no checkpoint: the earlier run is back in {self.path}"

    def end(self) -> None:
        """Delete the replaced run, because this one has ended."""
        remove_replaced(self.path)

    def _owner(self) -> str:
        try:
            owner = json.loads((self.path / MARKER).read_text())
            return f"pid {owner['pid']} on host {owner['host']} since {owner['since']}"
        except (ValueError, KeyError, TypeError):  # the owner has not written its details yet
            return "another process"

    def last_step(self) -> int | None:
        """Last step in the metrics, or None before the first.

        A line that a crash cut short is skipped.
        """
        lines = (
            self.metrics.read_text(encoding="utf-8", errors="replace").splitlines()
            if self.metrics.is_file()
            else []
        )
        for line in reversed(lines):
            try:
                return int(json.loads(line)["step"])
            except (ValueError, KeyError, TypeError, RecursionError):
                continue
        return None

    def prepare_resume(self, step: int) -> None:
        """Delete rollout files of steps after `step`, and leftovers of interrupted writes.

        The resumed run writes those rollout files again.
        """
        with disk_errors(f"cannot clean {self.path}"):
            self.rollouts.mkdir(exist_ok=True)
            for file in [*self.rollouts.glob("*"), *self.path.glob(".*")]:
                match = _ROLLOUT_FILE.fullmatch(file.name)
                if (match and int(match[1]) > step) or _LEFTOVER.fullmatch(file.name):
                    file.unlink()

    def write_environment(self, command: Sequence[str], hub_commits: Mapping[str, str]) -> None:
        """Record the start time, command, machine, git revision and package versions.

        The git revision is that of the working directory. The versions come from package metadata,
        so nothing is imported.

        Args:
            command: command line of this process.
            hub_commits: commit of each model and dataset loaded from the hub. Commits recorded by
                an earlier process of the run are kept, because a resumed run loads its model from a
                checkpoint.
        """
        write_json_atomic(
            self.environment,
            {
                "started": _now(),
                "command": list(command),
                "python": platform.python_version(),
                "packages": {name: installed_version(name) for name in PACKAGES},
                "git_revision": _git_revision(),
                "platform": platform.platform(),
                "cpus": os.cpu_count(),
                "hub_commits": {**self._earlier_commits(), **hub_commits},
            },
        )

    def _earlier_commits(self) -> dict[str, str]:
        try:
            found = json.loads(self.environment.read_bytes())["hub_commits"]
        except (
            OSError,
            ValueError,
            KeyError,
            TypeError,
        ):  # no earlier process, or one that did not write it
            return {}
        return found if isinstance(found, dict) else {}


def check_free(directory: Path, name: str, overwrite: bool = False) -> None:
    """Check whether `create_run` would succeed, before anything slow is done. Changes nothing.

    Args:
        directory: folder of the runs.
        name: name of the run.
        overwrite: whether an earlier run may be replaced.

    Raises:
        UserError: if another run or other files are there.
    """
    run = RunFolder(directory / name)
    with disk_errors(f"cannot create {run.path}"):
        entries = _entries(run.path)
        is_run = (run.path / MARKER).is_file()
    if entries and not is_run:
        raise UserError(
            f"{run.path} holds files that are not a run's ({entries[0].name}, ...): choose another"
            " run.name or run.dir"
        )
    if entries and not overwrite:
        step, stages = run.last_step(), len(list(run.path.glob(f"stages/*/{ARTIFACT}")))
        progress = "no step finished" if step is None else f"step {step}"
        begun = sorted(
            run.path.glob("stages/*/metrics.jsonl"), key=lambda path: path.stat().st_mtime
        )
        if begun and (step := RunFolder(begun[-1].parent).last_step()) is not None:
            progress = f"step {step} of stage {begun[-1].parent.name}"
        if stages:
            progress = f"{stages} finished stage{'s' * (stages > 1)}"
        older = (
            f"; the run that it would have replaced is in {replaced_folder(run.path)}"
            if replaced_folder(run.path).is_dir()
            else ""
        )
        raise UserError(
            f"{run.path} already holds a run ({progress}): use --resume {run.path}, --overwrite, or"
            f" another --run.name{older}"
        )


def create_run(directory: Path, name: str, overwrite: bool = False) -> RunFolder:
    """Create `directory/name` and return it locked.

    With `overwrite`, an existing run is moved aside. It is put back if the new run ends without a
    checkpoint (`__exit__`), and deleted once the new run has ended well (`end`).

    Args:
        directory: folder of the runs.
        name: name of the run.
        overwrite: whether an earlier run may be replaced.

    Raises:
        UserError: if another run or other files are there, if another process is training there, or
            if the folder cannot be written.
    """
    run = RunFolder(directory / name)
    recover(run.path)
    check_free(directory, name, overwrite)
    with ExitStack() as on_failure:
        if _entries(run.path):
            run.earlier = _take_away(run.path)
            on_failure.callback(run.earlier.unlock)
            on_failure.callback(put_back, run.path)
        with disk_errors(f"cannot create {run.path}"):
            run.path.resolve().mkdir(parents=True, exist_ok=True)
        faultpoint("replace.made")
        run.lock()
        on_failure.callback(run.unlock)
        check_free(directory, name)
        with disk_errors(f"cannot prepare {run.path}"):
            run.rollouts.mkdir(exist_ok=True)
            run.checkpoints.mkdir(exist_ok=True)
            fsync_path(run.path)
        faultpoint("replace.made")
        on_failure.pop_all()
    return run


def _take_away(path: Path) -> RunFolder:
    """Move the run at `path` aside.

    Returns:
        The run that is kept, locked.
    """
    with ExitStack() as locks:
        current, older = RunFolder(path), RunFolder(replaced_folder(path))
        for folder in (current, older) if older.path.is_dir() else (current,):
            folder.lock()
            locks.callback(folder.unlock)
        check_free(
            path.parent, path.name, overwrite=True
        )  # again under the lock: another process may have been quicker
        kept, gone = (current, older) if move_aside(path) else (older, current)
        locks.pop_all()
    gone.unlock()
    kept.path = older.path
    return kept


def recover(path: Path) -> bool:
    """Put back a run that an interrupted --overwrite moved aside before the new run had started.

    Returns:
        True if a run was put back.
    """
    aside = RunFolder(replaced_folder(path))
    # os.path.isdir never raises. Without permission to look here, nobody can train here either.
    if not os.path.isdir(aside.path) or RunFolder(path).recipe.is_file():
        return False
    with aside:  # fails if the process that is replacing it is alive: it holds the lock
        put_back(path)
    return True


def _entries(path: Path) -> list[Path]:
    """Entries that a run has left in a folder.

    The marker file and empty rollout and checkpoint directories do not count.
    """
    entries = [entry for entry in path.iterdir() if entry.name != MARKER] if path.is_dir() else []
    places = {RunFolder(path).rollouts, RunFolder(path).checkpoints}
    return [
        entry
        for entry in entries
        if entry not in places or not entry.is_dir() or any(entry.iterdir())
    ]


def open_run(path: Path) -> RunFolder:
    """Run in a folder, not locked: sufficient for reading. Use `with` to lock it for writing.

    Raises:
        UserError: if the folder holds no run.
    """
    run = RunFolder(path)
    recover(path)
    if not path.is_dir():
        siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        raise UserError(f"no run at {path}: there is no such folder.{nearest(path.name, siblings)}")
    if not run.recipe.is_file():
        raise UserError(f"{path} is not a run folder: no {run.recipe.name} in it")
    return run


def model_stage(
    path: Path, made: Sequence[str] = ("model", "adapter"), kinds: Sequence[str] = ()
) -> Path:
    """Folder of the last finished stage that made a model. A run without stages is its own.

    Args:
        path: folder of the run.
        made: what the stage made, as in its artifact.
        kinds: kinds of stages that are asked for. Empty: all.

    Raises:
        UserError: if no stage has made one yet.
    """
    stages = RunFolder(path).stages
    for folder in reversed(stages):
        with suppress(OSError, ValueError):
            artifact = json.loads((folder / ARTIFACT).read_bytes())
            if artifact["made"] in made and (not kinds or artifact["kind"] in kinds):
                return folder
    if stages:
        names = ", ".join(folder.name for folder in stages)
        raise UserError(
            f"{path}: none of its stages ({names}) has made a {(*kinds, *made)[0]} yet. Go on with"
            f" it: sixfold train --resume {path}"
        )
    return path


def one_stage(path: Path) -> Path:
    """The folder of a run without stages, or of one stage.

    Raises:
        UserError: if it holds several stages.
    """
    if stages := RunFolder(path).stages:
        folders = ", ".join(str(folder) for folder in stages)
        raise UserError(f"{path} is a run with stages: name the folder of one, {folders}")
    return path


def _now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")


def installed_version(package: str) -> str | None:
    """Version of an installed package; None if it runs from its source tree."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git_revision() -> str | None:
    """Commit of the working directory, with "-dirty" if it has changes.

    Returns:
        None outside a repository, without git, or after 5 seconds.
    """
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=5)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() if answer.returncode == 0 else None
