"""Compare this tree with an earlier commit: the same runs, outputs and refusals, byte for byte.

    python tests/gate/gate.py             every case, against the commit in base.txt
    python tests/gate/gate.py runs/demo   some cases, by the beginning of their names

A refactoring passes it after every step. Cases are command lines (runs.toml, outputs.txt,
refusals.txt), so that code may move freely. Bits depend on the processor: what the base commit
computes is recorded on this machine, once, in the folder `.gate/`. What was changed on purpose
is listed in changed.toml, with the reason and the hash of the new text.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import zstandard
from safetensors import safe_open

from sixfold.report.schema import depends_on_time

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TIMED = {"seconds", "started", "ended", "latency"}
"""Keys of rollouts that depend on time."""
DURATION = re.compile(r"\d[\d.,:]* ?(ms|s|min|h|tok/s|tokens/s|checks per second)\b")
COUNT = re.compile(r"settings \(\d+\)|of \d+ settings differ")
"""How many settings there are."""
WORKERS = 2

Record = dict[str, Any]


def digest(value: Any) -> str:
    text = value if isinstance(value, bytes) else json.dumps(value, sort_keys=True).encode()
    return hashlib.sha256(text).hexdigest()[:16]


def untimed(value: Any) -> Any:
    """A JSON value without the entries that depend on time."""
    if isinstance(value, dict):
        return {
            key: untimed(entry)
            for key, entry in value.items()
            if not (key in TIMED or depends_on_time(key))
        }
    return [untimed(entry) for entry in value] if isinstance(value, list) else value


def json_lines(data: bytes) -> list[Any]:
    return [untimed(json.loads(line)) for line in data.splitlines()]


def tensors(file: Path) -> Iterator[tuple[str, str]]:
    with safe_open(file, "numpy") as opened:
        for name in sorted(opened.keys()):
            yield name, digest(opened.get_tensor(name).tobytes())


def run_record(run: Path) -> Record:
    """What a run left: metrics by step and key, and hashes of rollouts and tensors."""
    found: Record = {}
    for line in json_lines((run / "metrics.jsonl").read_bytes()):
        step = line.get("step")
        found.update({f"step {step} {key}": repr(value) for key, value in line.items()})
    for file in sorted(run.glob("rollouts/*.zst")):
        records = json_lines(zstandard.ZstdDecompressor().stream_reader(file.open("rb")).read())
        found[file.name] = digest(records)
    for file in sorted(run.glob("checkpoints/*/**/*.safetensors")):
        found |= {f"{file.relative_to(run)} {name}": value for name, value in tensors(file)}
    for name in ("heldout.json", "samples.json"):
        if (run / name).is_file():
            found[name] = digest(untimed(json.loads((run / name).read_bytes())))
    return found


class Tree:
    """A tree of the project whose commands are run.

    Args:
        root: the tree.
        work: folder for its runs. Its path does not reach the records.
    """

    def __init__(self, root: Path, work: Path) -> None:
        self.root, self.work = root, work
        self.environment = {
            **os.environ,
            **dict(PYTHONPATH=str(root / "src"), OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE"),
            **dict(HF_HUB_OFFLINE="1", COLUMNS="100", NO_COLOR="1", PYTHONHASHSEED="0"),
            "XDG_CACHE_HOME": str(work / "cache"),
        }

    def shell(self, command: str, folder: Path) -> subprocess.CompletedProcess[str]:
        words = dict(
            sixfold=f"{sys.executable} -m sixfold",
            torchrun=f"{sys.executable} -m torch.distributed.run",
        )
        for word, meaning in words.items():
            command = command.replace("{" + word + "}", meaning)
        return subprocess.run(
            command, shell=True, cwd=folder, env=self.environment, capture_output=True, text=True,
            stdin=subprocess.DEVNULL, check=False, timeout=600,
        )  # fmt: skip

    def run(self, commands: list[str], name: str) -> Record:
        """Record of a run: what its commands leave."""
        folder = self.work / name
        folder.mkdir(parents=True)
        done = [self.shell(command, folder) for command in commands]
        if done[-1].returncode:
            raise SystemExit(f"gate: {name} failed in {self.root}:\n{done[-1].stderr[-3000:]}")
        return run_record(folder / "runs" / "r")

    def output(self, command: str, folder: Path) -> Record:
        """Record of a command: its exit code and what it prints, without durations."""
        done = self.shell("{sixfold} " + command, folder)
        text = f"{done.stdout}\n--- stderr\n{done.stderr}\n--- exit code {done.returncode}"
        for path, word in ((self.work, "WORK"), (self.root, "TREE")):
            text = text.replace(str(path), word)
        text = re.sub(r"[ \t]+", " ", DURATION.sub("#", text))
        return {f"line {n}": line for n, line in enumerate(text.splitlines())}


def cases() -> dict[str, Any]:
    """Every case: `runs/NAME` -> commands, `outputs/...` and `refusals/...` -> one command line."""
    given = tomllib.loads((HERE / "runs.toml").read_text())
    found: dict[str, Any] = {}
    for name, commands in given["runs"].items():
        found[f"runs/{name}"] = [line.replace("{shape}", given["shape"]) for line in commands]
    for kind in ("outputs", "refusals"):
        lines = (HERE / f"{kind}.txt").read_text().splitlines()
        found |= {f"{kind}/{line}": line for line in lines if line and not line.startswith("#")}
    return found


def records(root: Path, chosen: dict[str, Any]) -> Iterator[tuple[str, Record]]:
    """(name, record) of the chosen cases in a tree."""
    with tempfile.TemporaryDirectory(prefix="sixfold-gate-") as folder:
        tree = Tree(root, Path(folder))
        shutil.copytree(HERE / "files", tree.work / "files")
        with ThreadPoolExecutor(WORKERS) as pool:
            tasks = {
                name: pool.submit(tree.run, case, name)
                if isinstance(case, list)
                else pool.submit(tree.output, case, tree.work / "files")
                for name, case in chosen.items()
            }
            for name, task in tasks.items():
                yield name, task.result()


def machine() -> str:
    """What decides bits: the processor's features, and the versions of the libraries."""
    features = re.search(r"^(flags|Features).*", Path("/proc/cpuinfo").read_text(), re.M)
    return digest([features and features[0], (ROOT / "constraints.txt").read_text(), sys.version])


def base_records(chosen: dict[str, Any]) -> dict[str, Record]:
    """Records of the base commit on this machine. What is new is recorded first."""
    commit = (HERE / "base.txt").read_text().split()[0]
    file = ROOT / ".gate" / f"{commit[:12]}-{machine()}.json"
    known: dict[str, Record] = json.loads(file.read_text()) if file.is_file() else {}
    # The key has the commands and this file: what is edited is recorded again.
    source = Path(__file__).read_text()
    keys = {name: f"{name} {digest([case, source])}" for name, case in chosen.items()}
    missing = {name: case for name, case in chosen.items() if keys[name] not in known}
    if missing:
        print(f"recording {len(missing)} cases at {commit[:12]}", flush=True)
        with tempfile.TemporaryDirectory(prefix="sixfold-base-") as folder:
            archive = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True)
            if archive.returncode:
                raise SystemExit(
                    f"tests/gate/base.txt: this clone has no commit {commit}. Write one that it"
                    " has, and empty changed.toml"
                )
            subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
            try:
                for name, record in records(Path(folder), missing):
                    known[keys[name]] = record
            finally:  # a case that fails costs no other its record
                file.parent.mkdir(exist_ok=True)
                file.write_text(json.dumps(known))
    return {name: known[keys[name]] for name in chosen}


def comparable(record: Record) -> Record:
    """The record without the number of settings, which every new setting changes."""
    return {key: COUNT.sub("# settings", value) for key, value in record.items()}


def difference(before: Record, now: Record) -> list[str]:
    """The lines that differ, of outputs, or the entries, of runs."""
    if "line 0" in before:
        pair = list(before.values()), list(now.values())
        return [*difflib.unified_diff(*pair, "before", "now", lineterm="", n=0)][2:]
    keys = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    return [f"{key}: {before.get(key)} -> {now.get(key)}" for key in keys]


def main(chosen_names: list[str]) -> int:
    every = cases()
    chosen = {
        name: case
        for name, case in every.items()
        if not chosen_names or name.startswith(tuple(chosen_names))
    }
    on_purpose = tomllib.loads((HERE / "changed.toml").read_text()).get("changed", [])
    allowed = {(one["case"], one["now"]) for one in on_purpose}
    before = base_records(chosen)
    wrong = 0
    for name, now in records(ROOT, chosen):
        now = comparable(now)
        differs = difference(comparable(before[name]), now)
        if differs and (name, digest(now)) not in allowed:
            wrong += 1
            print(f"DIFFERS {name}   (now {digest(now)})")
            print("".join(f"    {line}\n" for line in differs[:12]), end="")
    print(f"gate: {len(chosen) - wrong} of {len(chosen)} cases as before")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
