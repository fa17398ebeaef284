"""The measured hardware file: where it is, and what happens if it is missing or wrong."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sixfold.errors import UserError
from sixfold_planning.hardware import Accelerator, Cluster
from sixfold_planning.hardware_file import (
    hardware_text,
    measured_hardware,
    measured_path,
    read_hardware,
)
from sixfold_planning.measured_rates import CostTable, MeasuredRates

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


def test_measured_file_is_a_hardware_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    measured_path().parent.mkdir()
    measured_path().write_text(FILE)
    assert measured_hardware() == read_hardware(measured_path())
    measured_path().write_text("name = ")
    with pytest.raises(UserError, match=r"hardware\.toml is not TOML"):
        measured_hardware()


MEASURED = MeasuredRates(
    dtype="fp32",
    decode=CostTable((1, 16), (1e-4, 2e-4), (3e-5, 4e-5), (1e-11, 2e-11), (0.0, 1e-10)),
    prefill=CostTable((64,), (1e-3,), (0.0,), (1e-11,), (3e-10,)),
    score=CostTable((64,), (2e-3,), (0.0,), (1e-11,), (3e-10,)),
    train=CostTable((64, 2048), (5e-3, 6e-3), (0.0, 1e-3), (1e-11, 1e-11), (3e-10, 2e-9)),
    kv_byte_s=1.25e-10,
    shared_read=0.5,
    episode_s=5e-4,
    update_s=4e-9,
    sync_byte_s=2e-10,
    file_byte_s=3e-9,
    crowded=1.25,
    threads=1,
    cores=2,
)
HERE = Cluster(
    Accelerator('a "quoted" name', 8.5, 20, {"bf16": 0.02, "fp32": 0.1}, 10, 1, measured=MEASURED),
    1,
)


def test_written_file_reads_back_the_same(tmp_path: Path) -> None:
    path = tmp_path / "hardware.toml"
    path.write_text(hardware_text(HERE))
    found = read_hardware(path)
    assert found.device.measured == MEASURED
    source = f"hardware file {path}"
    assert found == Cluster(replace(HERE.device, price_source=source), 1)


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ('dtype = "fp32"', 'dtype = "fp64"', "measured.dtype = 'fp64' must be one of fp32, bf16"),
        ("update_s = 4e-09", "", "measured.update_s is missing"),
        ("update_s = 4e-09", "update_s = -1", "measured.update_s = -1 must be a finite number"),
        ("update_s = 4e-09", "update_s = nan", "measured.update_s = nan must be a finite number"),
        (
            "update_s = 4e-09",
            "update = 1",
            "unknown key 'measured.update'. Did you mean 'update_s'",
        ),
        ("cores = 2", "cores = 1.5", "measured.cores = 1.5 must be a whole number"),
        ("[1, 16]", "[16, 1]", "measured.decode.tokens = [16, 1] must be in ascending order"),
        ("[1, 16]", "[0, 16]", "measured.decode.tokens = [0, 16] must be a list of whole numbers"),
        ("[1, 16]", "[]", "measured.decode.tokens = [] must be a list of whole numbers"),
        ("[0.001]", "[1, 2]", "measured.prefill.call_s = [1, 2] must have as many numbers"),
        ("[0.001]", "1", "measured.prefill.call_s = 1 must be a list"),
        ("[measured.score]", "[measured.scores]", "unknown key 'measured.scores'"),
        ("[measured]", "measured = 1\n[other]", "hardware file"),
    ],
)
def test_wrong_rates_are_one_line(tmp_path: Path, old: str, new: str, named: str) -> None:
    path = tmp_path / "hardware.toml"
    path.write_text(hardware_text(HERE).replace(old, new, 1))
    with pytest.raises(UserError) as error:
        read_hardware(path)
    assert named in str(error.value) and str(path) in str(error.value)
    assert "\n" not in str(error.value)
