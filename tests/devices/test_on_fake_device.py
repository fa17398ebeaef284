"""Run every `cases_*.py` of this folder on the fake device, in processes of their own.

Registering a device changes PyTorch for the rest of the process, so these cases must not run beside
other tests. To run them by hand, or one of them:

    python -m pytest -o python_files='cases_*.py' tests/devices -k NAME
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
QUICK = [HERE / "cases_device.py", HERE / "cases_engine.py"]
OTHERS = sorted(set(HERE.glob("cases_*.py")) - set(QUICK))


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("files", [QUICK, OTHERS], ids=["device and engine", "others"])
def test_cases_pass_on_the_fake_device(files: list[Path], tmp_path: Path) -> None:
    pytest.importorskip(
        "torch", "2.13", reason="the fake device needs the Python backend of torch 2.13"
    )
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-o",
        "python_files=cases_*.py",
    ]
    done = subprocess.run(
        [*command, "--basetemp", str(tmp_path / "cases"), *map(str, files)],
        capture_output=True,
        text=True,
        timeout=1800,
        env={**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"},
        cwd=HERE.parents[1],
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
