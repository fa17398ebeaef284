"""Detect when a captured CUDA graph is no longer valid.

A CUDA graph replays the kernel launches of one forward pass with fixed memory addresses and runs no
Python. It becomes invalid if a submodule is replaced, if a weight moves to another address, or if
the forward pass depends on values that the host reads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ON_HOST = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
COPIES = {torch.ops.aten._to_copy, torch.ops.aten.copy_}


class GraphFingerprint:
    """Fingerprint of one module, for checking whether a captured graph is still valid.

    Args:
        forward: runs the module once on a few tokens, to detect reads by the host. It is called at
            construction and again whenever a submodule was replaced.
    """

    def __init__(self, module: nn.Module, forward: Callable[[], object]) -> None:
        self._module = module
        self._forward = forward
        self._parts: list[object] = []
        self._looked = 0
        self._look()

    def current(self) -> tuple[object, ...] | None:
        """Fingerprint of the module.

        A captured graph is valid while the fingerprint does not change.

        Returns:
            None if the module cannot be captured: it has forward hooks, or its forward pass reads
            tensors on the host.
        """
        if self._parts_now() != self._parts:
            self._look()
        if self._on_host or any(self._hooks):
            return None
        tensors = [t for own in self._owned for t in own.values() if t is not None]
        return self._looked, [t.data_ptr() for t in tensors], [t.dtype for t in tensors]

    def _look(self) -> None:
        # Keep references to the dictionaries. Iterating over all modules at every decode step would
        # cost more than the graph saves.
        modules = list(self._module.modules())
        self._looked += 1
        self._children = [m._modules for m in modules]
        self._owned = [own for m in modules for own in (m._parameters, m._buffers) if own]
        self._hooks = [hooks for m in modules for hooks in (m._forward_pre_hooks, m._forward_hooks)]
        self._parts = self._parts_now()
        # Not in inference mode: there, composite operations such as `bool(tensor)` reach the
        # dispatch mode undecomposed, and their tags do not show the host reads inside them.
        with torch.inference_mode(False), torch.no_grad(), _HostReads() as reads:
            self._forward()
        self._on_host = reads.found

    def _parts_now(self) -> list[object]:
        return [part for own in self._children for part in own.values()]


class _HostReads(TorchDispatchMode):
    """Detects operations that cannot be captured in a CUDA graph.

    These are operations whose result or shape the host must know, and copies between host and
    device.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given, made = (
            [t for t in tree_leaves(some) if isinstance(t, Tensor)] for some in (args, out)
        )
        # A zero-dimensional CPU tensor is a constant for every operation except copies. Attention
        # in float32 returns two, the state of a random generator that it does not use.
        copied = func.overloadpacket in COPIES
        devices = {t.device for t in (*given, *made) if t.dim() or not t.is_cpu or copied}
        # `torch.tensor(...)` dispatches lift_fresh.
        lifted = func.overloadpacket is torch.ops.aten.lift_fresh and not all(
            t.is_cpu for t in made
        )
        self.found |= bool(ON_HOST & set(func.tags)) or len(devices) > 1 or lifted
        return out
