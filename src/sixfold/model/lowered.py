"""A model's body and head on weights that are already in autocast's dtype.

Under autocast, PyTorch casts every float32 weight of a matrix product again in each forward pass. A
decode step then moves 8 bytes per parameter (read 4, write 2, read 2) instead of 2. Here the engine
gets a twin of the module. The twin shares all tensors with the module, except for the weights that
autocast would cast: of those it has copies in the lower dtype. The operations have the same inputs
as under autocast, so the results are bitwise equal. The trainer's float32 weights do not change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.pytorch_utils import Conv1D

from .base import Body, LayerAdditions, Layout, ModuleBody
from .shared_module import shared_copy

Slot = tuple[dict[str, nn.Parameter | None], dict[str, nn.Parameter | None], str]
"""Parameter dictionaries of a submodule and of its twin, and the name of a parameter in both."""


class LoweredBody:
    """The twin of one model. The copies of weights use memory until `release`."""

    def __init__(
        self,
        model: ModuleBody,
        make: Callable[[nn.Module], ModuleBody],
        probe: Callable[[ModuleBody], Tensor],
        dtype: torch.dtype,
    ) -> None:
        """Build the twin; the copies are made by the first `ready`.

        Args:
            make: wraps the twin in the class of `model`.
            probe: runs body and head once on a few tokens and returns the logits.
        """
        module = model.module
        self._model = model
        self._dtype = dtype
        with torch.inference_mode(False), torch.no_grad():
            reads = _Reads(module, dtype)
            with self._autocast(), reads:
                probe(model)
            self._twin = make(shared_copy(module))
            self._slots = list(_lowered_slots(module, self._twin.module, reads))
        parts = list(module.modules())
        self._children = [part._modules for part in parts]
        self._owned = [part._parameters for part in parts if part._parameters]
        self._hooks = [h for part in parts for h in (part._forward_pre_hooks, part._forward_hooks)]
        self._built = self._state()
        self._copied: list[tuple[int, int]] = []

    @property
    def module(self) -> nn.Module:
        return self._twin.module

    @property
    def steady(self) -> bool:
        """As for the module: a row's last bits may depend on the number of rows."""
        return self._twin.steady

    def ready(self) -> Body:
        """Return self with current copies, or the plain module if it changed or has hooks."""
        if any(self._hooks) or self._state() != self._built:
            return self._model
        sources = [own[name] for own, _, name in self._slots]
        versions = [(p.data_ptr(), p._version) for p in sources]  # type: ignore[union-attr]
        if versions != self._copied:
            with torch.inference_mode(False), torch.no_grad():
                for own, lowered, name in self._slots:
                    _cast_into(lowered[name], own[name], self._dtype)  # type: ignore[arg-type]
            self._copied = versions
        return self

    def refresh(self) -> None:
        """Cast the weights again before the next forward pass, even if PyTorch saw no change."""
        self._copied = []

    def release(self) -> None:
        self.refresh()
        for _, lowered, name in self._slots:
            p = lowered[name]
            p.data = p.new_empty(0)  # type: ignore[union-attr]

    def hidden(
        self,
        tokens: Tensor,
        positions: Tensor,
        layout: Layout,
        additions: LayerAdditions | None = None,
    ) -> Tensor:
        """As `Body.hidden`: tokens, positions [N] -> [N, hidden]. Call it under autocast."""
        return self._twin.hidden(tokens, positions, layout, additions)

    def logits(self, hidden: Tensor) -> Tensor:
        """As `Body.logits`: [N, hidden] -> float32 [N, V]. Call it under autocast."""
        return self._twin.logits(hidden)

    def graph_fingerprint(self) -> object | None:
        """Fingerprint of the twin (`Body.graph_fingerprint`): a graph reads the twin's copies."""
        with self._autocast():
            return self._twin.graph_fingerprint()

    def _state(self) -> list[object]:
        """Ids of all submodules and parameters of the module."""
        parts = [id(part) for own in self._children for part in own.values()]
        return [parts, [id(p) for own in self._owned for p in own.values()]]

    def _autocast(self) -> torch.autocast:
        device = next(self._model.module.parameters()).device.type
        return torch.autocast(device, self._dtype, cache_enabled=False)


@torch.no_grad()
def lower_weights(
    model: ModuleBody, probe: Callable[[ModuleBody], Tensor], dtype: torch.dtype
) -> None:
    """Convert, once and in place, the weights that autocast converts in every product.

    For a process that only samples: under autocast, the results are bitwise those of float32
    weights. Tables of embeddings stay as they are, also if they are the head's weight.

    Args:
        probe: runs body and head once on a few tokens and returns the logits.
    """
    parts = list(model.module.modules())
    tables = {id(p) for part in parts if isinstance(part, nn.Embedding) for p in part.parameters()}
    reads = _Reads(model.module, dtype)
    device = next(model.module.parameters()).device.type
    with torch.autocast(device, dtype, cache_enabled=False), reads:
        probe(model)
    for part in parts:
        for p in part._parameters.values():
            if p is not None and id(p) not in tables and reads.lowers(part, p):
                p.data = p.data.to(dtype)


def _lowered_slots(module: nn.Module, twin: nn.Module, reads: _Reads) -> Iterator[Slot]:
    """Replace each weight that autocast casts with an empty parameter of the lower dtype.

    Args:
        twin: its parameters are replaced.

    Yields:
        One slot per replaced parameter.
    """
    made: dict[int, nn.Parameter] = {}
    for part, copied in zip(module.modules(), twin.modules(), strict=True):
        for name, p in part._parameters.items():
            if p is None or isinstance(part, nn.Embedding) or not reads.lowers(part, p):
                continue
            if id(p) not in made:
                made[id(p)] = nn.Parameter(p.new_empty(0, dtype=reads.dtype), requires_grad=False)
            copied._parameters[name] = made[id(p)]
            yield part._parameters, copied._parameters, name


def _cast_into(target: nn.Parameter, source: nn.Parameter, dtype: torch.dtype) -> None:
    """Set target to the source in `dtype`, in place if shape and device match.

    In-place updates keep the address, so captured CUDA graphs stay valid.
    """
    if target.shape == source.shape and target.device == source.device:
        target.copy_(source)
    else:
        target.data = source.detach().to(dtype)


class _Reads(TorchDispatchMode):
    """Records which float32 parameters are read only by casts, and which by other operations.

    Parameters are identified by their storage, because a forward pass may read them through views
    (one expert of a stack). Embedding look-ups do not count: a table that is also the head's weight
    is looked up in float32 and cast for the head.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        own = [p for p in module.parameters() if p.dtype == torch.float32]
        self._own = {p.untyped_storage().data_ptr() for p in own}
        self._cast: set[int] = set()
        self._read: set[int] = set()

    def lowers(self, part: nn.Module, p: nn.Parameter) -> bool:
        """True if the parameter can be stored in the lower dtype.

        A matrix that the probe did not read (an expert that received no token) is judged by the
        class of its submodule.
        """
        storage = p.untyped_storage().data_ptr()
        if storage not in self._own or storage in self._read:
            return False
        return storage in self._cast or isinstance(part, nn.Linear | Conv1D)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.is_view or func.overloadpacket is torch.ops.aten.embedding:
            return out
        cast = func.overloadpacket is torch.ops.aten._to_copy and out.dtype == self.dtype
        for t in tree_leaves((args, kwargs)):
            if isinstance(t, Tensor) and t.untyped_storage().data_ptr() in self._own:
                (self._cast if cast else self._read).add(t.untyped_storage().data_ptr())
        return out
