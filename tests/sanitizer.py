"""Runs tests of compiled kernels once more, on copies that the compiler has made to check every
access to memory and every operation.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

PROGRAM = """
import sys
import pytest
from sixfold.kernels.cpu import engine_kernels as cpu_kernels
cpu_kernels.FLAGS = (
    "-O0", "-g", "-march=native", "-fPIC", "-w",
    "-fsanitize=address,undefined", "-fno-sanitize-recover=all",
)
options = ["-x", "--noconftest", "-p", "no:cacheprovider"]
sys.exit(pytest.main([*options, "-k", *sys.argv[1:]]))
"""


def run_sanitized(chosen: Mapping[Path, str], libraries: Sequence[str], folder: Path) -> None:
    """Skips where the compiler has no sanitizers.

    Args:
        chosen: for each file of tests, the tests to run, as pytest's -k.
        libraries: names of the kernels' files.
        folder: holds the copies.
    """
    compiler = next(path for name in ("cc", "gcc", "clang") if (path := shutil.which(name)))
    runtimes = [
        Path(_output([compiler, f"-print-file-name=lib{name}.so"])) for name in ("asan", "ubsan")
    ]
    if not all(path.is_absolute() for path in runtimes):
        pytest.skip("the compiler has no sanitizers")
    environment = {
        **os.environ,
        "LD_PRELOAD": ":".join(map(str, runtimes)),
        "ASAN_OPTIONS": "detect_leaks=0",
        "XDG_CACHE_HOME": str(folder),
        "CC": compiler,
        "OMP_NUM_THREADS": "2",
    }
    root = Path(__file__).parents[1]
    names = " or ".join(f"({file.stem} and ({which}))" for file, which in chosen.items())
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, names, *map(str, chosen)],
        env=environment,
        cwd=root,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[:2000]
    assert " passed" in done.stdout
    for library in libraries:
        (made,) = folder.glob(f"sixfold/{library}-*.so")
        assert b"asan" in made.read_bytes()


def _output(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
