"""Test files that `make test` leaves out while nothing that they test has changed.

    python tests/lanes.py              when `make test-all` passed last, and what has changed since

`make test-all` runs every test. Then it writes into lanes.json, for each test file outside `ALWAYS`
whose tests have all passed, a hash of the file and of all that it imports, directly or not. `make
test` runs the file again once the hash differs. Where that is more than `BUDGET` by the times in
seconds.json, it leaves the longest tests to `make test-all`, and says so.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import tomllib
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent
SRC = ROOT / "src"
FILE = HERE / "lanes.json"
SECONDS = HERE / "seconds.json"
BUDGET = 300.0
"""CPU seconds of tests in one daily lane, by the noted times. When every file has changed, two
cores with AVX2 only take 11 min beside the check of types, and 2.5 min more for the installation.
"""
NOTED = 0.2
"""CPU seconds from which a test is noted by itself."""

ALWAYS = ("cli", "differential", "docs", "packages", "recipes", "shape")
"""Folders of tests that are always run: commands, pages, shipped recipes and the shape of the
source, which read all of it and check the installation; and those that need the peers, which
`make differential` runs.
"""

RUN = ("src/sixfold", "src/sixfold_environments")
"""What a run may load by name: the core, rewards and environments."""
BY_NAME = {
    r"src/sixfold/run/assemble\.py": ("src/sixfold", "src/sixfold_environments"),
    r"src/sixfold/cli/__init__\.py": RUN,
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
CALLED = {
    r"""["']data["' ]|sixfold data|curation""": "src/sixfold_curation",
    r"""["']import\b|convert|interop""": "src/sixfold_interop",
    r"""["']lab\b|sixfold lab""": "src/sixfold_labs",
    r"""["']plan\b|sixfold plan|predict""": "src/sixfold_planning",
    r"""["']search\b|sixfold search""": "src/sixfold_search",
    r"""\bserve\b|[Aa]gent""": "src/sixfold_serving",
}
"""What a test says, in files of its folder, when it calls a package by the name of a command or of
a part, and the package.
"""
STARTS = "sys.executable"
STARTED = {
    "tests/devices": (*("critic", "engine", "kernels", "model", "reference", "sync", "trainer"),),
    "tests/engine": ("engine", "kernels", "model"),
    **dict.fromkeys(
        ("tests/checks", *(f"tests/environment/{name}" for name in ("code", "sandbox", "tools"))),
        ("checks", "environment", "processes"),
    ),
    "tests/processes": ("processes",),
}
"""Rooms of the core that run in the processes which tests of a folder start. Elsewhere it is `RUN`.
"""
CHECKERS = ("mypy", "ruff")
"""Tools whose settings in pyproject.toml no test depends on."""

_IMPORT = re.compile(
    r"^\s*(?:from\s+([.\w]+)\s+import\s+(\([^)]*\)|[^\n]*)|import\s+([\w.]+))", re.MULTILINE
)


def test_files() -> list[Path]:
    """The test files that are left out while they pass as they are."""
    files = sorted(HERE.rglob("test_*.py"))
    return [file for file in files if file.relative_to(HERE).parts[0] not in ALWAYS]


def fingerprint(file: Path) -> str:
    """Hash of a test file and of all files of ours that it imports, starts, loads or reads."""
    todo, found = [str(file), *map(str, _fixtures(file))], set[str]()
    while todo:
        path = todo.pop()
        if path not in found and path != str(HERE / "lanes.py"):  # which names every folder
            found.add(path)
            todo += imported(path)
    folders = {folder for path in found for folder in loaded(path)}
    files = found | {str(ROOT / "constraints.txt")}
    for folder in {path.rpartition("/")[0] for path in found}:
        files.update(beside_code(folder))
    digest = hashlib.sha256("".join(map(folder_hash, sorted(folders))).encode())
    digest.update(installation().encode())
    digest.update(" ".join(recipes()).encode())
    files |= named_recipes(found)
    for path in sorted(files):
        digest.update(path.removeprefix(str(ROOT)).encode() + read_hash(path))
    return digest.hexdigest()[:16]


def named_recipes(paths: set[str]) -> set[str]:
    """Files of the shipped recipes whose names these files have as a word, and of those that such a
    recipe names in turn.
    """
    found: set[str] = set()
    while paths:
        said = frozenset[str]().union(*map(words, paths))
        paths = {file for name, files in recipes().items() if name in said for file in files}
        paths -= found
        found |= paths
    return found


@cache
def recipes() -> dict[str, list[str]]:
    """Files of shipped recipes, and of folders beside them, by name."""
    return {
        entry.stem: [str(file) for file in every_file(f"recipes/{entry.name}")] or [str(entry)]
        for entry in sorted((ROOT / "recipes").glob("*"))
        if entry.name != "__pycache__"
    }


@cache
def words(path: str) -> frozenset[str]:
    return frozenset(re.findall(r"\w+", Path(path).read_text(errors="ignore")))


@cache
def installation() -> str:
    """What pyproject.toml says to an installation and to the tests."""
    found = tomllib.loads((ROOT / "pyproject.toml").read_text())
    tools = {name: said for name, said in found.get("tool", {}).items() if name not in CHECKERS}
    return json.dumps(found | {"tool": tools}, sort_keys=True)


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
def loaded(path: str) -> tuple[str, ...]:
    """Folders whose files a file may load by name, start or read."""
    name = path.removeprefix(f"{ROOT}/")
    found = [
        folder for key, folders in BY_NAME.items() for folder in folders if re.match(key, name)
    ]
    if path == str(HERE / "conftest.py"):  # which names folders to order the tests
        return tuple(found)
    if path.startswith(f"{HERE}/") and path.endswith(".py"):
        text = Path(path).read_text()
        if STARTS in text:
            rooms = STARTED.get(name.rpartition("/")[0])
            found += [f"src/sixfold/{room}" for room in rooms] if rooms else RUN
        said = MENTIONED if name.count("/") == 1 else MENTIONED | CALLED
        found += [folder for key, folder in said.items() if re.search(key, text)]
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
def folder_hash(folder: str) -> str:
    """Hash of the names and contents of `every_file`."""
    digest = hashlib.sha256()
    for path in map(str, every_file(folder)):
        digest.update(path.removeprefix(str(ROOT)).encode() + read_hash(path))
    return digest.hexdigest()


@cache
def read_hash(path: str) -> bytes:
    return hashlib.sha256(Path(path).read_bytes()).digest()


@cache
def imported(path: str) -> tuple[str, ...]:
    """Files of ours that a file imports, wherever it does, with the packages that hold them."""
    found: list[str] = []
    if not path.endswith(".py"):
        return ()
    folder = path.rpartition("/")[0]
    for base, names, module in _IMPORT.findall(Path(path).read_text()):
        parent = base or module
        if parent.startswith("."):
            level = len(parent) - len(parent.lstrip("."))
            start = "/".join([*folder.split("/")[: 1 - level or None], *_parts(parent[level:])])
        else:
            places = ("/".join([str(root), *_parts(parent)]) for root in (folder, ROOT, SRC))
            start = next((place for place in places if _modules(place, exact=True)), "")
        found += _modules(start)
        for name in re.findall(r"\w+", names):
            found += _modules(f"{start}/{name}", exact=True)
    return tuple(dict.fromkeys(found))


def _parts(dotted: str) -> list[str]:
    return [part for part in dotted.split(".") if part]


def _modules(place: str, exact: bool = False) -> list[str]:
    """Files of a module and, unless `exact`, of the packages that hold it, but for the outermost:
    it imports the Python API when someone asks for it.
    """
    found = [f"{place}.py", f"{place}/__init__.py"]
    if not exact and place.startswith(f"{SRC}/"):
        parts = place.removeprefix(f"{SRC}/").split("/")
        found += ["/".join([str(SRC), *parts[:n], "__init__.py"]) for n in range(2, len(parts))]
    return [file for file in found if file in _python_files()]


@cache
def _python_files() -> frozenset[str]:
    folders = ("src", "tests", "recipes", "benchmarks", "docs")
    return frozenset(str(file) for name in folders for file in (ROOT / name).rglob("*.py"))


@cache
def beside_code(folder: str) -> tuple[str, ...]:
    """Files in a folder and in its folders without Python that are no code but may be read by it:
    sources in C, templates, tables.
    """
    place = Path(folder)
    if place in (HERE, SRC):
        return ()
    own = [file for file in place.iterdir() if file.is_file()]
    for child in place.iterdir():
        if child.is_dir() and child.name != "__pycache__" and not any(child.glob("*.py")):
            own += [file for file in child.rglob("*") if file.is_file()]
    return tuple(str(file) for file in own if file.suffix not in (".py", ".pyc", ".so"))


def forget() -> None:
    """Read all files anew."""
    files = (_python_files, read_hash, folder_hash, every_file, beside_code)
    for cached in (*files, imported, loaded, recipes, words, installation):
        cached.cache_clear()


def fingerprints() -> dict[str, str]:
    """Of every one of `test_files`, by its path below tests."""
    forget()
    return {str(file.relative_to(HERE)): fingerprint(file) for file in test_files()}


def unchanged() -> set[Path]:
    """Test files that have passed as they are."""
    passed = _record()["files"]
    return {HERE / name for name, found in fingerprints().items() if passed.get(name) == found}


def note(found: dict[str, str], run: set[str], failed: set[str], every: bool) -> None:
    """Write down which files have passed, and the fingerprints with which they did.

    Args:
        found: what `fingerprints` gave before the tests.
        run: files whose tests were run, by path.
        failed: those with a failure.
        every: no test of this run has failed.
    """
    earlier = _record()
    kept = {name: was for name, was in earlier["files"].items() if name in found}
    record = {**earlier, "files": kept}
    for name, now in found.items():
        if f"tests/{name}" in failed:
            kept.pop(name, None)
        elif f"tests/{name}" in run:
            kept[name] = now
    if every and kept == found:
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=HERE, capture_output=True, text=True
        )
        record |= {"passed": f"{datetime.now(UTC):%Y-%m-%d}", "commit": commit.stdout.strip()}
    FILE.write_text(json.dumps(record, indent=2) + "\n")


def postponed(passed: set[Path]) -> list[str]:
    """The longest tests outside `ALWAYS`, as many as the other files exceed `BUDGET` by.

    Args:
        passed: test files that are left out anyway.
    """
    if not SECONDS.is_file():
        return []
    noted = json.loads(SECONDS.read_text())
    files = {name for name in noted["files"] if ROOT / name not in passed}
    left, found = sum(noted["files"][name] for name in files), []
    for name, seconds in sorted(noted["tests"].items(), key=lambda test: -test[1]):
        file = name.partition("::")[0]
        if left > BUDGET and file in files and file.split("/")[1] not in ALWAYS:
            found.append(name)
            left -= seconds
    return found


def note_seconds(files: Mapping[str, float], tests: Mapping[str, float]) -> None:
    """Write down CPU seconds: of every file, and of tests from `NOTED`, the longest first."""
    longest = {
        kind: {
            name: round(seconds, 1)
            for name, seconds in sorted(found.items(), key=lambda item: (-item[1], item[0]))
            if seconds >= least
        }
        for kind, found, least in (("files", files, 0.05), ("tests", tests, NOTED))
    }
    SECONDS.write_text(json.dumps(longest, indent=2) + "\n")


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
