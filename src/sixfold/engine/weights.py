"""New weights for a model, written into the buffers that it has: whole or not at all.

Everything is checked before the first number is written. What is overwritten is kept until every tensor is proven to be what was given, so that an
error in the middle puts the old weights back. The price is the memory of the weights once more, for as long as an update takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches

import torch
from torch import Tensor, nn

NamedTensors = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]


@dataclass(frozen=True)
class Write:
    """One tensor to overwrite. target: the module's own. source: what was given, perhaps of another dtype or on another device."""

    name: str
    target: Tensor
    source: Tensor

    @property
    def cast(self) -> Tensor:
        """The source as the target will hold it."""
        return self.source.to(self.target.device, self.target.dtype)


class Weights:
    """A module's weights. torn: an update is being written, or one failed and so did putting the old weights back: nothing may be computed."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.torn = False

    @torch.no_grad()
    def load(self, given: NamedTensors) -> None:
        """Overwrite every parameter in place (data_ptr stays). given: all parameters by the names of `state_dict`, with or without its buffers; of
        tied weights one name is enough.

        Raises ValueError, with nothing written, for a name that is missing, unknown or given twice, a wrong shape, a dtype that is not floating,
        numbers that are not finite in the model's dtype, tied weights that differ, or the model's own storage. An error in writing, or a tensor that
        does not come out equal, is raised once the old weights are back.
        """
        self._replace(self._plan(given.items() if isinstance(given, Mapping) else given))

    def _plan(self, given: Iterable[tuple[str, Tensor]]) -> list[Write]:
        own = {name: t for name, t in self._module.state_dict(keep_vars=True).items() if isinstance(t, Tensor)}
        storages = {t.untyped_storage().data_ptr() for t in own.values()}
        plan: dict[int, Write] = {}  # by identity of the target: tied weights are one tensor under several names
        for name, source in given:
            if name not in own:
                hint = "".join(f" Did you mean '{close}'?" for close in get_close_matches(name, own, n=1))
                raise ValueError(f"the model has no weight '{name}'.{hint}")
            write = Write(name, own[name], source.detach())
            _check(write, storages)
            twin = plan.setdefault(id(write.target), write)
            if twin is not write and twin.name == name:
                raise ValueError(f"weight '{name}' is given twice")
            if twin is not write and not torch.equal(twin.cast, write.cast):
                raise ValueError(f"weights '{twin.name}' and '{name}' are tied in the model: they are one tensor, and what is given for them differs")
        missing = [name for name, p in self._module.named_parameters() if id(p) not in plan]
        if missing:
            raise ValueError(f"{len(missing)} of the model's weights are missing, first '{missing[0]}'")
        return list(plan.values())

    def _replace(self, plan: list[Write]) -> None:
        kept: list[tuple[Tensor, Tensor]] = []
        self.torn = True
        try:
            for write in plan:
                kept.append((write.target, write.target.clone()))
                _copy(write.target, write.source)
            for write in plan:  # after the last write: none of them may have touched another's memory
                if not torch.equal(write.target, write.cast):
                    raise RuntimeError(f"weight '{write.name}' did not come out equal to what was given: the old weights are kept")
        except BaseException:  # Ctrl-C too must not leave half of the weights new
            for target, old in kept:
                _copy(target, old)
            self.torn = False
            raise
        self.torn = False


def _check(write: Write, storages: set[int]) -> None:
    name, target, source = write.name, write.target, write.source
    if source.shape != target.shape:
        raise ValueError(f"weight '{name}' has the shape {list(source.shape)}, the model's has {list(target.shape)}")
    if source.dtype != target.dtype and not (source.is_floating_point() and target.is_floating_point()):
        raise ValueError(f"weight '{name}' is {source.dtype}, the model's {target.dtype}: only floating types are cast into one another")
    if source.is_meta:
        raise ValueError(f"weight '{name}' has no data: it is on the meta device")
    if source.untyped_storage().data_ptr() in storages:
        raise ValueError(f"weight '{name}' lies in the model's own storage: there is nothing to copy, a shared module gets a new version only")
    if not bool(write.cast.isfinite().all()):
        raise ValueError(f"weight '{name}' is not finite in {target.dtype}")


def _copy(target: Tensor, source: Tensor) -> None:
    target.copy_(source)
