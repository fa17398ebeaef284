"""Hardware files: a device of the user's own, or this machine as it was measured.

    name = "my server"
    count = 8
    memory_gb = 80
    bandwidth_gb_s = 3350
    link_gb_s = 450
    network_gb_s = 50

    [peak_tflops]
    bf16 = 989

Units are those of `hardware.Accelerator`. `devices_per_node`, `power_w`, `price_per_hour`,
`mma_sync_tflops` and further dtypes are optional; `count` is 1 by default.

`sixfold plan --measure` adds costs of engine and trainer, the fields of
`measured_rates.MeasuredRates`:

    [measured]
    dtype = "fp32"
    kv_byte_s = 1.0e-10
    shared_read = 0.3
    episode_s = 4.0e-4
    update_s = 1.2e-9
    sync_byte_s = 2.1e-10
    file_byte_s = 3.0e-9
    crowded = 1.1
    threads = 1                 # 0: a GPU
    cores = 2

    [measured.train]            # also decode, prefill and score
    tokens = [64, 512]
    call_s = [1.0e-3, 1.0e-3]   # also layer_s, flop_s and number_s: one cost for each of tokens
"""

from __future__ import annotations

import json
import math
import os
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

from sixfold.errors import UserError

from .hardware import OPTIONAL, REQUIRED, Accelerator, Cluster, check_keys, positive, read_device
from .measured_rates import CostTable, MeasuredRates

DTYPES = ("fp32", "bf16")
TABLES = ("decode", "prefill", "score", "train")
COSTS = (
    *("kv_byte_s", "shared_read", "episode_s", "update_s", "sync_byte_s", "file_byte_s"),
    "crowded",
)
COUNTS = ("threads", "cores")
_KEYS = ("name", "count", *REQUIRED, *OPTIONAL, "peak_tflops", "measured")


def measured_path() -> Path:
    """Where the measured hardware file is: `sixfold/hardware.toml` in the user's cache folder.

    The cache folder is `$XDG_CACHE_HOME`, or `~/.cache` if that is empty or a relative path, as the
    XDG base directory specification asks.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not cache.is_absolute():
        cache = Path.home() / ".cache"
    return cache / "sixfold" / "hardware.toml"


def measured_hardware() -> Cluster | None:
    """This machine as `sixfold plan --measure` found it. None: it was not measured.

    Raises:
        UserError: if the file cannot be read or is not a hardware file.
    """
    path = measured_path()
    return read_hardware(path) if path.exists() else None


def read_hardware(path: str | Path) -> Cluster:
    """The devices that a hardware file describes.

    Raises:
        UserError: if the file cannot be read, or a number is missing, zero, negative or not finite.
            The message names the file and the key.
    """
    where = f"hardware file {path}"
    try:
        table = tomllib.loads(Path(path).read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise UserError(f"{where}: {error.strerror or error}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{where} is not TOML: {error}") from None
    check_keys(table, _KEYS, where)
    name = table.get("name", Path(path).stem)
    device = read_device(table, name, where)
    if not isinstance(name, str):
        raise UserError(f"{where}: name must be text")
    count = int(positive(table, "count", where)) if "count" in table else 1
    measured = _rates(table["measured"], where) if "measured" in table else None
    return Cluster(Accelerator(**device, price_source=where, measured=measured), count)


def hardware_text(cluster: Cluster) -> str:
    """A hardware file that `read_hardware` reads back as the same devices."""
    device, rates = cluster.device, cluster.device.measured
    lines = [f"name = {json.dumps(device.name)}", f"count = {cluster.count}"]
    lines += [f"{key} = {getattr(device, key)!r}" for key in REQUIRED]
    optional = {key: getattr(device, key) for key in OPTIONAL}
    lines += [f"{key} = {value!r}" for key, value in optional.items() if value is not None]
    lines += ["", "[peak_tflops]"]
    lines += [f"{dtype} = {rate!r}" for dtype, rate in device.peak_tflops.items()]
    if rates is not None:
        lines += ["", "[measured]", f'dtype = "{rates.dtype}"']
        lines += [f"{name} = {getattr(rates, name)!r}" for name in (*COSTS, *COUNTS)]
        for name in TABLES:
            lines += ["", f"[measured.{name}]"]
            table: CostTable = getattr(rates, name)
            lines += [f"{f.name} = {list(getattr(table, f.name))}" for f in fields(table)]
    return "\n".join(lines) + "\n"


def _rates(value: object, where: str) -> MeasuredRates:
    rates = _Measured(value, "measured", MeasuredRates, where)
    dtype = rates.value("dtype")
    if dtype not in DTYPES:
        raise rates.wrong("dtype", f"must be one of {', '.join(DTYPES)}")
    read: dict[str, Any] = {name: rates.cost(name) for name in COSTS}
    read |= {name: rates.count(name) for name in COUNTS}
    for name in TABLES:
        read[name] = _costs(rates.value(name), f"measured.{name}", where)
    return MeasuredRates(dtype=dtype, **read)


def _costs(value: object, name: str, where: str) -> CostTable:
    table = _Measured(value, name, CostTable, where)
    tokens = table.value("tokens")
    if not isinstance(tokens, list) or not tokens or not all(map(_is_count, tokens)):
        raise table.wrong("tokens", "must be a list of whole numbers above 0")
    if tokens != sorted(set(tokens)):
        raise table.wrong("tokens", "must be in ascending order")
    return CostTable(
        tuple(tokens),
        *(table.costs(key, len(tokens)) for key in ("call_s", "layer_s", "flop_s", "number_s")),
    )


class _Measured:
    """A table with the fields of a class as keys. Every error is one line with file and key."""

    def __init__(self, table: object, name: str, kind: type[Any], where: str) -> None:
        self._name, self._where = name, where
        if not isinstance(table, dict):
            raise self._error(f"[{name}] must be a table")
        self._table: dict[str, Any] = table
        check_keys(table, tuple(field.name for field in fields(kind)), where, f"{name}.")

    def _error(self, problem: str) -> UserError:
        return UserError(f"{self._where}: {problem}. Run sixfold plan --measure again")

    def wrong(self, key: str, problem: str) -> UserError:
        """Error about the value of a key."""
        return self._error(f"{self._name}.{key} = {self._table[key]!r} {problem}")

    def value(self, key: str) -> Any:
        if key not in self._table:
            raise self._error(f"{self._name}.{key} is missing")
        return self._table[key]

    def cost(self, key: str) -> float:
        """A number, 0 or above."""
        value = self.value(key)
        if not _is_cost(value):
            raise self.wrong(key, "must be a finite number, 0 or above")
        return float(value)

    def count(self, key: str) -> int:
        """A whole number, 0 or above."""
        value = self.value(key)
        if value != 0 and not _is_count(value):
            raise self.wrong(key, "must be a whole number, 0 or above")
        return int(value)

    def costs(self, key: str, count: int) -> tuple[float, ...]:
        """As many numbers, 0 or above, as there are numbers of tokens."""
        values = self.value(key)
        if not isinstance(values, list) or not values or not all(map(_is_cost, values)):
            raise self.wrong(key, "must be a list of finite numbers, 0 or above")
        if len(values) != count:
            raise self.wrong(key, f"must have as many numbers as tokens ({count})")
        return tuple(map(float, values))


def _is_cost(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return bool(number and value >= 0 and math.isfinite(value))


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
