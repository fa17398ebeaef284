"""Make a second module that shares the weights of a module."""

from __future__ import annotations

import copy
from collections.abc import Set
from typing import TypeVar

from torch import nn

M = TypeVar("M", bound=nn.Module)


def shared_copy(module: M, apart: Set[int] = frozenset()) -> M:
    """Copy a module, but share its parameters, buffers and configs with the copy.

    Args:
        apart: ids (`id(parameter)`) of parameters to copy instead of share.
    """
    shared: list[object] = [*module.parameters(), *module.buffers()]
    shared += [config for part in module.modules() if (config := vars(part).get("config"))]
    return copy.deepcopy(module, {id(x): x for x in shared if id(x) not in apart})
