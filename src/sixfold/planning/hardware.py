"""Accelerators: memory, bandwidth, peak arithmetic, interconnect and price.

Peaks are dense (without sparsity) and in 1e12 FLOP/s. Bandwidths are in 1e9 bytes/s. Link and
network bandwidths are per device and in one direction: a data sheet's "900 GB/s NVLink" is the sum
of both directions, here 450.

Sources, by device:
    A100, A800: NVIDIA A100 80GB data sheet (2021); the A800 is an A100 with 400 GB/s of NVLink.
    H100, H200, H800: NVIDIA H100 and H200 data sheets; the H800 is an H100 with 400 GB/s of NVLink.
    H20: NVIDIA's figures as quoted by dealers (148 TFLOP/s bf16, 96 GB, 4.0 TB/s).
    B200, GB200: NVIDIA DGX B200 and GB200 NVL72 data sheets; peaks are half of those with sparsity.
    MI300X: AMD Instinct MI300X data sheet.
    B300, GB300: NVIDIA DGX B300 and GB300 NVL72 data sheets, 800 Gb/s per device.
    H100 PCIe: NVIDIA H100 data sheet; the link is PCIe 5.0.
    V100: NVIDIA V100 SXM2 data sheet; it has no bf16, so its peak is that of fp16.
    L4, L40S, RTX A6000, RTX 4090: NVIDIA data sheets and the Ada whitepaper. The 4090's bf16 peak
        is the one with fp32 accumulation, half of the advertised one.
    TPU v5e, v5p: cloud.google.com/tpu/docs/v5e and /v5p. "Node" means pod: all chips share the ICI.
    network: one 400 Gb/s card per device (DGX H100, H20, MI300X), 200 Gb/s for A100, and 100 Gb/s
        per host for the others, which have no reference design.
    mma_sync: rate of the instruction `mma.sync`, which kernels older than the device use. Hopper:
        62.9 % of the peak (Luo et al., arXiv:2402.13499). Blackwell: Ampere's 1024 products per
        clock and multiprocessor, times 148 multiprocessors at 1.85 GHz.
    price: US dollars per device and hour, on demand. RunPod's list of 2026-03 as quoted by
        deploybase.ai/articles/best-gpu-for-llm-training; MI300X: RunPod's list of 2025; TPU:
        Google Cloud's list price of 2025 (us-central). Sellers differ by a factor of 2.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ..errors import UserError

if TYPE_CHECKING:
    from .measured_rates import MeasuredRates

_RUNPOD = "RunPod on demand, 2026-03"
_GOOGLE = "Google Cloud list price, 2025"
_NO_PRICE = "no price listed"


@dataclass(frozen=True)
class Accelerator:
    """One device and its connections.

    Attributes:
        name: name in the table.
        memory_gb: memory, in 1e9 bytes.
        bandwidth_gb_s: bandwidth of that memory.
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
    price_source: str = _NO_PRICE
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

    Attributes:
        device: the accelerator.
        count: number of devices.
    """

    device: Accelerator
    count: int


_HOPPER = {"bf16": 989.4, "fp8": 1978.9, "int8": 1978.9, "fp32": 66.9}
_AMPERE = {"bf16": 312.0, "int8": 624.0, "fp32": 19.5}

_H100 = Accelerator(
    "H100", 80, 3350, _HOPPER, 450, 50, 8, 700, 2.69, _RUNPOD, mma_sync_tflops=622.3
)
_A100 = Accelerator("A100", 80, 2039, _AMPERE, 300, 25, 8, 400, 1.39, _RUNPOD, grouped_matmul=False)
_B200 = Accelerator(
    "B200", 180, 8000, {"bf16": 2250, "fp8": 4500, "int8": 4500, "fp32": 75}, 900, 50, 8, 1000,
    5.98, _RUNPOD, mma_sync_tflops=560.8, grouped_matmul=False,
)  # fmt: skip

TABLE: Mapping[str, Accelerator] = {
    device.name: device
    for device in (
        _A100,
        _H100,
        replace(_H100, name="H200", memory_gb=141, bandwidth_gb_s=4800, price_per_hour=3.59),
        _B200,
        Accelerator(
            "MI300X", 192, 5300, {"bf16": 1307.4, "fp8": 2614.9, "int8": 2614.9, "fp32": 163.4},
            448, 50, 8, 750, 2.49, "RunPod on demand, 2025", grouped_matmul=False,
        ),
        Accelerator(
            "L4", 24, 300, {"bf16": 121, "fp8": 242.5, "int8": 242.5, "fp32": 30.3},
            32, 12.5, 8, 72, 0.44, _RUNPOD, grouped_matmul=False,
        ),
        Accelerator(
            "L40S", 48, 864, {"bf16": 362, "fp8": 733, "int8": 733, "fp32": 91.6},
            32, 12.5, 8, 350, 0.79, _RUNPOD, grouped_matmul=False,
        ),
        Accelerator(
            "RTX 4090", 24, 1008, {"bf16": 165.2, "fp8": 330.3, "int8": 660.6, "fp32": 82.6},
            32, 12.5, 8, 450, 0.34, _RUNPOD, grouped_matmul=False,
        ),
        Accelerator(
            "TPU v5e", 16, 819, {"bf16": 197, "int8": 393}, 200, 3.1, 256, 0, 1.20, _GOOGLE,
            grouped_matmul=False,
        ),
        Accelerator(
            "TPU v5p", 102, 2765, {"bf16": 459, "int8": 918}, 600, 6.25, 8960, 0, 4.20, _GOOGLE,
            grouped_matmul=False,
        ),
        # Devices of published measurements.
        replace(_A100, name="A800", link_gb_s=200, price_per_hour=None, price_source=_NO_PRICE),
        replace(_H100, name="H800", link_gb_s=200, price_per_hour=None, price_source=_NO_PRICE),
        Accelerator(
            "H20", 96, 4000, {"bf16": 148, "fp8": 296, "int8": 296, "fp32": 44}, 450, 50, 8, 400,
        ),
        replace(
            _B200, name="GB200", memory_gb=186, devices_per_node=72, power_w=1200,
            peak_tflops={"bf16": 2500, "fp8": 5000, "int8": 5000, "fp32": 80},
            price_per_hour=None, price_source=_NO_PRICE,
        ),
        replace(
            _B200, name="B300", memory_gb=288, network_gb_s=100, power_w=1100,
            price_per_hour=None, price_source=_NO_PRICE,
        ),
        replace(
            _B200, name="GB300", memory_gb=288, network_gb_s=100, devices_per_node=72, power_w=1400,
            peak_tflops={"bf16": 2500, "fp8": 5000, "int8": 5000, "fp32": 80},
            price_per_hour=None, price_source=_NO_PRICE,
        ),
        replace(
            _H100, name="H100 PCIe", bandwidth_gb_s=2000, link_gb_s=64, network_gb_s=25,
            peak_tflops={"bf16": 756.5, "fp8": 1513, "int8": 1513, "fp32": 51.2}, power_w=350,
            price_per_hour=None, price_source=_NO_PRICE, mma_sync_tflops=475.8,
        ),
        Accelerator(
            "V100", 32, 900, {"bf16": 125, "fp32": 15.7}, 150, 12.5, 8, 300, grouped_matmul=False,
        ),
        Accelerator(
            "RTX A6000", 48, 768, {"bf16": 154.8, "int8": 309.7, "fp32": 38.7}, 56, 12.5, 8, 300,
            grouped_matmul=False,
        ),
    )
}  # fmt: skip
"""Accelerators by name."""

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
