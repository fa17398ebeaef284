"""What a captured forward of a module stands on. A CUDA graph repeats the launches of one forward on the memory of then and runs no Python, so it
holds only while the module has the same parts, with their weights in the same places, and nothing of its forward is decided on the host.
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


class Footing:
    """Of one module. forward: runs it once, on a few tokens, to see what it asks of the host; again whenever a part was exchanged."""

    def __init__(self, module: nn.Module, forward: Callable[[], object]) -> None:
        self._module = module
        self._forward = forward
        self._parts: list[object] = []
        self._looked = 0
        self._look()

    def of_now(self) -> tuple[object, ...] | None:
        """Equal for as long as a capture of the forward holds. None where there can be none: a hook is on some part, or the host has a say."""
        if self._parts_now() != self._parts:
            self._look()
        if self._on_host or any(self._hooks):
            return None
        tensors = [t for own in self._owned for t in own.values() if t is not None]
        return self._looked, [t.data_ptr() for t in tensors], [t.dtype for t in tensors]

    def _look(self) -> None:
        # The dictionaries themselves: to go through the modules of a large model at every step would take longer than a step of its graph.
        modules = list(self._module.modules())
        self._looked += 1
        self._children = [m._modules for m in modules]
        self._owned = [own for m in modules for own in (m._parameters, m._buffers) if own]
        self._hooks = [hooks for m in modules for hooks in (m._forward_pre_hooks, m._forward_hooks)]
        self._parts = self._parts_now()
        # Not in inference mode: there `bool(tensor)` and others reach a dispatch mode whole, and their tags do not say what they do inside.
        with torch.inference_mode(False), torch.no_grad(), _HostReads() as reads:
            self._forward()
        self._on_host = reads.found

    def _parts_now(self) -> list[object]:
        return [part for own in self._children for part in own.values()]


class _HostReads(TorchDispatchMode):
    """Notices what cannot be captured: numbers or shapes that the host must know, and copies between host and device."""

    def __init__(self) -> None:
        super().__init__()
        self.found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given, made = (t for t in tree_leaves(args) if isinstance(t, Tensor)), (t for t in tree_leaves(out) if isinstance(t, Tensor))
        # A CPU number without dimensions is a constant to other operations than copies. lift_fresh: `torch.tensor(...)`.
        devices = {t.device for t in made} | {t.device for t in given if t.dim() or not t.is_cpu or func.overloadpacket in COPIES}
        lifted = func.overloadpacket is torch.ops.aten.lift_fresh and devices != {torch.device("cpu")}
        self.found |= bool(ON_HOST & set(func.tags)) or len(devices) > 1 or lifted
        return out
