"""Plain values as JSON that keeps their exact types.

This file also runs inside the sandbox, so it imports only the standard library.

| Python | JSON |
|---|---|
| None, bool, str, list | itself |
| int | a number, or {"i": hexadecimal} from 2**53 on |
| float | {"f": float.hex} |
| tuple, set, frozenset | {"t": [...]}, {"s": [...]}, {"z": [...]} |
| dict | {"d": [[key, value], ...]} |
| bytes, complex | {"b": hexadecimal}, {"c": [real, imaginary]} as float.hex |
| an object of the candidate | {"r": number}: only the candidate can use it |

A subclass of a plain type is not plain, because it may override comparison.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from typing import Any

MAX_DEPTH = 64
MAX_PARTS = 400_000
"""Maximum number of parts of one value. Each number, text or container is a part."""
MAX_BITS = 1 << 18
"""Largest integer, in bits."""

SAFE_INTEGER = 1 << 53


class NotPlain(Exception):
    """A value is not plain data, or it is too large or nested too deeply."""


class Encoder:
    """Converts values to JSON.

    Args:
        keep: gets an object that is not plain and returns its number. None: such objects are
            refused.
    """

    def __init__(self, keep: Any = None) -> None:
        self._keep = keep
        self._parts = 0

    def encode(self, value: Any, depth: int = 0) -> Any:
        """JSON of a value.

        Raises:
            NotPlain: if the value is not plain data, too large or too deep.
        """
        self._parts += 1
        if depth > MAX_DEPTH or self._parts > MAX_PARTS:
            raise NotPlain("a value with too many parts or levels")
        kind = type(value)
        if value is None or kind is bool or kind is str:
            return value
        if kind is int:
            if -SAFE_INTEGER < value < SAFE_INTEGER:
                return value
            if value.bit_length() > MAX_BITS:
                raise NotPlain("an integer with too many digits")
            return {"i": hex(value)}
        if kind is float:
            return {"f": value.hex()}
        if kind is list:
            return self._all(value, depth)
        return self._tagged(value, kind, depth)

    def _tagged(self, value: Any, kind: type, depth: int) -> Any:
        tags = {tuple: "t", set: "s", frozenset: "z"}
        if kind in tags:
            return {tags[kind]: self._all(value, depth)}
        if kind in (dict, defaultdict, OrderedDict, Counter):
            pairs = dict.items(value)
            return {"d": [[self.encode(k, depth + 1), self.encode(v, depth + 1)] for k, v in pairs]}
        if kind is bytes:
            return {"b": value.hex()}
        if kind is complex:
            return {"c": [value.real.hex(), value.imag.hex()]}
        if kind.__module__ == "numpy":
            return self.encode(value.tolist(), depth + 1)
        if self._keep is not None:
            return {"r": self._keep(value)}
        raise NotPlain("a value of type " + kind.__name__[:80])

    def _all(self, values: Any, depth: int) -> list[Any]:
        return [self.encode(value, depth + 1) for value in values]


def decode(data: Any, kept: Any = None) -> Any:
    """The value of its JSON. Runs only inside a sandbox: hashing untrusted keys can be slow.

    Args:
        data: output of `Encoder.encode`.
        kept: gets the number of an object that was kept and returns it.
    """
    if type(data) is list:
        return [decode(part, kept) for part in data]
    if type(data) is not dict:
        return data
    ((tag, body),) = data.items()
    if tag == "i":
        return int(body, 16)
    if tag == "f":
        return float.fromhex(body)
    if tag in ("t", "s", "z"):
        return {"t": tuple, "s": set, "z": frozenset}[tag](decode(part, kept) for part in body)
    if tag == "d":
        return {decode(key, kept): decode(value, kept) for key, value in body}
    if tag == "b":
        return bytes.fromhex(body)
    if tag == "c":
        return complex(*(float.fromhex(part) for part in body))
    return kept(body)
