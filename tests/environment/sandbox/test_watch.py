"""What a watch counts as memory while the processes of a job come and go."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from sixfold_environments.sandbox import watch
from sixfold_environments.sandbox.watch import Watch

LIMITS = {
    "began": 0.0,
    "wall_s": 60.0,
    "memory_bytes": 256 << 20,
    "processes": 64,
    "files": 1e12,  # of the whole disk here
}


def process(proc: Path, pid: int, resident_mb: int, share_mb: int | None) -> None:
    """Files of a process. Without a share it hides its part of shared pages."""
    folder = proc / str(pid)
    (folder / "fd").mkdir(parents=True)
    (folder / "status").write_text(f"Name:\tx\nRssAnon:\t{resident_mb << 10} kB\n")
    if share_mb is not None:
        (folder / "smaps_rollup").write_text(f"Pss_Anon:\t{share_mb << 10} kB\n")


def verdict(proc: Path, scratch: Path) -> str:
    folders = [os.open(path, os.O_RDONLY | os.O_DIRECTORY) for path in (proc, scratch)]
    watched = Watch(LIMITS, folders)
    try:
        return (watched.exceeded(1.0) or ("",))[0]
    finally:
        watched.close()


@pytest.mark.parametrize(("share_mb", "expected"), [(25, ""), (80, "out_of_memory")])
def test_shared_pages_count_once(tmp_path: Path, share_mb: int, expected: str) -> None:
    for pid in range(2, 6):
        process(tmp_path / "proc", pid, 100, share_mb)
    assert verdict(tmp_path / "proc", tmp_path) == expected


def test_a_process_that_hides_its_part_counts_whole(tmp_path: Path) -> None:
    for pid in range(2, 6):
        process(tmp_path / "proc", pid, 100, None)
    assert verdict(tmp_path / "proc", tmp_path) == "out_of_memory"


def test_processes_that_end_between_two_reads_do_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for pid in range(2, 6):
        process(tmp_path / "proc", pid, 100, 50)
    read = watch._read

    def read_and_end(folder: int, path: str) -> bytes:
        content = read(folder, path)
        pid, _, name = path.partition("/")
        if name == "status" and pid != "2":
            shutil.rmtree(tmp_path / "proc" / pid, ignore_errors=True)
        return content

    monkeypatch.setattr(watch, "_read", read_and_end)
    assert not verdict(tmp_path / "proc", tmp_path)


def test_a_fork_between_two_reads_counts_nothing_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parent is read before the fork, its child after it: for once the sum is too large."""
    for pid in range(2, 4):
        process(tmp_path / "proc", pid, 200, 100)
    read = watch._read
    reads: list[str] = []

    def read_before_the_fork(folder: int, path: str) -> bytes:
        reads.append(path)
        if path == "2/smaps_rollup" and reads.count(path) == 1:
            return b"Pss_Anon:\t%d kB\n" % (200 << 10)
        return read(folder, path)

    monkeypatch.setattr(watch, "_read", read_before_the_fork)
    assert not verdict(tmp_path / "proc", tmp_path)
    assert reads.count("2/smaps_rollup") == 2
