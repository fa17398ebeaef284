"""`python -m sixfold` is the command `sixfold`."""

from __future__ import annotations

import subprocess
import sys


def test_the_module_runs_as_the_command_does() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "sixfold", "nonsense"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and "nonsense" in done.stderr and "Traceback" not in done.stderr
