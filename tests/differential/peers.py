"""Importing the peers: skipped where they are not installed, and without the engines and
accelerators that their formulas do not use.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import pytest

# OpenRLHF compiles its entropy when it is imported; the formula is the same without a compiler.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

# What OpenRLHF imports on the way to its losses: stand-ins, gone again after the import, so that no
# other library takes them for real.
ABSENT = ("deepspeed", "flash_attn", "vllm", "aiohttp", "torchdata", "pylatexenc")


def peer(module: str) -> Any:
    """A peer's module. Without it the test file is skipped; with PEERS_REQUIRED set, as
    `make differential` does, it is an error.
    """
    if os.environ.get("PEERS_REQUIRED"):
        return importlib.import_module(module)
    return pytest.importorskip(
        module,
        reason=f"{module.partition('.')[0]} is not installed here: make differential",
        exc_type=ImportError,
    )


class _StandIn(MetaPathFinder, Loader):
    """Finds a mock for every module under ABSENT."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return (
            ModuleSpec(fullname, self, is_package=True)
            if fullname.partition(".")[0] in ABSENT
            else None
        )

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return MagicMock(name=spec.name, __path__=[], __name__=spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


@contextmanager
def without_accelerators() -> Iterator[None]:
    """Inside, the modules in ABSENT import as mocks where they are not installed."""
    finder = _StandIn()
    sys.meta_path.append(finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [
            n
            for n in sys.modules
            if n.partition(".")[0] in ABSENT and isinstance(sys.modules[n], MagicMock)
        ]:
            del sys.modules[name]
