"""New weights for a model, written into the buffers that it has: whole or not at all.

Everything is checked before the first number is written. With `undo`, what is overwritten is kept
in host memory until every tensor is proven to be what was given, so that an error in the middle puts
the old weights back; a GPU's memory holds nothing twice. Tensors in host memory go over to a GPU
once. The host waits for a GPU a fixed number of times, however many tensors there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import pairwise

import torch
from torch import Tensor, nn

NamedTensors = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]
"""A mapping may make its tensors when it is asked for them: each is asked for up to three times."""

BUCKET_BYTES = 1 << 28
"""Old weights that go to host memory in one copy."""


@dataclass(frozen=True)
class Write:
    """One tensor to overwrite.

    Attributes:
        name: the first name that was given for it.
        target: the module's own tensor.
        given: what the new tensors are asked of.
    """

    name: str
    target: Tensor
    given: Mapping[str, Tensor]

    @property
    def source(self) -> Tensor:
        """What was given, perhaps of another dtype or on another device."""
        return self.given[self.name].detach()

    def staged(self) -> Tensor:
        """The source as the target will hold it. Cast before it moves, if that makes it smaller."""
        source, target = self.source, self.target
        if source.dtype.itemsize > target.dtype.itemsize:
            source = source.to(target.dtype)
        return source.to(target.device, target.dtype)


class Weights:
    """A module's weights. torn: an update is being written, or one failed and so did putting the old weights back: nothing may be computed."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.torn = False

    @torch.no_grad()
    def load(self, given: NamedTensors, *, undo: bool = True) -> None:
        """Overwrite every parameter in place (data_ptr stays).

        Args:
            given: all parameters by the names of `state_dict`, with or without its buffers; of tied
                weights one name is enough.
            undo: keep the old weights in host memory meanwhile, for the case that writing fails.
                Without it such an error leaves the weights torn.

        Raises:
            ValueError: with nothing written, for a name that is missing, unknown or given twice, a
                wrong shape, a dtype that is not floating, numbers that are not finite in the model's
                dtype, tied weights that differ, or the model's own storage.
            RuntimeError: a tensor did not come out equal. This and any error in writing are raised
                once the old weights are back, with `undo`.
        """
        plan = self._plan(given if isinstance(given, Mapping) else _by_name(given))
        if undo:
            self._replace(plan)
        else:
            self.torn = True
            _write(plan, [])
            self.torn = False

    def _plan(self, given: Mapping[str, Tensor]) -> list[Write]:
        own = {name: t for name, t in self._module.state_dict(keep_vars=True).items() if isinstance(t, Tensor)}
        storages = {t.untyped_storage().data_ptr() for t in own.values()}
        plan: dict[int, Write] = {}  # by identity of the target: tied weights are one tensor under several names
        finite: dict[str, Tensor] = {}
        twins: list[tuple[str, str, Tensor]] = []
        for name in given:
            if name not in own:
                hint = "".join(f" Did you mean '{close}'?" for close in get_close_matches(name, own, n=1))
                raise ValueError(f"the model has no weight '{name}'.{hint}")
            write = Write(name, own[name], given)
            source = write.source
            _check(write, source, storages)
            finite[name] = source.to(write.target.dtype).isfinite().all()
            twin = plan.setdefault(id(write.target), write)
            if twin is not write:
                twins.append((twin.name, name, (twin.source.to(write.target.dtype) == source.to(write.target.dtype)).all()))
        missing = [name for name, p in self._module.named_parameters() if id(p) not in plan]
        if missing:
            raise ValueError(f"{len(missing)} of the model's weights are missing, first '{missing[0]}'")
        if wrong := first_false(finite):
            raise ValueError(f"weight '{wrong}' is not finite in {own[wrong].dtype}")
        if wrong := first_false({f"'{a}' and '{b}'": same for a, b, same in twins}):
            raise ValueError(f"weights {wrong} are tied in the model: they are one tensor, and what is given for them differs")
        _check_apart(list(plan.values()))
        return list(plan.values())

    def _replace(self, plan: list[Write]) -> None:
        kept = _kept([write.target for write in plan])
        begun: list[int] = []
        self.torn = True
        try:
            _write(plan, begun)
        except BaseException:  # Ctrl-C too must not leave half of the weights new
            for i in begun:
                _copy(plan[i].target, kept[i])
            self.torn = False
            raise
        self.torn = False


def first_false(flags: Mapping[str, Tensor]) -> str | None:
    """Name of the first 0-dimensional bool that is False. The host waits once for each device."""
    names: dict[torch.device, list[str]] = {}
    for name, flag in flags.items():
        names.setdefault(flag.device, []).append(name)
    wrong = {name for own in names.values() for name, fine in zip(own, torch.stack([flags[n] for n in own]).tolist(), strict=True) if not fine}
    return next((name for name in flags if name in wrong), None)


def _by_name(given: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, tensor in given:
        if name in found:
            raise ValueError(f"weight '{name}' is given twice")
        found[name] = tensor
    return found


def _check(write: Write, source: Tensor, storages: set[int]) -> None:
    name, target = write.name, write.target
    if source.shape != target.shape:
        raise ValueError(f"weight '{name}' has the shape {list(source.shape)}, the model's has {list(target.shape)}")
    if source.dtype != target.dtype and not (source.is_floating_point() and target.is_floating_point()):
        raise ValueError(f"weight '{name}' is {source.dtype}, the model's {target.dtype}: only floating types are cast into one another")
    if source.is_meta:
        raise ValueError(f"weight '{name}' has no data: it is on the meta device")
    if source.untyped_storage().data_ptr() in storages:
        raise ValueError(f"weight '{name}' lies in the model's own storage: there is nothing to copy, a shared module gets a new version only")


def _check_apart(plan: list[Write]) -> None:
    """Targets must not overlap: writing one would change another that was written before."""
    spans = sorted((t.data_ptr(), t.data_ptr() + t.nbytes, write.name) for write in plan if (t := write.target).nbytes)
    for (_, stop, name), (start, _, other) in pairwise(spans):
        if start < stop:
            raise ValueError(f"weights '{name}' and '{other}' share memory in the model without being one tensor: they cannot be loaded")


def _write(plan: list[Write], begun: list[int]) -> None:
    """Write one tensor after the other; begun: gets the number of each before it is touched."""
    equal: dict[str, Tensor] = {}
    for i, write in enumerate(plan):
        new = write.staged()
        begun.append(i)
        _copy(write.target, new)
        equal[write.name] = (write.target == new).all()
    if wrong := first_false(equal):
        raise RuntimeError(f"weight '{wrong}' did not come out equal to what was given")


def _kept(targets: list[Tensor]) -> list[Tensor]:
    """Copies in host memory. From a GPU they come in a few large pieces, not tensor by tensor."""
    if all(t.is_cpu for t in targets):
        return [t.clone() for t in targets]
    kept: list[Tensor] = []
    for bucket in _buckets(targets):
        flat = torch.cat([t.detach().reshape(-1) for t in bucket]).cpu()
        kept += [part.view(t.shape) for part, t in zip(flat.split([t.numel() for t in bucket]), bucket, strict=True)]
    return kept


def _buckets(targets: list[Tensor]) -> Iterator[list[Tensor]]:
    """Neighbours of one dtype and device, up to BUCKET_BYTES together."""
    bucket: list[Tensor] = []
    for t in targets:
        like = bucket and (bucket[0].dtype, bucket[0].device) == (t.dtype, t.device)
        if bucket and not (like and sum(x.nbytes for x in bucket) + t.nbytes <= BUCKET_BYTES):
            yield bucket
            bucket = []
        bucket.append(t)
    if bucket:
        yield bucket


def _copy(target: Tensor, source: Tensor) -> None:
    target.copy_(source)
