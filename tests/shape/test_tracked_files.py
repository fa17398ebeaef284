"""What the repository holds: text, and few large or binary files."""

from __future__ import annotations

import subprocess
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
MOST_BYTES = 500_000
HOLD_BINARIES = ("docs/", "tests/data/")


def test_no_large_file_and_no_binary_outside_docs_and_data() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    files = [name for name in listed.stdout.decode().split("\0") if (ROOT / name).is_file()]
    assert "pyproject.toml" in files
    assert [name for name in files if (ROOT / name).stat().st_size > MOST_BYTES] == []
    binary = [name for name in files if b"\0" in (ROOT / name).read_bytes()[:8192]]
    assert [name for name in binary if not name.startswith(HOLD_BINARIES)] == []


def test_no_two_test_modules_have_one_name() -> None:
    """Outside packages pytest imports a file by its name alone, so the second one is an error, but
    only for a worker that meets both.
    """
    files = [f for f in (ROOT / "tests").rglob("*.py") if not (f.parent / "__init__.py").exists()]
    names = Counter(file.name for file in files if file.name != "conftest.py")
    assert names["test_tracked_files.py"] == 1
    assert [name for name, times in names.items() if times > 1] == []
