"""A second module on the same weights."""

from __future__ import annotations

import copy
from collections.abc import Set
from typing import TypeVar

from torch import nn

M = TypeVar("M", bound=nn.Module)


def twin_of(module: M, apart: Set[int] = frozenset()) -> M:
    """A copy of the module's structure that shares parameters, buffers and settings with it.

    Args:
        module: the original.
        apart: ids of parameters that are copied, not shared.
    """
    shared: list[object] = [*module.parameters(), *module.buffers()]
    shared += [config for part in module.modules() if (config := vars(part).get("config"))]
    return copy.deepcopy(module, {id(x): x for x in shared if id(x) not in apart})
