"""Runs tests of compiled kernels once more, on a copy that the compiler has made to check every
access to memory and every operation.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
import pytest
from sixfold.kernels.cpu import engine_kernels as cpu_kernels
cpu_kernels.FLAGS = (
    "-O1", "-g", "-march=native", "-fPIC", "-w",
    "-fsanitize=address,undefined", "-fno-sanitize-recover=all",
)
options = ["-x", "--noconftest", "-p", "no:cacheprovider"]
sys.exit(pytest.main([*options, "-k", *sys.argv[1:]]))
"""


def run_sanitized(chosen: str, library: str, folder: Path, *test_files: str) -> None:
    """chosen: which tests, as pytest's -k. library: what their kernels' file is called. Skips where
    the compiler has no sanitizers.
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
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, chosen, *test_files],
        env=environment,
        cwd=root,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[:2000]
    assert (
        " passed" in done.stdout
        and b"asan" in next(folder.glob(f"sixfold/{library}-*.so")).read_bytes()
    )


def _output(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
