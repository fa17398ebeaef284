"""Accelerators: memory, bandwidth, peak arithmetic, interconnect and price."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import resources
from typing import TYPE_CHECKING, Any

from sixfold.errors import UserError, nearest

from . import checks

if TYPE_CHECKING:
    from .measured_rates import MeasuredRates


@dataclass(frozen=True)
class Accelerator:
    """One device and its connections.

    Attributes:
        memory_gb: memory, in 1e9 bytes.
        peak_tflops: dense peak by dtype: bf16, fp8, int8, fp32.
        link_gb_s: bandwidth to the other devices of a node, one direction.
        network_gb_s: bandwidth to other nodes, one direction.
        devices_per_node: devices joined by the fast link.
        power_w: power limit at which the peaks are stated.
        price_per_hour: US dollars per device and hour; None if unknown.
        price_source: seller and date of the price.
        mma_sync_tflops: bf16 peak of kernels written for older devices; None: the same as bf16.
        grouped_matmul: PyTorch has a grouped matrix product for the device (`torch._grouped_mm`,
            compute capability 9.0 up to PyTorch 2.9).
        measured: costs of Sixfold's engine and trainer on this device. None: not measured.
    """

    name: str
    memory_gb: float
    bandwidth_gb_s: float
    peak_tflops: Mapping[str, float] = field(hash=False)
    link_gb_s: float
    network_gb_s: float
    devices_per_node: int = 8
    power_w: float = 700.0
    price_per_hour: float | None = None
    price_source: str = "no price listed"
    mma_sync_tflops: float | None = None
    grouped_matmul: bool = True
    measured: MeasuredRates | None = None

    def peak(self, dtype: str) -> float:
        """Dense peak in FLOP/s. A dtype that the device lacks runs in bf16.

        A device that was measured in another dtype than bf16 has the peak of that dtype instead.
        """
        if self.measured is not None and dtype == "bf16":
            dtype = self.measured.dtype
        return self.peak_tflops.get(dtype, self.peak_tflops["bf16"]) * 1e12

    def at_power(self, watts: float) -> Accelerator:
        """The device under a lower power limit.

        Dynamic power grows with clock times voltage squared, about the cube of the clock, so the
        peaks fall with the cube root of the limit. Memory keeps its speed.
        """
        scale = min(1.0, (watts / self.power_w) ** (1 / 3))
        peaks = {dtype: rate * scale for dtype, rate in self.peak_tflops.items()}
        return replace(self, peak_tflops=peaks, power_w=watts)

    def bandwidth_between(self, devices: float) -> float:
        """Bytes/s per device in a group of `devices` neighbours: the link, or the network."""
        inside = devices <= self.devices_per_node
        return (self.link_gb_s if inside else self.network_gb_s) * 1e9


@dataclass(frozen=True)
class Cluster:
    """Equal devices.

    Raises:
        UserError: if `count` is not a whole number of at least 1.
    """

    device: Accelerator
    count: int

    def __post_init__(self) -> None:
        checks.whole(count=self.count)


REQUIRED = ("memory_gb", "bandwidth_gb_s", "link_gb_s", "network_gb_s")
OPTIONAL = ("devices_per_node", "power_w", "price_per_hour", "mma_sync_tflops")
WHOLE = ("count", "devices_per_node")
MOST_DEVICES = 9_999_999
"""As many as `--gpus` takes."""
LEAST, MOST = 1e-6, 1e12
"""Other numbers, in the units of the table, are mistakes."""


def read_device(table: dict[str, Any], name: str, where: str) -> dict[str, Any]:
    """Arguments of `Accelerator` from a table of TOML, without its price's source.

    Args:
        table: the keys of `REQUIRED`, some of `OPTIONAL`, and the table `peak_tflops`.
        where: file, for the message.

    Raises:
        UserError: if a number is missing, zero, negative or not finite. The message names the key.
    """
    peaks = table.get("peak_tflops")
    if not isinstance(peaks, dict):
        raise UserError(
            f"{where}: the table [peak_tflops] is missing. Give the dense peak in 1e12 FLOP/s, such"
            " as bf16 = 989"
        )
    check_keys(peaks, ("bf16", "fp8", "int8", "fp32"), where, "peak_tflops.")
    rates = {dtype: positive(peaks, dtype, where, "peak_tflops.") for dtype in {"bf16": 0, **peaks}}
    numbers: dict[str, Any] = {key: positive(table, key, where) for key in REQUIRED}
    numbers |= {key: positive(table, key, where) for key in OPTIONAL if key in table}
    numbers["devices_per_node"] = int(numbers.get("devices_per_node", 8))
    return {"name": name, "peak_tflops": rates, **numbers}


def check_keys(table: dict[str, Any], known: tuple[str, ...], where: str, prefix: str = "") -> None:
    """Refuse keys that are not known.

    Raises:
        UserError: names the first such key, and the nearest known one.
    """
    for key in table:
        if key not in known:
            raise UserError(
                f"{where}: unknown key '{prefix}{key}'.{nearest(key, list(known))}"
                f" Known keys: {', '.join(known)}"
            )


def positive(table: dict[str, Any], key: str, where: str, prefix: str = "") -> float:
    """A required number above 0.

    Raises:
        UserError: if it is missing, no number, or out of range. The message names the key.
    """
    value = table.get(key)
    if value is None:
        raise UserError(f"{where}: {prefix}{key} is missing")
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not (value > 0 and math.isfinite(value)):
        raise UserError(f"{where}: {prefix}{key} = {value!r} must be a finite number above 0")
    if key in WHOLE and value != int(value):
        raise UserError(f"{where}: {prefix}{key} = {value!r} must be a whole number")
    least, most = (1, MOST_DEVICES) if key in WHOLE else (LEAST, MOST)
    if not least <= value <= most:
        raise UserError(
            f"{where}: {prefix}{key} = {value!r} must be from {least:,.9g} to {most:,.9g}"
        )
    return float(value)


def _listed(name: str, table: dict[str, Any]) -> Accelerator:
    extra = {key: table.pop(key) for key in ("price_source", "grouped_matmul") if key in table}
    check_keys(table, (*REQUIRED, *OPTIONAL, "peak_tflops"), f"hardware.toml, [{name}]")
    return Accelerator(**read_device(table, name, f"hardware.toml, [{name}]"), **extra)


_FILE = resources.files("sixfold_planning") / "hardware.toml"
TABLE: Mapping[str, Accelerator] = {
    name: _listed(name, table) for name, table in tomllib.loads(_FILE.read_text("utf-8")).items()
}
"""Accelerators by name, from the data sheets that hardware.toml names."""

_ALIASES = {
    "h100pcie80gb": "H100 PCIe",
    "a6000": "RTX A6000",
    "4090": "RTX 4090",
    "v5e": "TPU v5e",
    "v5p": "TPU v5p",
}
_MEMORY_OR_FORM = re.compile(r"(sxm\d?|nvl|\d+gb|hbm\d?e?|nvidia|amd|google|geforce|instinct)")


def _key(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


_BY_KEY = {_key(name): device for name, device in TABLE.items()} | {
    alias: TABLE[name] for alias, name in _ALIASES.items()
}


def find_accelerator(name: str) -> Accelerator:
    """The accelerator of that name. Case, spaces, and words such as "SXM" or "80GB" do not matter.

    Raises:
        UserError: if the table has no such name. The message lists the nearest names.
    """
    device = _find(name)
    if device is None:
        from difflib import get_close_matches

        near = get_close_matches(_key(name), _BY_KEY, n=3, cutoff=0.4)
        names = list(dict.fromkeys(_BY_KEY[close].name for close in near)) or list(TABLE)
        raise UserError(
            f"unknown accelerator '{name}'. Nearest names: {', '.join(names)}. For another device"
            " write a hardware file and use --hardware FILE"
        )
    return device


def _find(name: str) -> Accelerator | None:
    # Whole words first: without spaces, "H100 80GB" reads as "H", and 10,080 GB.
    words = _key(re.sub(rf"\b{_MEMORY_OR_FORM.pattern}\b", " ", name.lower()))
    return _BY_KEY.get(words) or _BY_KEY.get(_MEMORY_OR_FORM.sub("", _key(name)))


def parse_cluster(text: str) -> Cluster:
    """`8xH100`, or `H100` for one device.

    Raises:
        UserError: if the count is not a positive integer, or the name is unknown.
    """
    whole = _find(text)  # also names with an x, such as RTX 4090
    if whole is not None:
        return Cluster(whole, 1)
    match = re.fullmatch(r"\s*(?:(\S+?)\s*[x*×]\s*)?(\S.*?)\s*", text)
    if not match or (match[1] is not None and not re.fullmatch(r"0*[1-9]\d{0,6}", match[1])):
        raise UserError(
            f"--gpus '{text}' is not a number of accelerators. Write COUNTxNAME, such as 8xH100"
        )
    return Cluster(find_accelerator(match[2]), int(match[1] or 1))
