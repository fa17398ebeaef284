"""Table of accelerators, `8xH100`, and hardware files."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from sixfold.errors import UserError
from sixfold_planning.hardware import TABLE, Cluster, find_accelerator, parse_cluster
from sixfold_planning.hardware_file import read_hardware

# Dense bf16 TFLOP/s, GB and GB/s, from the vendors' data sheets.
SHEETS = {
    "A100": (312, 80, 2039),
    "H100": (989, 80, 3350),
    "H200": (989, 141, 4800),
    "B200": (2250, 180, 8000),
    "MI300X": (1307, 192, 5300),
    "L4": (121, 24, 300),
    "L40S": (362, 48, 864),
    "RTX 4090": (165.2, 24, 1008),
    "TPU v5e": (197, 16, 819),
    "TPU v5p": (459, 102, 2765),
}

# The same of devices without a listed price.
UNPRICED = {
    "V100": (125, 32, 900),
    "H100 PCIe": (756, 80, 2000),
    "B300": (2250, 288, 8000),
    "GB300": (2500, 288, 8000),
}

FILE = """
name = "my server"
count = 4
memory_gb = 80
bandwidth_gb_s = 3350
link_gb_s = 450
network_gb_s = 50
price_per_hour = 2.5

[peak_tflops]
bf16 = 989
fp8 = 1979
"""


@pytest.mark.parametrize("name", SHEETS)
def test_the_table_holds_the_data_sheets_numbers(name: str) -> None:
    device = find_accelerator(name)
    peak, memory, bandwidth = SHEETS[name]
    assert device.peak("bf16") == pytest.approx(peak * 1e12, rel=0.001)
    assert (device.memory_gb, device.bandwidth_gb_s) == (memory, bandwidth)
    assert device.price_per_hour is not None and 0 < device.price_per_hour < 20
    assert any(year in device.price_source for year in ("2025", "2026"))


@pytest.mark.parametrize("name", UNPRICED)
def test_devices_without_a_price_hold_the_data_sheets_numbers(name: str) -> None:
    device = find_accelerator(name)
    peak, memory, bandwidth = UNPRICED[name]
    assert device.peak("bf16") == pytest.approx(peak * 1e12, rel=0.001)
    assert (device.memory_gb, device.bandwidth_gb_s) == (memory, bandwidth)


@pytest.mark.parametrize("device", TABLE.values(), ids=str)
def test_all_numbers_are_positive_and_the_network_is_slower_than_the_link(device: object) -> None:
    found = TABLE[getattr(device, "name")]  # noqa: B009
    assert min(found.memory_gb, found.bandwidth_gb_s, *found.peak_tflops.values()) > 0
    assert 0 < found.network_gb_s < found.link_gb_s
    assert found.peak("fp8") >= found.peak("bf16")


@pytest.mark.parametrize(
    ("text", "name", "count"),
    [
        ("8xH100", "H100", 8),
        ("1xL4", "L4", 1),
        ("H100", "H100", 1),
        (" 16 x nvidia h100-sxm5-80gb ", "H100", 16),
        ("4*rtx4090", "RTX 4090", 4),
        ("rtx4090", "RTX 4090", 1),
        ("256xTPU v5e", "TPU v5e", 256),
        ("2xA100 SXM4 80GB", "A100", 2),
        ("NVIDIA H100 80GB HBM3", "H100", 1),
        ("8xNVIDIA A100-SXM4-80GB", "A100", 8),
    ],
)
def test_a_cluster_is_a_count_and_a_name(text: str, name: str, count: int) -> None:
    cluster = parse_cluster(text)
    assert (cluster.device.name, cluster.count) == (name, count)


def test_a_wrong_name_lists_the_nearest_ones() -> None:
    with pytest.raises(UserError, match="'H10O'") as error:
        find_accelerator("H10O")
    assert "H100" in str(error.value) and "--hardware" in str(error.value)
    assert "TPU v5p" not in str(error.value)


@pytest.mark.parametrize("text", ["0xH100", "-8xH100", "8.5xH100", "", "x"])
def test_a_wrong_count_is_refused(text: str) -> None:
    with pytest.raises(UserError):
        parse_cluster(text)


@pytest.mark.parametrize("count", [0, -1, 1.5])
def test_a_cluster_has_a_whole_number_of_devices(count: int) -> None:
    with pytest.raises(UserError, match=f"count = {count}"):
        Cluster(find_accelerator("H100"), count)


def test_peaks_fall_with_the_cube_root_of_the_power_limit() -> None:
    h100 = find_accelerator("H100")
    limited = h100.at_power(h100.power_w / 8)
    assert limited.peak("bf16") == pytest.approx(h100.peak("bf16") / 2)
    assert limited.bandwidth_gb_s == h100.bandwidth_gb_s
    assert h100.at_power(10_000).peak("bf16") == h100.peak("bf16")


def test_groups_larger_than_a_node_use_the_network() -> None:
    h100 = find_accelerator("H100")
    assert h100.bandwidth_between(8) == 450e9
    assert h100.bandwidth_between(9) == 50e9


def test_a_hardware_file_gives_a_cluster(tmp_path: Path) -> None:
    path = tmp_path / "server.toml"
    path.write_text(FILE)
    cluster = read_hardware(path)
    assert (cluster.device.name, cluster.count) == ("my server", 4)
    assert cluster.device.peak("fp8") == 1979e12
    assert cluster.device.peak("int8") == 989e12  # not in the file: bf16
    assert cluster.device.price_per_hour == 2.5
    assert cluster.device.devices_per_node == 8


@pytest.mark.parametrize(
    ("line", "wrong", "named"),
    [
        ("bandwidth_gb_s = 3350", "bandwidth_gb_s = 0", "bandwidth_gb_s = 0"),
        ("memory_gb = 80", "memory_gb = -80", "memory_gb = -80"),
        ("memory_gb = 80", "memory_gb = nan", "memory_gb = nan"),
        ("memory_gb = 80", 'memory_gb = "80 GB"', "memory_gb = '80 GB'"),
        ("memory_gb = 80", "memory_gb = true", "memory_gb = True"),
        ("memory_gb = 80", "", "memory_gb is missing"),
        ("memory_gb = 80", "memory_gb = 80\nmemory_bg = 80", "Did you mean 'memory_gb'"),
        ("count = 4", "count = 2.5", "count = 2.5"),
        ("count = 4", "count = 1e30", "must be from 1 to 9,999,999"),
        ("memory_gb = 80", "memory_gb = 1e-30", "must be from 1e-06 to 1e+12"),
        ("bf16 = 989", "", "peak_tflops.bf16 is missing"),
        ("bf16 = 989", "bf16 = inf", "peak_tflops.bf16 = inf"),
        ("[peak_tflops]", "[peaks]", "peaks"),
        ("[peak_tflops]", "[peak_tflops", "not TOML"),
    ],
)
def test_a_wrong_hardware_file_names_the_key(
    tmp_path: Path, line: str, wrong: str, named: str
) -> None:
    path = tmp_path / "server.toml"
    path.write_text(FILE.replace(line, wrong))
    with pytest.raises(UserError) as error:
        read_hardware(path)
    assert named in str(error.value) and str(path) in str(error.value)


def test_a_missing_hardware_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No such file"):
        read_hardware(tmp_path / "none.toml")


def test_prices_are_known_or_none() -> None:
    for device in TABLE.values():
        known = device.price_per_hour is not None
        assert known == (device.price_source != "no price listed")
        assert not known or math.isfinite(device.price_per_hour or 0)


def test_a_hardware_file_may_start_with_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "server.toml"
    path.write_text(FILE, encoding="utf-8-sig")
    assert read_hardware(path).count == 4
