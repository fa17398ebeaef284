"""Soak test of a run: it is killed every few seconds, resumed each time, and must lose nothing.

    python benchmarks/soak.py [--minutes 30] [--every 20] [--seed 0] [--recipe demo] [--json FILE]
                              [--kill trainer] [--section.key VALUE ...]

    python benchmarks/soak.py --kill any --placement.kind ray --placement.ranks 2 \\
        --placement.samplers 2 --run.restarts 1000 --placement.restarts 1000 --run.silence_s 120

There are two runs of one recipe. The first is killed by SIGKILL about every `--every` seconds, and
resumed each time. Most kills hit it while it trains, some while it starts. After `--minutes` it is
stopped by SIGTERM. The second run makes the same number of steps without a kill. With `--kill any`,
a kill hits a random process of the run: a rank, a sampler, a worker or a part of Ray. The command
then makes another step, or ends and is resumed. These promises are checked, and the exit code is 1
if one is broken:

- equal: metrics, trajectories and the last checkpoint of both runs are equal, bit for bit
- ledger: every step is recorded once, and trained on exactly the tasks of the task stream: no
  prompt is lost or trained twice
- processes: no process outlives the trainer that started it by more than `GRACE_S`
- lock: the run's folder is not locked after a kill
- files: no temporary file or folder is left, in the run's folder, in the directory for temporary
  files or in memory; the number of open files of the uninterrupted process does not grow
- memory: all processes of the uninterrupted run together grow by less than `SLOPE` MB per minute
  (linear fit of their resident memory after the first quarter, checked if it spans at least `FIT_S`
  seconds)
- progress: after a kill, the run makes a step or its command ends within `PATIENCE_S`

The learning rate is constant, because a decaying one depends on the number of steps, which follows
from the speed of the machine.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from safetensors.torch import load_file

from sixfold.backends.weight_files import abandoned_folders
from sixfold.checkpoint.listing import newest_checkpoint
from sixfold.controller.stream import task_stream
from sixfold.data.sources import load_tasks
from sixfold.recipe.toml import load_recipe
from sixfold.report.loggers import read_metrics
from sixfold.report.rollouts import dumped_steps, read_rollouts
from sixfold.report.schema import depends_on_time

GRACE_S = 5.0
"""Seconds after a kill in which processes of the run may still end."""

SLOPE, FIT_S = 1.0, 120.0
"""Limit of the memory slope in MB per minute, and the shortest time span for which it counts."""

MORE_FILES = 4
"""Allowed increase of the number of open files from the first half of a process to the second."""

EARLY = 0.2
"""Share of the kills that hit a process while it starts."""

LEAST_STEPS, LEAST_KILLS = 3, 3
"""Least numbers of steps and kills of a soak."""

PATIENCE_S = 300.0
"""Longest time until the first step of a process, and from SIGTERM until its end."""

SETTINGS = {
    "run.steps": 1_000_000,
    "run.max_minutes": 0,
    "run.target_reward": 0,
    "run.threads": 1,
    "sft.steps": 60,
    "trainer.schedule": "constant",
    "eval.every": 0,
    "data.heldout": 0,
    "checkpoint.every": 3,
    "log.rollouts_every": 1,
}
"""Settings of both runs that override the recipe's."""


class Process(Protocol):
    """A started run."""

    @property
    def pid(self) -> int | None: ...

    def poll(self) -> int | None:
        """Exit code, or None while it runs."""


Launch = Callable[[list[str], Path | None], Process]
"""Starts `sixfold train` with these settings, or resumes the run in a folder."""


@dataclass
class Life:
    """Measurements of one command.

    Attributes:
        seconds: age of the command at each sample.
        megabytes: resident memory of all its processes at each sample.
        files: open files at each sample.
        children: (pid, start time) of every process that it started.
        made: when it was launched.
        moved: when it has made a step, or the wait for one began.
    """

    seconds: list[float] = field(default_factory=list)
    megabytes: list[float] = field(default_factory=list)
    files: list[int] = field(default_factory=list)
    children: set[tuple[int, str]] = field(default_factory=set)
    made: float = field(default_factory=time.monotonic)
    moved: float = 0.0

    def observe(self, pid: int, age: float) -> None:
        """Take a sample. Does nothing if the process has just ended."""
        below = descendants(pid)
        self.children |= below
        resident = [_resident(child) for child, _ in below]
        try:
            files = len(os.listdir(f"/proc/{pid}/fd"))
        except OSError:
            return
        if own := _resident(pid):
            self.seconds.append(age)
            self.megabytes.append((own + sum(resident)) / 1024)
            self.files.append(files)


def _resident(pid: int) -> int:
    """Resident memory of a process in KiB. 0: it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))


@dataclass
class Report:
    """Result of a soak.

    Attributes:
        kills: number of processes that were killed.
        killed: names of the killed processes, and how many of each.
        resumed: number of commands that a kill has ended.
        early_kills: number of processes that were killed while they started.
        steps: steps of the run.
        tokens: sampled tokens.
        reward: mean reward of the first and of the last ten steps.
        slope: memory slope of the uninterrupted run, in MB per minute.
        slope_of_lives: memory slope within the killed commands, for information.
        broken: broken promises.
    """

    kills: int = 0
    killed: dict[str, int] = field(default_factory=dict)
    resumed: int = 0
    early_kills: int = 0
    steps: int = 0
    tokens: int = 0
    reward: tuple[float, float] = (0.0, 0.0)
    slope: float | None = None
    slope_of_lives: float | None = None
    broken: list[str] = field(default_factory=list)


def soak(
    launch: Launch,
    folder: Path,
    settings: dict[str, Any],
    seconds: float,
    every: float,
    seed: int,
    kill_any: bool = False,
) -> Report:
    """Run the soak.

    Args:
        launch: starts a process.
        folder: empty folder for both runs and for temporary files.
        settings: settings of both runs.
        seconds: time after which the killed run is stopped.
        every: mean time between kills.
        seed: seed of the times of the kills.
        kill_any: kill any process of the run. Otherwise the one that was launched.
    """
    report, rng, lives = Report(), random.Random(seed), list[Life]()
    killed = folder / "killed"
    settings = settings | {"run.dir": str(folder)}
    named = flags_of(settings | {"run.name": "killed"})
    until, last, struck, at = time.monotonic() + seconds, False, "", 0.0
    process: Process | None = None
    while not last and not report.broken:
        last = time.monotonic() >= until and report.kills >= LEAST_KILLS
        if process is None:
            process = launch(named, killed if (killed / "recipe.toml").is_file() else None)
            struck = ""
            lives.append(Life())
        life, early = lives[-1], not last and rng.random() < EARLY
        wait = rng.uniform(0.1, 1.0 if early else 1.9) * every
        _watch(process, killed, life, wait, early=early, last=last)
        if (code := process.poll()) is None and time.monotonic() - life.moved > PATIENCE_S:
            report.broken.append(f"progress: no step in {PATIENCE_S:g} s after {struck or 'start'}")
        if code is None:
            victim = process.pid or 0
            if kill_any and not last:
                victim = rng.choice(sorted(descendants(victim) | {(victim, "")}))[0]
            struck, at = _name(victim), time.monotonic()
            report.kills, report.early_kills = report.kills + (not last), report.early_kills + early
            report.killed[struck] = report.killed.get(struck, 0) + (not last)
            if victim != process.pid:
                _kill(victim)
                continue
            _end(process, signal.SIGTERM if last else signal.SIGKILL)
        elif not struck or time.monotonic() - at > PATIENCE_S:
            report.broken.append(f"process {len(lives)} ended by itself with exit code {code}")
        report.broken += _left_behind(killed, life, f"process {len(lives)} after {struck}")
        if last and code is None and process.poll() != 143:
            report.broken.append(f"exit code {process.poll()} after SIGTERM, not 143")
        last = last and code is None
        report.resumed += not last
        process = None
    if process is not None:
        _end(process, signal.SIGKILL)
    report.steps = len(read_metrics(killed / "metrics.jsonl"))
    report.slope_of_lives = slope(lives)
    if not report.broken:
        _compare_with_clean(launch, folder, settings, report)
    return report


def _name(pid: int) -> str:
    """What a process runs: the last word of its command that names a program or an actor."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return "ended"
    named = [Path(word).name for word in words if word and not word.startswith("-")]
    return " ".join(named[:1] + named[-1:])[:60] if named else "ended"


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _compare_with_clean(
    launch: Launch, folder: Path, settings: dict[str, Any], report: Report
) -> None:
    """Make the same steps in one process, and compare."""
    flags = flags_of(settings | {"run.name": "clean", "run.steps": report.steps})
    process, began, life = launch(flags, None), time.monotonic(), Life()
    while process.poll() is None:
        life.observe(process.pid or 0, time.monotonic() - began)
        time.sleep(0.2)
    if process.poll():
        report.broken.append(f"the uninterrupted run ended with exit code {process.poll()}")
        return
    killed, clean = folder / "killed", folder / "clean"
    report.slope = slope([_after_warm_up(life)])
    if life.seconds and life.seconds[-1] >= FIT_S and (report.slope or 0.0) >= SLOPE:
        report.broken.append(f"memory: it grows by {report.slope:.2f} MB per minute")
    half = len(life.files) // 2
    if half and max(life.files[half:]) > max(life.files[:half]) + MORE_FILES:
        report.broken.append(f"files: open files grow from {life.files[0]} to {life.files[-1]}")
    report.broken += _left_behind(clean, life, "the uninterrupted process")
    report.broken += compare(killed, clean) + ledger(killed, report.steps) + litter(folder)
    lines = read_metrics(killed / "metrics.jsonl")
    rewards = [float(m["reward/mean"]) for m in lines if isinstance(m.get("reward/mean"), float)]
    report.reward = statistics.fmean(rewards[:10]), statistics.fmean(rewards[-10:])
    report.tokens = int(lines[-1]["tokens_total"])  # type: ignore[arg-type]


def _watch(
    process: Process, run: Path, life: Life, wait: float, *, early: bool, last: bool
) -> None:
    """Measure a command until it is time to kill a process of it, or until it ends.

    Args:
        process: the command.
        run: folder of the run.
        life: where the measurements go.
        wait: seconds from the first step until the kill.
        early: count `wait` from now instead.
        last: wait also until the run has `LEAST_STEPS`.
    """
    life.moved, before = time.monotonic(), _progress(run)
    first = life.moved if early else math.inf
    while process.poll() is None and time.monotonic() - life.moved < PATIENCE_S:
        life.observe(process.pid or 0, time.monotonic() - life.made)
        if (now := _progress(run)) != before:
            before, life.moved = now, time.monotonic()
            first = min(first, life.moved)
        enough = not last or _lines(run / "metrics.jsonl") >= LEAST_STEPS
        if enough and time.monotonic() >= first + wait:
            break
        time.sleep(0.1)


def flags_of(settings: dict[str, Any]) -> list[str]:
    """Settings as command-line flags."""
    return [part for key, value in settings.items() for part in (f"--{key}", str(value))]


def _progress(run: Path) -> tuple[int, int]:
    return _lines(run / "sft.jsonl"), _lines(run / "metrics.jsonl")


def _lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.is_file() else 0


def _end(process: Process, number: signal.Signals) -> None:
    """Send a signal, and wait for the end of the process."""
    os.kill(process.pid or 0, number)
    until = time.monotonic() + PATIENCE_S
    while process.poll() is None and time.monotonic() < until:
        time.sleep(0.02)


def _left_behind(run: Path, life: Life, who: str) -> list[str]:
    """Find processes that outlive their trainer, and a lock that a dead process has left."""
    until = time.monotonic() + GRACE_S
    while (alive := life.children & processes()) and time.monotonic() < until:
        time.sleep(0.05)
    broken = [f"processes: {pid} outlives {who}" for pid, _ in sorted(alive)]
    marker = run / ".sixfold-run"
    if marker.is_file():
        with marker.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                broken.append(f"lock: {run} is locked after the end of {who}")
    return broken


def processes() -> set[tuple[int, str]]:
    """(pid, start time) of every process of the machine."""
    return {(pid, start) for pid, (_, start) in _table().items()}


def descendants(pid: int) -> set[tuple[int, str]]:
    """(pid, start time) of every process below `pid`."""
    table = _table()
    below, found = {pid}, set[tuple[int, str]]()
    while grown := {p for p, (parent, _) in table.items() if parent in below} - below:
        below |= grown
        found |= {(p, table[p][1]) for p in grown}
    return found


def _table() -> dict[int, tuple[int, str]]:
    """Parent and start time of every process that is not a zombie, by pid."""
    table = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if fields[0] != "Z":
                table[int(entry.name)] = int(fields[1]), fields[19]
    return table


def compare(killed: Path, clean: Path) -> list[str]:
    """Differences between the killed run and the uninterrupted one."""
    broken = []
    a, b = ([_untimed(m) for m in read_metrics(run / "metrics.jsonl")] for run in (killed, clean))
    if a != b:
        step = next((i + 1 for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(b))
        broken.append(f"equal: metrics differ from step {step} on ({len(a)} and {len(b)} lines)")
    for step in dumped_steps(clean / "rollouts"):
        name = f"rollouts/step-{step:06d}.jsonl.zst"
        if not (killed / name).is_file() or _tokens(killed / name) != _tokens(clean / name):
            broken.append(f"equal: {name} differs")
            break
    ours, theirs = (newest_checkpoint(run / "checkpoints")[0] for run in (killed, clean))
    if ours is None or theirs is None or ours.name != theirs.name:
        return [*broken, f"equal: the last checkpoints are {ours} and {theirs}"]
    for path in sorted(theirs.rglob("*.safetensors")):
        name = path.relative_to(theirs)
        mine, other = load_file(ours / name), load_file(path)
        same = mine.keys() == other.keys() and all(
            mine[key].numpy().tobytes() == other[key].numpy().tobytes() for key in other
        )
        broken += [] if same else [f"equal: {name} of {ours.name} differs"]
    return broken


def ledger(run: Path, steps: int) -> list[str]:
    """Compare the tasks of every recorded step with the task stream."""
    numbers = [m["step"] for m in read_metrics(run / "metrics.jsonl")]
    broken = [] if numbers == [*range(1, steps + 1)] else ["ledger: steps are missing or repeated"]
    recipe = load_recipe(str(run / "recipe.toml"))
    tasks = load_tasks(recipe.data, seed=recipe.run.seed, rewards=recipe.environment.rewards)
    stream = task_stream(
        tasks.train, recipe.rollout.prompts_per_step, recipe.run.seed, tasks.weights
    )
    trained, wanted = Counter[str](), Counter[str]()
    samples = [*range(recipe.rollout.samples_per_prompt)]
    for step in range(1, steps + 1):
        found: dict[str, list[int]] = {}
        for record in read_rollouts(run / f"rollouts/step-{step:06d}.jsonl.zst"):
            found.setdefault(record["task_id"], []).append(record["sample"])
        trained.update(found.keys())
        wanted.update(task.id for task in stream(step))
        if any(given != samples for given in found.values()):
            broken.append(f"ledger: step {step} has lost or repeated samples")
    lost, twice = wanted - trained, trained - wanted
    if lost or twice:
        broken.append(f"ledger: {lost.total()} prompts lost, {twice.total()} trained twice")
    return broken


def litter(folder: Path) -> list[str]:
    """Temporary files and folders that are left."""
    marks = (".tmp-", ".saving-", ".deleting-", "damaged-")
    left = [p for p in folder.rglob("*") if any(mark in p.name for mark in marks)]
    left += [p for p in (folder / "tmp").glob("*")]
    found = [str(path.relative_to(folder)) for path in left]
    found += map(str, abandoned_folders("/dev/shm"))
    return [f"files: {name} is left" for name in found[:5]]


def slope(lives: Sequence[Life]) -> float | None:
    """Memory slope in MB per minute: linear fit over all processes, each with its own intercept."""
    above = below = 0.0
    for life in lives:
        if len(life.seconds) > 2:
            at, size = statistics.fmean(life.seconds), statistics.fmean(life.megabytes)
            pairs = zip(life.seconds, life.megabytes, strict=True)
            above += sum((s - at) * (m - size) for s, m in pairs)
            below += sum((s - at) ** 2 for s in life.seconds)
    return 60 * above / below if below else None


def _after_warm_up(life: Life) -> Life:
    """Samples after the first quarter, in which the model is loaded and caches are filled."""
    start = len(life.seconds) // 4
    return Life(life.seconds[start:], life.megabytes[start:], life.files[start:])


def _untimed(metrics: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in metrics.items() if not depends_on_time(key)}


def _tokens(path: Path) -> list[tuple[Any, ...]]:
    keys = ("task_id", "sample", "tokens", "logp", "version", "advantage")
    return [tuple(r[key] for key in keys) for r in read_rollouts(path)]


@dataclass
class Command:
    """A run started from the command line."""

    process: subprocess.Popen[bytes]

    @property
    def pid(self) -> int:
        """Process id."""
        return self.process.pid

    def poll(self) -> int | None:
        """Exit code, or None while it runs."""
        return self.process.poll()


def from_command_line(recipe: str, folder: Path) -> Launch:
    """Launch runs by `sixfold train`, with temporary files in `folder`/tmp."""
    (folder / "tmp").mkdir()
    environment = {**os.environ, "TMPDIR": str(folder / "tmp")}
    # PyTorch keeps this folder for later processes: it is no leak.
    environment["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        environment.setdefault(name, "1")

    def launch(flags: list[str], resume: Path | None) -> Process:
        what = [recipe, *flags] if resume is None else ["--resume", str(resume)]
        command = [sys.executable, "-m", "sixfold", "train", *what]
        with (folder / "output.txt").open("ab") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
        return Command(process)

    return launch


def main() -> int:
    """Run the soak and print the report; 1 if a promise is broken."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=30, help="duration of the killed run")
    parser.add_argument("--every", type=float, default=20, help="mean seconds between kills")
    parser.add_argument("--seed", type=int, default=0, help="seed of the times of the kills")
    parser.add_argument(
        "--kill", choices=("trainer", "any"), default="trainer", help="which process is killed"
    )
    parser.add_argument("--recipe", default="demo", help="recipe of both runs")
    parser.add_argument("--json", type=Path, help="write the report to this file")
    given, more = parser.parse_known_args()
    settings = SETTINGS | {
        key.removeprefix("--"): value for key, value in zip(more[::2], more[1::2], strict=True)
    }
    with tempfile.TemporaryDirectory(prefix="sixfold-soak-") as name:
        folder = Path(name)
        launch = from_command_line(given.recipe, folder)
        times = 60 * given.minutes, given.every, given.seed
        report = soak(launch, folder, settings, *times, kill_any=given.kill == "any")
        if report.broken:
            print((folder / "output.txt").read_text(errors="replace")[-3000:])
    rate = "-" if report.slope is None else f"{report.slope:+.2f}"
    lives = "-" if report.slope_of_lives is None else f"{report.slope_of_lives:+.2f}"
    print(
        f"{report.kills} kills ({report.early_kills} of them while the run started),"
        f" {report.resumed} resumes,"
        f" {report.steps} steps, {report.tokens} tokens, reward {report.reward[0]:.3f} ->"
        f" {report.reward[1]:.3f}; memory {rate} MB per minute without kills ({lives} within the"
        " killed ones, which are still filling their caches)"
    )
    if given.kill == "any":
        print("killed: " + ", ".join(f"{n} x {name}" for name, n in report.killed.items() if n))
    for line in report.broken:
        print(f"BROKEN  {line}")
    print("every promise was kept" if not report.broken else "promises were broken")
    if given.json:
        given.json.write_text(json.dumps(asdict(report), indent=1) + "\n")
    return bool(report.broken)


if __name__ == "__main__":
    raise SystemExit(main())
