"""The measured hardware file: where it is, and what happens if it is missing or wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from sixfold.errors import UserError
from sixfold.planning.hardware_file import read_hardware
from sixfold.planning.measured import measured_hardware, measured_path

FILE = """\
name = "this machine"
memory_gb = 8
bandwidth_gb_s = 20
link_gb_s = 10
network_gb_s = 1
[peak_tflops]
bf16 = 0.1
"""


def test_measured_file_is_in_the_cache_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """XDG base directory specification: empty and relative values count as unset."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert measured_path() == tmp_path / "cache/sixfold/hardware.toml"
    for unset in ("", "cache"):
        monkeypatch.setenv("XDG_CACHE_HOME", unset)
        assert measured_path() == tmp_path / ".cache/sixfold/hardware.toml"


def test_machine_that_was_not_measured_gives_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert measured_hardware() is None
    assert measured_hardware(tmp_path / "other.toml") is None


def test_measured_file_is_a_hardware_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    measured_path().parent.mkdir()
    measured_path().write_text(FILE)
    assert measured_hardware() == read_hardware(measured_path())
    measured_path().write_text("name = ")
    with pytest.raises(UserError, match=r"hardware\.toml is not TOML"):
        measured_hardware()
