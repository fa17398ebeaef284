"""Load new weights into a model's existing buffers, atomically.

All tensors are checked before the first one is written. With `undo`, the old weights stay in host
memory until every written tensor equals the given one. An error during writing then restores the
old weights. GPU memory never holds all weights twice. Tensors in host memory are copied to
a GPU once. The number of times that the host waits for a GPU does not depend on the number of
tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from .weight_stages import stage

Staged = list[tuple[Tensor, Tensor]]
"""New weights that have been checked: tensor of the module, and its new values on the host."""
NamedTensors = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]
"""Names and tensors. A mapping may create tensors on access; each is accessed up to three times."""

BUCKET_BYTES = 1 << 28
"""Maximum bytes of old weights per copy to host memory."""


@dataclass(frozen=True)
class Write:
    """One tensor to overwrite.

    Attributes:
        name: the first given name of the tensor.
        given: the new tensors by name.
    """

    name: str
    target: Tensor
    given: Mapping[str, Tensor]

    @property
    def source(self) -> Tensor:
        """The given tensor. Its dtype and device may differ from the target's."""
        return self.given[self.name].detach()

    def staged(self) -> Tensor:
        """The source in the target's dtype and on its device. Cast before the copy if smaller."""
        source, target = self.source, self.target
        if source.dtype.itemsize > target.dtype.itemsize:
            with stage("cast", target.nbytes):
                source = source.to(target.dtype)
        return source.to(target.device, target.dtype)


class Weights:
    """Weights of a module.

    Attributes:
        torn: True while an update is being written, and after a failed update whose old weights
            could not be restored. Nothing may be computed then.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.torn = False

    @torch.no_grad()
    def load(self, given: NamedTensors, *, undo: bool = True) -> None:
        """Overwrite every parameter in place (data_ptr does not change).

        Args:
            given: all parameters by their `state_dict` names, with or without buffers. Tied weights
                need only one of their names.
            undo: keep the old weights in host memory, to restore them if writing fails. Without it,
                a failed write leaves the weights torn.

        Raises:
            ValueError: for a name that is missing, unknown or given twice, a wrong shape, a dtype
                that differs and is not floating, numbers that are not finite in the model's dtype,
                tied weights that differ, tensors without data (meta device), tensors in the model's
                own storage, or parameters that overlap in memory. Nothing is written then.
            RuntimeError: if a written tensor does not equal the given one. With `undo`, this and
                any other error during writing are raised after the old weights are restored.
        """
        with stage("verify"):
            plan = self._plan(given if isinstance(given, Mapping) else _by_name(given))
        if undo:
            self._replace(plan)
        else:
            self.torn = True
            _write(plan, [])
            self.torn = False

    @torch.no_grad()
    def stage(self, given: Mapping[str, Tensor]) -> Staged:
        """Check new weights, and convert them to the module's dtypes, for `swap`.

        Another thread may run the module meanwhile. Tensors of the right dtype are not copied, so
        they must not change until the swap; for a GPU all are copied to pinned memory.

        Args:
            given: all parameters, as for `load`, in host memory.

        Raises:
            ValueError: as `load` does.
        """
        staged = []
        for write in self._plan(given):
            new = write.source.to(write.target.dtype)
            staged.append((write.target, new.pin_memory() if write.target.is_cuda else new))
        return staged

    @torch.no_grad()
    def swap(self, staged: Staged) -> None:
        """Overwrite the parameters with staged ones. An error leaves the weights torn."""
        self.torn = True
        for target, new in staged:
            _copy(target, new)
        self.torn = False

    def _plan(self, given: Mapping[str, Tensor]) -> list[Write]:
        own = {
            name: t
            for name, t in self._module.state_dict(keep_vars=True).items()
            if isinstance(t, Tensor)
        }
        storages = {t.untyped_storage().data_ptr() for t in own.values()}
        # Keyed by the target's identity: tied weights are one tensor under several names.
        plan: dict[int, Write] = {}
        finite: dict[str, Tensor] = {}
        twins: list[tuple[str, str, Tensor]] = []
        for name in given:
            if name not in own:
                hint = "".join(
                    f" Did you mean '{close}'?" for close in get_close_matches(name, own, n=1)
                )
                raise ValueError(f"the model has no weight '{name}'.{hint}")
            write = Write(name, own[name], given)
            source = write.source
            _check(write, source, storages)
            finite[name] = source.to(write.target.dtype).isfinite().all()
            twin = plan.setdefault(id(write.target), write)
            if twin is not write:
                twins.append(
                    (
                        twin.name,
                        name,
                        (twin.source.to(write.target.dtype) == source.to(write.target.dtype)).all(),
                    )
                )
        missing = [name for name, p in self._module.named_parameters() if id(p) not in plan]
        if missing:
            raise ValueError(
                f"{len(missing)} of the model's weights are missing, first '{missing[0]}'"
            )
        if wrong := first_false(finite):
            raise ValueError(f"weight '{wrong}' is not finite in {own[wrong].dtype}")
        if wrong := first_false({f"'{a}' and '{b}'": same for a, b, same in twins}):
            raise ValueError(
                f"weights {wrong} are tied in the model, but the given tensors differ. Give equal"
                " tensors, or one of them"
            )
        _check_apart(list(plan.values()))
        return list(plan.values())

    def _replace(self, plan: list[Write]) -> None:
        with stage("verify"):
            kept = _copy_to_host([write.target for write in plan])
        begun: list[int] = []
        self.torn = True
        try:
            _write(plan, begun)
        except BaseException:  # not Exception: Ctrl-C must not leave half of the weights new either
            for i in begun:
                _copy(plan[i].target, kept[i])
            self.torn = False
            raise
        self.torn = False


def first_false(flags: Mapping[str, Tensor]) -> str | None:
    """Name of the first 0-dimensional bool that is False, or None. The host waits once per
    device."""
    names: dict[torch.device, list[str]] = {}
    for name, flag in flags.items():
        names.setdefault(flag.device, []).append(name)
    wrong = {
        name
        for own in names.values()
        for name, fine in zip(own, torch.stack([flags[n] for n in own]).tolist(), strict=True)
        if not fine
    }
    return next((name for name in flags if name in wrong), None)


def first_not_finite(tensors: Mapping[str, Tensor]) -> str | None:
    """Name of the first tensor with a NaN or an infinite value, or None.

    All tensors are read in one fused pass. If all values are finite, the host waits for the device
    only once. Integer tensors are skipped.
    """
    read = {n: t.detach() for n, t in tensors.items() if t.is_floating_point() and t.numel()}
    # The largest absolute value of all tensors. Unlike a sum of squares, it cannot overflow.
    if get_total_norm(read.values(), norm_type=math.inf).isfinite():
        return None
    return next((n for n, t in read.items() if not t.isfinite().all()), None)


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
        raise ValueError(
            f"weight '{name}' has shape {list(source.shape)}, but the model's has"
            f" {list(target.shape)}"
        )
    if source.dtype != target.dtype and not (
        source.is_floating_point() and target.is_floating_point()
    ):
        raise ValueError(
            f"weight '{name}' is {source.dtype}, but the model's is {target.dtype}. Only"
            " floating-point dtypes are converted"
        )
    if source.is_meta:
        raise ValueError(f"weight '{name}' has no data: it is on the meta device")
    if source.untyped_storage().data_ptr() in storages:
        raise ValueError(
            f"weight '{name}' is in the model's own storage, so there is nothing to copy. Use a"
            " new version number only"
        )


def _check_apart(plan: list[Write]) -> None:
    """Check that targets do not overlap: writing one would change another."""
    spans = sorted(
        (t.data_ptr(), t.data_ptr() + t.nbytes, write.name)
        for write in plan
        if (t := write.target).nbytes
    )
    for (_, stop, name), (start, _, other) in pairwise(spans):
        if start < stop:
            raise ValueError(
                f"weights '{name}' and '{other}' overlap in memory without being one tensor, so"
                " they cannot be loaded"
            )


def _write(plan: list[Write], begun: list[int]) -> None:
    """Write the tensors one by one. Appends the index of each to `begun` before it is touched."""
    equal: dict[str, Tensor] = {}
    for i, write in enumerate(plan):
        with stage("broadcast", write.target.nbytes):
            new = write.staged()
            begun.append(i)
            _copy(write.target, new)
        with stage("verify"):
            equal[write.name] = (write.target == new).all()
    with stage("verify"):
        wrong = first_false(equal)
    if wrong:
        raise RuntimeError(f"weight '{wrong}' differs from the given tensor after the copy")


def _copy_to_host(targets: list[Tensor]) -> list[Tensor]:
    """Copy tensors to host memory. From a GPU they are copied in a few large buckets."""
    if all(t.is_cpu for t in targets):
        return [t.clone() for t in targets]
    kept: list[Tensor] = []
    for bucket in _buckets(targets):
        flat = torch.cat([t.detach().reshape(-1) for t in bucket]).cpu()
        kept += [
            part.view(t.shape)
            for part, t in zip(flat.split([t.numel() for t in bucket]), bucket, strict=True)
        ]
    return kept


def _buckets(targets: list[Tensor]) -> Iterator[list[Tensor]]:
    """Group neighbouring tensors of one dtype and device, up to BUCKET_BYTES per group."""
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
