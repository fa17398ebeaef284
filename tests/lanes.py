"""Test files that `make test` leaves out while nothing that they test has changed.

    python tests/lanes.py              when `make test-all` passed last, and what has changed since

`make test-all` runs every test. Then it writes into lanes.json, for each test file under `LANES`
whose tests have all passed, a hash of the file and of all that it imports, directly or not. `make
test` runs the file again once the hash differs.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent
SRC = ROOT / "src"
FILE = HERE / "lanes.json"

LANES = (
    *("agents", "algorithm", "checkpoint", "checks", "controller", "critic", "curation"),
    *("data_sources", "devices", "engine", "environment", "evaluation", "files", "interop"),
    *("labs", "model", "models", "numerics", "planning", "preference", "processes", "recipe"),
    *("reference", "renderer", "report", "reward_model", "rollout", "search", "server", "sizing"),
    *("stages", "sync", "trainer"),
)
"""Folders of tests that a change often leaves alone. Always run are whole runs, commands, shipped
recipes, packages, the shape of the source and the pages: they are also a check of the installation.
"""

BY_NAME = {
    r"src/sixfold/run/assemble\.py": ("src/sixfold", "src/sixfold_environments"),
    r"src/sixfold/cli/__init__\.py": ("src",),
    r"src/sixfold/recipe/find\.py": ("recipes",),
    r"src/sixfold/stages/driver\.py": ("src/sixfold/stages",),
    r"tests/(environment|checks)/.*\.py": ("src/sixfold_environments", "src/sixfold/environment"),
}
"""Files that load others by name, and folders with all that they may load."""
MENTIONED = {
    r"\bdocs\b": "docs",
    r"\brecipes\b": "recipes",
    r"\bbenchmarks\b": "benchmarks",
    r"""["/]data["/]""": "tests/data",
}
"""What a test says when it reads a folder, and the folder."""
STARTS = "sys.executable"
STARTED = {
    "tests/devices": (*("critic", "engine", "kernels", "model", "reference", "sync", "trainer"),),
    "tests/engine": ("engine", "kernels", "model"),
}
"""Rooms of the core that run in the processes which tests of a folder start. Elsewhere it is all of
the source.
"""
EVERYWHERE = ("pyproject.toml", "constraints.txt")

_IMPORT = re.compile(
    r"^\s*(?:from\s+([.\w]+)\s+import\s+(\([^)]*\)|[^\n]*)|import\s+([\w.]+))", re.MULTILINE
)


def files_of(lane: str) -> list[Path]:
    """The test files of an entry of `LANES`."""
    return sorted((HERE / lane).rglob("test_*.py"))


def fingerprint(file: Path) -> str:
    """Hash of a test file and of all files of ours that it imports, starts, loads or reads."""
    todo, found = [file, *_fixtures(file)], set[Path]()
    while todo:
        path = todo.pop()
        if path not in found and path != HERE / "lanes.py":  # which names every folder
            found.add(path)
            todo += imported(path)
    found |= {other for path in found for folder in loaded(path) for other in every_file(folder)}
    data = {other for path in found for other in beside_code(path.parent)}
    digest = hashlib.sha256()
    for path in sorted({*found, *data, *(ROOT / name for name in EVERYWHERE)}):
        digest.update(str(path.relative_to(ROOT)).encode() + read_hash(path))
    return digest.hexdigest()[:16]


def _fixtures(file: Path) -> Iterator[Path]:
    """The files that give a test its fixtures. That of all tests, if it uses one of them."""
    for folder in file.parents:
        shared = folder / "conftest.py"
        if folder == HERE:
            names = re.findall(r'fixture\(scope="session"\)\ndef (\w+)', shared.read_text())
            if re.search(rf"\b({'|'.join(names)})\b", file.read_text()):
                yield shared
            return
        if shared.is_file():
            yield shared


@cache
def loaded(path: Path) -> tuple[str, ...]:
    """Folders whose files a file may load by name, start or read."""
    name = str(path.relative_to(ROOT))
    found = [
        folder for key, folders in BY_NAME.items() for folder in folders if re.match(key, name)
    ]
    if HERE in path.parents and path.suffix == ".py":
        text = path.read_text()
        if STARTS in text:
            rooms = STARTED.get(str(path.parent.relative_to(ROOT)))
            found += [f"src/sixfold/{room}" for room in rooms] if rooms else ["src"]
        found += [folder for key, folder in MENTIONED.items() if re.search(key, text)]
    return tuple(found)


@cache
def every_file(folder: str) -> tuple[Path, ...]:
    """Files of a folder and all below it, without what an installation or a compiler has made."""
    files = (path for path in sorted((ROOT / folder).rglob("*")) if path.is_file())
    return tuple(
        path
        for path in files
        if path.suffix not in (".pyc", ".so") and ".egg-info" not in path.parent.suffix
    )


@cache
def read_hash(path: Path) -> bytes:
    return hashlib.sha256(path.read_bytes()).digest()


@cache
def imported(path: Path) -> tuple[Path, ...]:
    """Files of ours that a file imports, wherever it does, with the packages that hold them."""
    found: list[Path] = []
    if path.suffix != ".py":
        return ()
    for base, names, module in _IMPORT.findall(path.read_text()):
        parent = base or module
        if parent.startswith("."):
            level = len(parent) - len(parent.lstrip("."))
            folder = path.parents[level - 1]
            start = folder.joinpath(*filter(None, parent[level:].split(".")))
            found += _modules(start)
        else:
            roots = (path.parent, ROOT, SRC)
            start = next((p for root in roots for p in _places(root, parent)), SRC / "none")
            found += _modules(start)
        found += [
            child
            for name in re.findall(r"\w+", names)
            for child in _modules(start / name, exact=True)
        ]
    return tuple(dict.fromkeys(found))


def _places(root: Path, dotted: str) -> Iterator[Path]:
    place = root.joinpath(*dotted.split("."))
    if place.with_suffix(".py").is_file() or (place / "__init__.py").is_file():
        yield place


def _modules(place: Path, exact: bool = False) -> list[Path]:
    """Files of a module and, unless `exact`, of the packages that hold it, but for the outermost:
    it imports the Python API when someone asks for it.
    """
    found = [place.with_suffix(".py"), place / "__init__.py"]
    if not exact:
        found += [folder / "__init__.py" for folder in place.parents if SRC in folder.parents[1:]]
    return [file for file in found if file.is_file()]


@cache
def beside_code(folder: Path) -> tuple[Path, ...]:
    """Files in a folder and in its folders without Python that are no code but may be read by it:
    sources in C, templates, tables.
    """
    if folder in (HERE, SRC):
        return ()
    own = [file for file in folder.iterdir() if file.is_file()]
    for child in folder.iterdir():
        if child.is_dir() and child.name != "__pycache__" and not any(child.glob("*.py")):
            own += [file for file in child.rglob("*") if file.is_file()]
    return tuple(file for file in own if file.suffix not in (".py", ".pyc", ".so"))


def fingerprints() -> dict[str, str]:
    """Of every test file under `LANES`, by its path below tests."""
    for cached in (read_hash, imported, loaded, every_file, beside_code):
        cached.cache_clear()
    return {
        str(file.relative_to(HERE)): fingerprint(file) for lane in LANES for file in files_of(lane)
    }


def unchanged() -> set[Path]:
    """Test files that have passed as they are."""
    passed = _record()["files"]
    return {HERE / name for name, found in fingerprints().items() if passed.get(name) == found}


def note(found: dict[str, str], run: set[str], failed: set[str], every: bool) -> None:
    """Write down which files have passed, and the fingerprints with which they did.

    Args:
        found: fingerprints of the files under `LANES`, by path below tests.
        run: files whose tests were run, by path.
        failed: those with a failure.
        every: no test has failed.
    """
    earlier = _record()
    kept = {name: was for name, was in earlier["files"].items() if name in found}
    record = {**earlier, "files": kept}
    for name, now in found.items():
        if f"tests/{name}" in failed:
            kept.pop(name, None)
        elif f"tests/{name}" in run:
            kept[name] = now
    if every and run >= {f"tests/{name}" for name in found}:
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=HERE, capture_output=True, text=True
        )
        record |= {"passed": f"{datetime.now(UTC):%Y-%m-%d}", "commit": commit.stdout.strip()}
    FILE.write_text(json.dumps(record, indent=2) + "\n")


def _record() -> dict[str, Any]:
    return json.loads(FILE.read_text()) if FILE.is_file() else {"files": {}}


def main() -> None:
    record = _record()
    if "passed" not in record:
        print("make test-all has not passed yet")
        return
    files, same = len(fingerprints()), len(unchanged())
    print(
        f"make test-all passed last on {record['passed']}, at {record['commit']}; {same} of the"
        f" {files} test files of tests/lanes.py have not changed since, nor has what they test"
    )


if __name__ == "__main__":
    main()
