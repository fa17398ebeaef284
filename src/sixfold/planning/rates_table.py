"""The table [measured] of a hardware file: costs of engine and trainer, read and written.

[measured]
dtype = "fp32"
kv_byte_s = 1.0e-10
shared_read = 0.3
episode_s = 4.0e-4
update_s = 1.2e-9
sync_byte_s = 2.1e-10

[measured.train]            # also decode, prefill and score
tokens = [64, 512]
call_s = [1.0e-3, 1.0e-3]   # also layer_s, flop_s and number_s: one cost for each of tokens
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from ..errors import UserError, nearest
from .measured_rates import CostTable, MeasuredRates

DTYPES = ("fp32", "bf16")
TABLES = ("decode", "prefill", "score", "train")
COSTS = ("kv_byte_s", "shared_read", "episode_s", "update_s", "sync_byte_s")
_LISTS = ("call_s", "layer_s", "flop_s", "number_s")
_AGAIN = "Run sixfold plan --measure again"


def read_rates(table: object, path: str | Path) -> MeasuredRates:
    """Costs from the table [measured].

    Args:
        table: the parsed table.
        path: the file, for messages.

    Raises:
        UserError: if a key is missing or unknown, or a value is not a cost. The message names the
            file, the key and the remedy.
    """
    rates = _Table(table, "measured", [field.name for field in fields(MeasuredRates)], path)
    dtype = rates.value("dtype")
    if dtype not in DTYPES:
        raise rates.wrong("dtype", f"must be one of {', '.join(DTYPES)}")
    tables = {name: _costs(rates.value(name), name, path) for name in TABLES}
    costs = {name: rates.cost(name) for name in COSTS}
    read: dict[str, Any] = {"dtype": dtype, **tables, **costs}
    return MeasuredRates(**read)


def rates_text(rates: MeasuredRates) -> str:
    """The table [measured] as TOML."""
    lines = ["[measured]", f'dtype = "{rates.dtype}"']
    lines += [f"{name} = {getattr(rates, name)!r}" for name in COSTS]
    for name in TABLES:
        lines += ["", f"[measured.{name}]"]
        table: CostTable = getattr(rates, name)
        lines += [f"{field.name} = {list(getattr(table, field.name))}" for field in fields(table)]
    return "\n".join(lines) + "\n"


class _Table:
    """A table with known keys. Every error is one line that names file and key."""

    def __init__(self, table: object, name: str, keys: list[str], path: str | Path) -> None:
        self._name, self._path = name, path
        if not isinstance(table, dict):
            raise UserError(f"hardware file {path}: [{name}] must be a table. {_AGAIN}")
        self._table: dict[str, Any] = table
        for key in table:
            if key not in keys:
                raise UserError(
                    f"hardware file {path}: unknown key '{name}.{key}'.{nearest(key, keys)}"
                    f" Known keys: {', '.join(keys)}"
                )

    def wrong(self, key: str, problem: str) -> UserError:
        """Error about the value of a key."""
        value = self._table[key]
        return UserError(
            f"hardware file {self._path}: {self._name}.{key} = {value!r} {problem}. {_AGAIN}"
        )

    def value(self, key: str) -> Any:
        """Value of a required key."""
        if key not in self._table:
            raise UserError(f"hardware file {self._path}: {self._name}.{key} is missing. {_AGAIN}")
        return self._table[key]

    def cost(self, key: str) -> float:
        """A number, 0 or above."""
        value = self.value(key)
        if not _is_cost(value):
            raise self.wrong(key, "must be a finite number, 0 or above")
        return float(value)

    def numbers(self, key: str, good: Callable[[Any], bool], kind: str) -> list[Any]:
        """A list of numbers that all pass a check."""
        value = self.value(key)
        if not isinstance(value, list) or not value or not all(map(good, value)):
            raise self.wrong(key, f"must be a list of {kind}")
        return value


def _is_cost(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return bool(number and value >= 0 and math.isfinite(value))


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _costs(value: object, name: str, path: str | Path) -> CostTable:
    keys = [field.name for field in fields(CostTable)]
    table = _Table(value, f"measured.{name}", keys, path)
    tokens = table.numbers("tokens", _is_count, "whole numbers above 0")
    if tokens != sorted(set(tokens)):
        raise table.wrong("tokens", "must be in ascending order")
    costs: dict[str, tuple[float, ...]] = {}
    for key in _LISTS:
        values = table.numbers(key, _is_cost, "finite numbers, 0 or above")
        if len(values) != len(tokens):
            raise table.wrong(key, f"must have as many numbers as tokens ({len(tokens)})")
        costs[key] = tuple(float(number) for number in values)
    return CostTable(tuple(tokens), **costs)
