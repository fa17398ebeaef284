"""The command ends when its work is done, whatever threads user code has left."""

from __future__ import annotations

import subprocess
import sys

import pytest

LEAVES = """
import sys, threading
from sixfold import cli
cli.END_S = 0.2
threading.Thread(target=threading.Event().wait, name="board").start()
sys.argv = ["sixfold", *sys.argv[1:]]
raise SystemExit(cli.main())
"""

ENDS = """
import atexit, sys, threading, time
from sixfold import cli
cli.END_S = 60.0
atexit.register(lambda: print("handlers run"))
threading.Thread(target=time.sleep, args=(0.1,)).start()
sys.argv = ["sixfold", "--version"]
raise SystemExit(cli.main())
"""


@pytest.mark.parametrize(("words", "code"), [(["--version"], 0), (["nope"], 2)])
def test_a_thread_that_never_ends_does_not_hold_the_command(words: list[str], code: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LEAVES, *words], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == code
    assert "board" in done.stderr and "daemon=True" in done.stderr


def test_a_thread_that_ends_is_awaited() -> None:
    done = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "handlers run"
    assert done.stderr == ""
