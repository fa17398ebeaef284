"""Read a hardware file: a device of your own, as TOML.

    name = "my server"
    count = 8
    memory_gb = 80
    bandwidth_gb_s = 3350
    link_gb_s = 450
    network_gb_s = 50

    [peak_tflops]
    bf16 = 989

Units are those of `hardware.Accelerator`. `devices_per_node`, `power_w`, `price_per_hour`,
`mma_sync_tflops` and further dtypes are optional; `count` is 1 by default. `sixfold plan --measure`
adds the table [measured] with the fields of `measured_rates.MeasuredRates`.
"""

from __future__ import annotations

import json
import math
import tomllib
from pathlib import Path
from typing import Any

from ..errors import UserError, nearest
from .hardware import Accelerator, Cluster
from .rates_table import rates_text, read_rates

_REQUIRED = ("memory_gb", "bandwidth_gb_s", "link_gb_s", "network_gb_s")
_OPTIONAL = ("devices_per_node", "power_w", "price_per_hour", "mma_sync_tflops")
_KEYS = ("name", "count", *_REQUIRED, *_OPTIONAL, "peak_tflops", "measured")
_WHOLE = ("count", "devices_per_node")
_MOST_DEVICES = 9_999_999  # as many as --gpus takes
_LEAST, _MOST = 1e-6, 1e12  # other numbers, in the units of the file, are mistakes
_DTYPES = ("bf16", "fp8", "int8", "fp32")


def read_hardware(path: str | Path) -> Cluster:
    """The devices that a hardware file describes.

    Raises:
        UserError: if the file cannot be read, or a number is missing, zero, negative or not finite.
            The message names the file and the key.
    """
    try:
        table = tomllib.loads(Path(path).read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise UserError(f"hardware file {path}: {error.strerror or error}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"hardware file {path} is not TOML: {error}") from None
    _check_keys(table, _KEYS, path)
    peaks = table.get("peak_tflops")
    if not isinstance(peaks, dict):
        raise UserError(
            f"hardware file {path}: the table [peak_tflops] is missing. Give the dense peak in 1e12"
            " FLOP/s, such as bf16 = 989"
        )
    _check_keys(peaks, _DTYPES, path, "peak_tflops.")
    rates = {dtype: _positive(peaks, dtype, path, "peak_tflops.") for dtype in {"bf16", *peaks}}
    numbers = {key: _positive(table, key, path) for key in _REQUIRED}
    numbers |= {key: _positive(table, key, path) for key in _OPTIONAL if key in table}
    nodes = int(numbers.pop("devices_per_node", 8))
    name = table.get("name", Path(path).stem)
    if not isinstance(name, str):
        raise UserError(f"hardware file {path}: name must be text")
    count = int(_positive(table, "count", path)) if "count" in table else 1
    device = Accelerator(
        name,
        numbers["memory_gb"],
        numbers["bandwidth_gb_s"],
        rates,
        numbers["link_gb_s"],
        numbers["network_gb_s"],
        nodes,
        power_w=numbers.get("power_w", 700.0),
        price_per_hour=numbers.get("price_per_hour"),
        price_source=f"hardware file {path}",
        mma_sync_tflops=numbers.get("mma_sync_tflops"),
        measured=read_rates(table["measured"], path) if "measured" in table else None,
    )
    return Cluster(device, count)


def hardware_text(cluster: Cluster) -> str:
    """A hardware file that `read_hardware` reads back as the same devices."""
    device = cluster.device
    lines = [f"name = {json.dumps(device.name)}", f"count = {cluster.count}"]
    lines += [f"{key} = {getattr(device, key)!r}" for key in _REQUIRED]
    optional = {key: getattr(device, key) for key in _OPTIONAL}
    lines += [f"{key} = {value!r}" for key, value in optional.items() if value is not None]
    lines += ["", "[peak_tflops]"]
    lines += [f"{dtype} = {rate!r}" for dtype, rate in device.peak_tflops.items()]
    text = "\n".join(lines) + "\n"
    return text if device.measured is None else f"{text}\n{rates_text(device.measured)}"


def _check_keys(
    table: dict[str, Any], known: tuple[str, ...], path: str | Path, prefix: str = ""
) -> None:
    for key in table:
        if key not in known:
            raise UserError(
                f"hardware file {path}: unknown key '{prefix}{key}'.{nearest(key, list(known))}"
                f" Known keys: {', '.join(known)}"
            )


def _positive(table: dict[str, Any], key: str, path: str | Path, prefix: str = "") -> float:
    value = table.get(key)
    if value is None:
        raise UserError(f"hardware file {path}: {prefix}{key} is missing")
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not (value > 0 and math.isfinite(value)):
        raise UserError(
            f"hardware file {path}: {prefix}{key} = {value!r} must be a finite number above 0"
        )
    if key in _WHOLE and value != int(value):
        raise UserError(f"hardware file {path}: {prefix}{key} = {value!r} must be a whole number")
    least, most = (1, _MOST_DEVICES) if key in _WHOLE else (_LEAST, _MOST)
    if not least <= value <= most:
        raise UserError(
            f"hardware file {path}: {prefix}{key} = {value!r} must be"
            f" from {least:,.9g} to {most:,.9g}"
        )
    return float(value)
