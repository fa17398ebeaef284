"""Files that gain lines keep all of them, whatever another program does to the file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sixfold.errors import UserError
from sixfold.files.appended import AppendedFile


@pytest.fixture
def warnings() -> list[str]:
    return []


@pytest.fixture
def file(tmp_path: Path, warnings: list[str]) -> AppendedFile:
    (tmp_path / "lines").write_text("0\n")
    file = AppendedFile(tmp_path / "lines", warnings.append)
    file.append(b"1\n")
    return file


def test_a_deleted_file_is_complete_after_the_next_line(
    file: AppendedFile, tmp_path: Path, warnings: list[str]
) -> None:
    for line in (b"2\n", b"3\n"):
        (tmp_path / "lines").unlink()
        file.append(line)
    assert (tmp_path / "lines").read_text() == "0\n1\n2\n3\n"
    assert len(warnings) == 2 and "deleted" in warnings[0]
    (tmp_path / "lines").unlink()
    file.append(b"")
    assert (tmp_path / "lines").read_text() == "0\n1\n2\n3\n"


def test_a_renamed_file_is_written_again_and_the_renamed_one_stays(
    file: AppendedFile, tmp_path: Path
) -> None:
    os.rename(tmp_path / "lines", tmp_path / "old")
    file.append(b"2\n")
    assert (tmp_path / "old").read_text() == "0\n1\n"
    assert (tmp_path / "lines").read_text() == "0\n1\n2\n"


def test_a_file_that_replaces_it_is_kept_under_another_name(
    file: AppendedFile, tmp_path: Path, warnings: list[str]
) -> None:
    (tmp_path / "new").write_text("edited\n")
    os.replace(tmp_path / "new", tmp_path / "lines")
    file.append(b"2\n")
    assert (tmp_path / "lines").read_text() == "0\n1\n2\n"
    assert (tmp_path / "replaced-lines").read_text() == "edited\n"
    assert "replaced-lines" in warnings[0]


def test_a_file_that_was_cut_says_so_and_no_line_joins_a_half(
    file: AppendedFile, tmp_path: Path, warnings: list[str]
) -> None:
    os.truncate(tmp_path / "lines", 3)  # "0\n1"
    file.append(b"2\n")
    assert (tmp_path / "lines").read_text() == "0\n2\n"
    assert len(warnings) == 1 and "2 bytes" in warnings[0]


def test_a_write_that_fails_leaves_no_half_line(
    file: AppendedFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write

    def full(descriptor: int, data: bytes) -> int:
        if len(data) < 5:
            raise OSError(28, "No space left on device")
        return write(descriptor, data[:3])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(UserError, match="no space left"):
            file.append(b"12345\n")
    file.append(b"2\n")
    assert (tmp_path / "lines").read_text() == "0\n1\n2\n"


def test_a_missing_folder_is_an_error_and_does_not_appear_again(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    file = AppendedFile(tmp_path / "run" / "lines", lambda text: None)
    (tmp_path / "run" / "lines").unlink()
    (tmp_path / "run").rmdir()
    with pytest.raises(UserError, match="cannot write"):
        file.append(b"1\n")
    file.close()
    assert not (tmp_path / "run").exists()
