"""What `make` installs for which target, from a fresh clone. Nothing is installed here."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = ("Makefile", "pyproject.toml", "constraints.txt")


def installs(folder: Path, target: str) -> list[str]:
    """The pip commands that a target would run."""
    command = ["make", "-n", "-C", str(folder), target]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [line for line in said.splitlines() if "pip install" in line]


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_the_demo_installs_no_tools_of_the_tests(tmp_path: Path) -> None:
    for name in FILES:
        shutil.copy(ROOT / name, tmp_path)
    (demo,) = installs(tmp_path, "demo")
    assert demo.endswith("-e .")
    (tests,) = installs(tmp_path, "style")
    assert "dev" in tests
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "installed-demo").touch()
    assert installs(tmp_path, "demo") == []
    assert installs(tmp_path, "style") == [tests], "the tests need their tools after a demo, too"
    (tmp_path / ".venv" / "installed").touch()
    (tmp_path / ".venv" / "installed-demo").unlink()
    assert installs(tmp_path, "demo") == installs(tmp_path, "style") == []
