"""Several commands in one new interpreter: its start takes longer than most of them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

BETWEEN = "---- code"
PROGRAM = f"""
import shlex, sys
from sixfold.cli import main
for line in sys.argv[1:]:
    try:
        code = main(shlex.split(line))
    except SystemExit as end:
        code = end.code
    print("{BETWEEN}", code)
"""


def outputs(
    environment: Mapping[str, str], folder: Path, commands: Sequence[str]
) -> list[tuple[int, str]]:
    """Exit code and text (standard output and error) of `sixfold COMMAND`, for each command."""
    done = subprocess.run(
        [sys.executable, "-u", "-c", PROGRAM, *commands],
        env=environment,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    found, text = [], ""
    for line in done.stdout.splitlines(keepends=True):
        if line.startswith(BETWEEN):
            found.append((int(line.removeprefix(BETWEEN)), text))
            text = ""
        else:
            text += line
    assert len(found) == len(commands), done.stdout
    return found
