"""Blocks of rows: whole or absent, whatever kills the process. Equal rows give equal bytes."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from sixfold.errors import UserError
from sixfold.files.blocks import done_blocks, join, read_rows, write_block

KILLED = 137
ROWS = [
    [{"id": "a", "text": "ü\u2028\r\n", "n": 1.5}, {"id": "b", "tools": [{"z": 1, "a": 2}]}],
    [],
    [{"id": "c", "n": None}],
]
COUNTS = [{"kept": 2, "unsolved": 6}, {"kept": 0, "unsolved": 8}, {"kept": 1, "unsolved": 7}]


def write_all(folder: Path, numbers: range = range(3)) -> None:
    for number in numbers:
        write_block(folder, number, ROWS[number], COUNTS[number])


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def expected_file() -> bytes:
    return b"".join(
        json.dumps(row, ensure_ascii=False).encode() + b"\n" for rows in ROWS for row in rows
    )


def killed_at(point: int, action: Callable[[], object]) -> bool:
    """Run `action` in a forked child that dies at its point-th fault point. False if it ended."""
    pid = os.fork()
    if pid == 0:
        os.environ["SIXFOLD_FAULT"] = f"blocks.:{point}"
        action()
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status in (0, KILLED)
    return status == KILLED


def test_joined_blocks_hold_the_rows_in_order(tmp_path: Path) -> None:
    folder, target = tmp_path / "blocks", tmp_path / "data.jsonl"
    for number in (2, 0, 1):
        write_block(folder, number, ROWS[number], COUNTS[number])
    assert names(folder) == [f"block-00000{n}.jsonl" for n in range(3)]
    assert list(done_blocks(folder).items()) == list(enumerate(COUNTS))
    assert join(folder, 3, target) == hashlib.sha256(target.read_bytes()).hexdigest()
    assert target.read_bytes() == expected_file()
    assert list(read_rows(folder, 3)) == [row for rows in ROWS for row in rows]


def test_no_folder_has_no_blocks(tmp_path: Path) -> None:
    assert done_blocks(tmp_path / "none") == {}


def test_any_change_of_a_block_is_noticed(tmp_path: Path) -> None:
    """It is cut at every byte, and every byte of it is changed."""
    write_block(tmp_path, 0, ROWS[0], COUNTS[0])
    path = tmp_path / "block-000000.jsonl"
    whole = path.read_bytes()
    cut = [whole[:size] for size in range(len(whole))]
    flipped = [whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in range(len(whole))]
    lines = whole.splitlines(keepends=True)
    missing = [b"".join(lines[:n] + lines[n + 1 :]) for n in range(len(lines))]
    for number, damaged in enumerate((*cut, *flipped, *missing, whole + lines[0], whole * 2)):
        path.write_bytes(damaged)
        assert done_blocks(tmp_path) == {}, f"damage {number} is not noticed"
    with pytest.raises(UserError, match=r"block-000000.*damaged.*resume"):
        join(tmp_path, 1, tmp_path / "data.jsonl")
    assert names(tmp_path) == ["block-000000.jsonl"]
    write_block(tmp_path, 0, ROWS[0], COUNTS[0])
    assert path.read_bytes() == whole and done_blocks(tmp_path) == {0: COUNTS[0]}


def test_a_missing_block_is_not_skipped(tmp_path: Path) -> None:
    target = tmp_path / "data.jsonl"
    target.write_text("earlier")
    for gap in range(3):
        folder = tmp_path / str(gap)
        for number in {0, 1, 2} - {gap}:
            write_block(folder, number, ROWS[number], COUNTS[number])
        with pytest.raises(UserError, match=f"block-00000{gap}"):
            join(folder, 3, target)
    assert target.read_text() == "earlier"


def test_a_row_that_json_cannot_hold_leaves_nothing(tmp_path: Path) -> None:
    for value, error in ((float("nan"), ValueError), ("\ud800", ValueError), (b"", TypeError)):
        with pytest.raises(error):
            write_block(tmp_path, 0, [{"id": "a"}, {"value": value}], {})
        assert names(tmp_path) == []


def test_a_kill_at_every_step_loses_at_most_one_block(tmp_path: Path) -> None:
    """The next process writes what is missing. The joined file has the bytes of an undisturbed
    run, and nothing is left beside it.
    """

    def work(folder: Path) -> None:
        done = done_blocks(folder / "blocks")
        for number in range(3):
            if number not in done:
                write_block(folder / "blocks", number, ROWS[number], COUNTS[number])
        join(folder / "blocks", 3, folder / "data.jsonl")

    point, alive, seen = 0, False, set[int]()
    while not alive:
        point += 1
        folder = tmp_path / str(point)
        folder.mkdir()
        alive = not killed_at(point, lambda folder=folder: work(folder))
        done = done_blocks(folder / "blocks")
        assert list(done) == list(range(len(done)))
        seen.add(len(done))
        target = folder / "data.jsonl"
        assert not target.exists() or target.read_bytes() == expected_file()
        work(folder)
        assert target.read_bytes() == expected_file()
        assert names(folder) == ["blocks", "data.jsonl"]
        assert names(folder / "blocks") == [f"block-00000{n}.jsonl" for n in range(3)]
    assert seen == {0, 1, 2, 3}
    assert point == 3 * 4 + 5 + 1  # of a block: two parts, written, renamed; the join: three parts


def test_a_file_is_on_the_disk_before_its_name_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    replace = os.replace

    def note_fsync(descriptor: int) -> None:
        order.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)

    def note_replace(old: Path, new: Path) -> None:
        order.append("rename")
        replace(old, new)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "replace", note_replace)
    write_block(tmp_path / "blocks", 0, ROWS[0], {})
    assert order == [".block-000000.jsonl.partial", "rename", "blocks"]
