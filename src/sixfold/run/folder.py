"""The folder of a run, `runs/NAME/`: where each file is and who may write in it. No torch.

One process at a time trains in a folder: it holds a lock (`flock` on the file `.sixfold-run`) that the kernel drops when the process ends,
however it ends. Reading needs no lock. The same file marks the folder as a run, and only a marked folder is ever replaced.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import re
import socket
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ..errors import UserError, nearest
from .durable import disk_errors, faultpoint, fsync_path, write_json_atomic
from .replace import has_checkpoint, move_aside, put_back, remove_replaced, replaced

MARKER = ".sixfold-run"
PACKAGES = ("sixfold", "torch", "transformers", "tokenizers", "safetensors", "numpy")

_ROLLOUT_FILE = re.compile(r"step-(\d{6,})\.jsonl\.zst")
_LEFTOVER = re.compile(r"\..+\.tmp-\d+")
_held_locks: set[int] = set()


def _drop_inherited_locks() -> None:
    """A forked worker that outlives a killed trainer would otherwise keep the run locked."""
    for descriptor in _held_locks:
        os.close(descriptor)
    _held_locks.clear()


os.register_at_fork(after_in_child=_drop_inherited_locks)


@dataclass
class RunFolder:
    """The paths of one run, and its lock. As a context manager it holds the lock: `with open_run(path) as run: ...`."""

    path: Path
    earlier: RunFolder | None = field(default=None, repr=False)
    """The run that this one replaces, moved aside and locked; None where it replaces none."""
    _lock: int | None = field(default=None, init=False, repr=False)

    @property
    def recipe(self) -> Path:
        """The resolved recipe, enough to run it again."""
        return self.path / "recipe.toml"

    @property
    def environment(self) -> Path:
        """Versions, machine and command line of the run."""
        return self.path / "environment.json"

    @property
    def metrics(self) -> Path:
        """One JSON line a step."""
        return self.path / "metrics.jsonl"

    @property
    def rollouts(self) -> Path:
        """Directory of the trajectories, a file a step."""
        return self.path / "rollouts"

    @property
    def checkpoints(self) -> Path:
        """Directory of `step-000100/` and its like."""
        return self.path / "checkpoints"

    @property
    def report(self) -> Path:
        """The self-contained HTML report."""
        return self.path / "report.html"

    @property
    def summary(self) -> Path:
        """The figures that the run ends with."""
        return self.path / "summary.json"

    @property
    def samples(self) -> Path:
        """Completions of the same tasks before and after."""
        return self.path / "samples.json"

    def rollout_file(self, step: int) -> Path:
        """Where the trajectories of a step are dumped."""
        return self.rollouts / f"step-{step:06d}.jsonl.zst"

    def lock(self) -> None:
        """Become the one process that writes here, until `unlock` or the end of the process. UserError if another one is."""
        if self._lock in _held_locks:
            return
        with ExitStack() as on_failure, disk_errors(f"cannot lock {self.path}"):
            descriptor = os.open(self.path / MARKER, os.O_RDWR | os.O_CREAT, 0o644)
            on_failure.callback(os.close, descriptor)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(f"{self.path} is locked by {self._owner()}: wait for it, stop it, or choose another run.name") from None
            owner = {"pid": os.getpid(), "host": socket.gethostname(), "since": _now()}
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(owner).encode(), 0)
            on_failure.pop_all()
        self._lock = descriptor
        _held_locks.add(descriptor)

    def unlock(self) -> None:
        """Let another process write here."""
        if self._lock in _held_locks:  # in a forked child it is not ours, and the descriptor's number may be another file's by now
            _held_locks.discard(self._lock)
            os.close(self._lock)
        self._lock = None

    def __enter__(self) -> RunFolder:
        self.lock()
        return self

    def __exit__(self, *_: object) -> None:
        """Drop the lock. A run that has made no checkpoint gives way to the one that it was to replace."""
        if self.earlier and replaced(self.path).is_dir() and not has_checkpoint(self.path):
            put_back(self.path)
        self.unlock()
        if self.earlier:
            self.earlier.unlock()

    def says_of_earlier(self) -> str:
        """A line on the run that this one replaces, when the process ends; empty where there is none or it is gone."""
        if not self.earlier or not self.earlier.path.is_dir():
            return ""
        if has_checkpoint(self.path):
            return f"the run that this one replaces is kept in {self.earlier.path} until this one has ended"
        return f"no checkpoint was made: the earlier run is back in {self.path}"

    def end(self) -> None:
        """The run has ended: delete the one that it replaces."""
        remove_replaced(self.path)

    def _owner(self) -> str:
        """Who holds the lock, in words."""
        try:
            owner = json.loads((self.path / MARKER).read_text())
            return f"pid {owner['pid']} on host {owner['host']} since {owner['since']}"
        except (ValueError, KeyError, TypeError):  # read in the instant before the owner has signed
            return "another process"

    def last_step(self) -> int | None:
        """The last step in the metrics, or None before the first. A line cut short by a crash does not count."""
        lines = self.metrics.read_text(encoding="utf-8", errors="replace").splitlines() if self.metrics.is_file() else []
        for line in reversed(lines):
            try:
                return int(json.loads(line)["step"])
            except (ValueError, KeyError, TypeError):
                continue
        return None

    def prepare_resume(self, step: int) -> None:
        """Drop the rollout files of the steps after `step`, which will be made again, and what interrupted writes left."""
        with disk_errors(f"cannot clean {self.path}"):
            self.rollouts.mkdir(exist_ok=True)
            for file in [*self.rollouts.glob("*"), *self.path.glob(".*")]:
                match = _ROLLOUT_FILE.fullmatch(file.name)
                if (match and int(match[1]) > step) or _LEFTOVER.fullmatch(file.name):
                    file.unlink()

    def write_environment(self, command: Sequence[str], hub_commits: Mapping[str, str]) -> None:
        """Record start, command, machine, git revision of the working directory, versions (from package metadata: nothing is imported).

        Args:
            command: of this process.
            hub_commits: commit of each hub model and dataset that was loaded. Those of an earlier
                process of the run stay: a resumed run loads its model from a checkpoint.
        """
        write_json_atomic(
            self.environment,
            {
                "started": _now(),
                "command": list(command),
                "python": platform.python_version(),
                "packages": {name: _installed(name) for name in PACKAGES},
                "git_revision": _git_revision(),
                "platform": platform.platform(),
                "cpus": os.cpu_count(),
                "hub_commits": {**self._earlier_commits(), **hub_commits},
            },
        )

    def _earlier_commits(self) -> dict[str, str]:
        try:
            found = json.loads(self.environment.read_bytes())["hub_commits"]
        except (OSError, ValueError, KeyError, TypeError):  # no earlier process, or one that did not write it
            return {}
        return found if isinstance(found, dict) else {}


def check_free(directory: Path, name: str, overwrite: bool = False) -> None:
    """What `create_run` would refuse, found before anything slow is done or anything old is deleted. Changes nothing."""
    run = RunFolder(directory / name)
    with disk_errors(f"cannot create {run.path}"):
        entries = _entries(run.path)
        is_run = (run.path / MARKER).is_file()
    if entries and not is_run:
        raise UserError(f"{run.path} holds files that are not a run's ({entries[0].name}, ...): choose another run.name or run.dir")
    if entries and not overwrite:
        progress = "no step finished" if run.last_step() is None else f"step {run.last_step()}"
        older = f"; the run that it was to replace is in {replaced(run.path)}" if replaced(run.path).is_dir() else ""
        raise UserError(f"{run.path} already holds a run ({progress}): use --resume {run.path}, --overwrite, or another --run.name{older}")


def create_run(directory: Path, name: str, overwrite: bool = False) -> RunFolder:
    """Make `directory/name` and return it locked. A run that is already there is refused, or with `overwrite` moved aside.

    It comes back when this one ends without a checkpoint (`__exit__`), and is deleted when this one has ended well (`end`).

    UserError: another run or other files are there, another process is training there, or the folder cannot be written.
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
    """Move the run at `path` aside. Gives the run that is kept, locked."""
    with ExitStack() as locks:
        current, older = RunFolder(path), RunFolder(replaced(path))
        for folder in (current, older) if older.path.is_dir() else (current,):
            folder.lock()
            locks.callback(folder.unlock)
        check_free(path.parent, path.name, overwrite=True)  # again under the lock: another process may have been quicker
        kept, gone = (current, older) if move_aside(path) else (older, current)
        locks.pop_all()
    gone.unlock()
    kept.path = older.path
    return kept


def recover(path: Path) -> bool:
    """Put back the run that an interrupted --overwrite moved aside before the new one had begun. True when it did."""
    aside = RunFolder(replaced(path))
    if not os.path.isdir(aside.path) or RunFolder(path).recipe.is_file():  # never raises: who may not look there may not train there
        return False
    with aside:  # locked by the process that is replacing it, if that is still alive
        put_back(path)
    return True


def _entries(path: Path) -> list[Path]:
    """What a run has left in a folder. The empty places of one that died before it began are nothing."""
    entries = [entry for entry in path.iterdir() if entry.name != MARKER] if path.is_dir() else []
    places = {RunFolder(path).rollouts, RunFolder(path).checkpoints}
    return [entry for entry in entries if entry not in places or not entry.is_dir() or any(entry.iterdir())]


def open_run(path: Path) -> RunFolder:
    """The run in a folder, not locked: enough to read; `with` it to write. UserError if the folder holds no run."""
    run = RunFolder(path)
    recover(path)
    if not path.is_dir():
        siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        raise UserError(f"no run at {path}: there is no such folder.{nearest(path.name, siblings)}")
    if not run.recipe.is_file():
        raise UserError(f"{path} is not a run folder: no {run.recipe.name} in it")
    return run


def _now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git_revision() -> str | None:
    """Commit of the working directory, "-dirty" when it has changes; None outside a repository or without git."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=5)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() if answer.returncode == 0 else None
