"""Rows of a long job, written in numbered blocks and joined at the end. No torch.

    FOLDER/block-000012.jsonl    rows of one block, then a line with its counts and a hash of all

A block is on the disk whole or not at all, so a process that dies loses at most the block that it
was working on. The last line shows whether a block is intact. Equal rows give equal bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..errors import UserError
from .durable import disk_errors, faultpoint, fsync_path

_NAME = re.compile(r"block-(\d{6,})\.jsonl")


def write_block(
    folder: Path, number: int, rows: Iterable[Mapping[str, Any]], counts: Mapping[str, int]
) -> None:
    """Write a block, in place of an earlier one with this number.

    Args:
        folder: folder of the blocks. Created if missing.
        number: number of the block, from 0.
        rows: values of JSON, as `read_rows` returns them.
        counts: numbers to record with the block, such as dropped rows by reason.

    Raises:
        UserError: the disk refuses the write.
        ValueError, TypeError: a row holds a number that is not finite, a lone surrogate, or a value
            that JSON does not have. Nothing is written.
    """
    body = b"".join(_line(row) for row in rows)
    with disk_errors(f"cannot write {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
    _write_atomic(_path(folder, number), [body, _end(body, counts)])


def done_blocks(folder: Path) -> dict[int, dict[str, int]]:
    """Counts of every intact block by its number, in order.

    Blocks that are missing or damaged are left out: write them again.
    """
    if not folder.is_dir():
        return {}
    names = (_NAME.fullmatch(path.name) for path in folder.iterdir())
    found = {number: _read(folder, number) for number in sorted(int(n[1]) for n in names if n)}
    return {number: block[1] for number, block in found.items() if block}


def read_rows(folder: Path, count: int) -> Iterator[dict[str, Any]]:
    """The rows of blocks 0 to count - 1, in order. One block is in memory at a time.

    Raises:
        UserError: a block is missing or damaged.
    """
    for body in _bodies(folder, count):
        for line in body.splitlines():
            yield json.loads(line)


def join(folder: Path, count: int, target: Path) -> str:
    """Write the rows of blocks 0 to count - 1 to one file, atomically.

    Returns:
        The SHA-256 of the file, in hexadecimal.

    Raises:
        UserError: a block is missing or damaged, or the disk refuses the write.
    """
    return _write_atomic(target, _bodies(folder, count))


def _path(folder: Path, number: int) -> Path:
    return folder / f"block-{number:06d}.jsonl"


def _line(value: Mapping[str, Any]) -> bytes:
    # The order of keys stays: chat templates print the tools of a prompt in their order.
    return json.dumps(value, ensure_ascii=False, allow_nan=False).encode() + b"\n"


def _end(body: bytes, counts: Mapping[str, int]) -> bytes:
    """The last line of a block with these rows."""
    return _line(
        {"counts": dict(counts), "sha256": hashlib.sha256(body + _line(counts)).hexdigest()}
    )


def _read(folder: Path, number: int) -> tuple[bytes, dict[str, int]] | None:
    """Rows and counts of a block. None if it is missing or damaged."""
    path = _path(folder, number)
    if not path.is_file():
        return None
    with disk_errors(f"cannot read {path}"):
        data = path.read_bytes()
    start = data[:-1].rfind(b"\n") + 1
    try:
        counts = json.loads(data[start:])["counts"]
        intact = data[start:] == _end(data[:start], counts)
    except (ValueError, TypeError, KeyError):
        return None
    return (data[:start], counts) if intact else None


def _bodies(folder: Path, count: int) -> Iterator[bytes]:
    for number in range(count):
        block = _read(folder, number)
        if block is None:
            raise UserError(
                f"{_path(folder, number)} is missing or damaged: resume the run, which makes it"
                " again"
            )
        yield block[0]


def _write_atomic(path: Path, parts: Iterable[bytes]) -> str:
    """Write a file so that a reader, or a crash, sees the old file or the new one.

    Returns:
        The SHA-256 of its contents.
    """
    # Always the same name: what a killed process has left is overwritten, and does not pile up.
    partial = path.with_name(f".{path.name}.partial")
    digest = hashlib.sha256()
    with disk_errors(f"cannot write {path}"):
        try:
            with partial.open("wb") as file:
                for part in parts:
                    file.write(part)
                    digest.update(part)
                    faultpoint("blocks.part")
            fsync_path(partial)
            faultpoint("blocks.written")
            os.replace(partial, path)
            faultpoint("blocks.renamed")
            fsync_path(path.parent)
        finally:
            partial.unlink(missing_ok=True)
    return digest.hexdigest()
