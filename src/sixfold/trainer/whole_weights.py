"""Whole weights of a sharded module, gathered from all ranks in buckets.

Most tensors of a model are small, so one collective call per tensor would cost more than the
transfer of its bytes. Therefore neighbouring tensors are gathered together, in one buffer. No value
changes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers import PreTrainedModel

from ..model.empty import Architecture, copy_buffers
from .sharded import in_rank_group, whole

BUCKET_BYTES = 1 << 26
"""Maximum bytes of the whole tensors in one buffer. A larger tensor gets its own buffer."""


class WholeWeights(Mapping[str, Tensor]):
    """Parameters of a sharded module by name. Reading one gathers its bucket from all ranks.

    Every rank must read the same names in the same order. The last bucket is kept, so reading the
    weights in the order of their names gathers each bucket once.
    """

    def __init__(self, module: nn.Module) -> None:
        self._parameters = {name: p.detach() for name, p in module.named_parameters()}
        self._buckets = _buckets(self._parameters)
        self._bucket_of = {name: i for i, names in enumerate(self._buckets) for name in names}
        self._last = -1
        self._gathered: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._bucket_of:
            return whole(self._parameters[name])
        index = self._bucket_of[name]
        if index != self._last:
            self._gathered = {}  # free the last bucket before the next one is gathered
            self._gathered = self._gather(self._buckets[index])
            self._last = index
        return self._gathered[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)

    def _gather(self, names: Sequence[str]) -> dict[str, Tensor]:
        parts = [self._parameters[name] for name in names]
        first = parts[0]
        assert isinstance(first, DTensor)
        axis = _row_axis(first)
        assert axis is not None
        ranks, shapes = first.device_mesh.size(axis), [p.shape for p in parts]
        sent = pack([p.to_local() for p in parts if isinstance(p, DTensor)], shapes, ranks)
        shard = DTensor.from_local(sent, first.device_mesh, first.placements, run_check=False)
        received = shard.full_tensor().view(ranks, -1)
        return dict(zip(names, unpack(received, shapes), strict=True))


@torch.no_grad()
def whole_model(model: PreTrainedModel) -> PreTrainedModel:
    """A frozen copy of a sharded model in one piece. All ranks must call this."""
    copy = Architecture.of(model).build("placement.kind = 'local'").to(model.device)  # type: ignore[arg-type]
    copy_buffers(copy, dict(model.named_buffers()))
    weights = WholeWeights(model)
    for name, parameter in copy.named_parameters():
        parameter.data = weights[name].clone()
    return copy


def pack(parts: Sequence[Tensor], shapes: Sequence[torch.Size], ranks: int) -> Tensor:
    """Copy one rank's rows of several tensors into one buffer.

    Args:
        parts: this rank's rows of each tensor. The last ranks may have fewer rows, or none.
        ranks: number of ranks.

    Returns:
        A vector of the same length on every rank. Missing rows are zeros.
    """
    edges = _edges(shapes, ranks)
    buffer = parts[0].new_zeros(edges[-1])
    for part, start in zip(parts, edges, strict=False):
        buffer[start : start + part.numel()] = part.reshape(-1)
    return buffer


def unpack(received: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """Restore whole tensors from the buffers of all ranks.

    Args:
        received: [ranks, length] buffers that `pack` has made.
    """
    found = []
    for shape, (start, stop) in zip(shapes, pairwise(_edges(shapes, len(received))), strict=True):
        rows = received[:, start:stop].reshape(-1, *shape[1:])
        found.append(rows[: shape[0]])  # the missing rows of the last ranks are at the end
    return found


def _edges(shapes: Sequence[torch.Size], ranks: int) -> list[int]:
    """Start of each tensor in a rank's buffer, and end of the last tensor."""
    edges = [0]
    for shape in shapes:
        edges.append(edges[-1] + -(-shape[0] // ranks) * math.prod(shape[1:]))
    return edges


def _row_axis(tensor: Tensor) -> int | None:
    """Axis of the mesh over which the rows of a tensor are sharded.

    None for a tensor that is sharded in another way, or whose mesh has groups of ranks.
    """
    if not isinstance(tensor, DTensor) or in_rank_group(tensor):
        return None
    split = [i for i, p in enumerate(tensor.placements) if not isinstance(p, Replicate)]
    by_rows = len(split) == 1 and tensor.placements[split[0]] == Shard(0)
    return split[0] if by_rows else None


def _buckets(tensors: Mapping[str, Tensor]) -> list[list[str]]:
    """Names of tensors that are gathered together. Tensors in no bucket are gathered one by one."""
    buckets: list[list[str]] = []
    kind, full = None, 0
    for name, tensor in tensors.items():
        axis = _row_axis(tensor)
        if axis is None or not isinstance(tensor, DTensor):
            continue
        own = (tensor.device_mesh, axis, tensor.dtype)
        if own != kind or full + tensor.nbytes > BUCKET_BYTES:
            buckets.append([])
            kind, full = own, 0
        buckets[-1].append(name)
        full += tensor.nbytes
    return buckets
