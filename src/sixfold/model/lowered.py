"""A model's body and head on weights that already have the dtype that autocast computes in.

Under autocast PyTorch casts every float32 weight of a matrix product anew in each forward. A decode
step then moves 8 bytes for each parameter (read 4, write 2, read 2) where 2 would do. Here the
engine gets a twin of the module: the same parts, sharing every tensor with it, but with copies in
the lower dtype of those weights that autocast would cast. The operations see the same inputs as
before, so the results are the same bits, and the trainer's float32 weights stay as they are.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.pytorch_utils import Conv1D

from .base import Body, LayerAdditions, Layout

Slot = tuple[dict[str, nn.Parameter | None], dict[str, nn.Parameter | None], str]
"""The parameter dictionaries of one part of the module and of its twin, and a name in both."""


class Halves(Body, Protocol):
    """What runs a module's body and head (`CausalLM`)."""

    @property
    def module(self) -> nn.Module: ...


class LoweredBody:
    """The twin of one model. It costs the memory of the copies until `release`."""

    def __init__(
        self,
        model: Halves,
        make: Callable[[nn.Module], Halves],
        probe: Callable[[Halves], Tensor],
        dtype: torch.dtype,
    ) -> None:
        """Build the twin; the copies are made by the first `ready`.

        Args:
            model: the halves of the module to be run.
            make: wraps the twin as `model` wraps the module.
            probe: runs body and head once on a few tokens; gives the logits.
            dtype: what autocast computes in.
        """
        module = model.module
        self._model = model
        self._dtype = dtype
        with torch.inference_mode(False), torch.no_grad():
            reads = _Reads(module, dtype)
            with self._autocast(), reads:
                probe(model)
            self._twin = make(_twin(module))
            self._slots = list(_lowered_slots(module, self._twin.module, reads))
        parts = list(module.modules())
        self._children = [part._modules for part in parts]
        self._owned = [part._parameters for part in parts if part._parameters]
        self._hooks = [h for part in parts for h in (part._forward_pre_hooks, part._forward_hooks)]
        self._built = self._state()
        self._copied: list[tuple[int, int]] = []

    @property
    def module(self) -> nn.Module:
        """The twin."""
        return self._twin.module

    @property
    def steady(self) -> bool:
        """As the module's own: a row's last bits may depend on how many rows there are."""
        return self._twin.steady

    def ready(self) -> Body:
        """Itself with fresh copies, or the module where a part was exchanged or has a hook."""
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
        """Weights may have changed unseen by PyTorch: cast them again before the next forward."""
        self._copied = []

    def release(self) -> None:
        """Give the memory of the copies back; the next `ready` makes others."""
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
        """tokens, positions [N] -> [N, hidden]. To be called under autocast."""
        return self._twin.hidden(tokens, positions, layout, additions)

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden] -> float32 [N, V]. To be called under autocast."""
        return self._twin.logits(hidden)

    def footing(self) -> object | None:
        """As the module's, of the twin, whose copies the graph reads."""
        with self._autocast():
            return self._twin.footing()

    def _state(self) -> list[object]:
        """Identity of every part and parameter of the module."""
        parts = [id(part) for own in self._children for part in own.values()]
        return [parts, [id(p) for own in self._owned for p in own.values()]]

    def _autocast(self) -> torch.autocast:
        device = next(self._model.module.parameters()).device.type
        return torch.autocast(device, self._dtype, cache_enabled=False)


def _twin(module: nn.Module) -> nn.Module:
    """A copy of the module's structure that shares parameters, buffers and settings with it."""
    shared = [*module.parameters(), *module.buffers()]
    shared += [config for part in module.modules() if (config := vars(part).get("config"))]
    return copy.deepcopy(module, {id(x): x for x in shared})


def _lowered_slots(module: nn.Module, twin: nn.Module, reads: _Reads) -> Iterator[Slot]:
    """Put an empty parameter of the lower dtype in the twin wherever autocast casts the weight."""
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
    """target becomes the source in dtype, in the memory that it has if that still fits."""
    if target.shape == source.shape and target.device == source.device:
        target.copy_(source)
    else:
        target.data = source.detach().to(dtype)


class _Reads(TorchDispatchMode):
    """Notes for each float32 parameter whether operations read it, or casts alone do.

    Parameters are told apart by their storage, since a forward may read them through views
    (one expert of a stack). The look-up of an embedding does not count: a table that is also the
    head's weight is looked up in float32 and cast for the head.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        own = [p for p in module.parameters() if p.dtype == torch.float32]
        self._own = {p.untyped_storage().data_ptr() for p in own}
        self._cast: set[int] = set()
        self._read: set[int] = set()

    def lowers(self, part: nn.Module, p: nn.Parameter) -> bool:
        """Whether the part's parameter can be held in the lower dtype from the start.

        A matrix that the probe did not reach (an expert that no token went to) counts by the kind
        of its part.
        """
        storage = p.untyped_storage().data_ptr()
        if storage not in self._own or storage in self._read:
            return False
        return storage in self._cast or isinstance(part, nn.Linear | Conv1D)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # fmt: skip
        out = func(*args, **(kwargs or {}))
        if func.is_view or func.overloadpacket is torch.ops.aten.embedding:
            return out
        cast = func.overloadpacket is torch.ops.aten._to_copy and out.dtype == self.dtype
        for t in tree_leaves((args, kwargs)):
            if isinstance(t, Tensor) and t.untyped_storage().data_ptr() in self._own:
                (self._cast if cast else self._read).add(t.untyped_storage().data_ptr())
        return out
