"""Move the values of a tensor from one layout over the ranks to another.

A layout states the part of the tensor that each rank holds. This part is a box: a range of indices
in every dimension. FSDP gives each rank some rows, tensor parallelism some rows or columns, expert
parallelism some experts. FSDP together with one of the others gives each rank some rows of such a
part. In other layouts, one rank or every rank holds the whole tensor.

All ranks compute the same moves from the two layouts. A rank receives only the values of its new
box, and sends a value at most once to each rank that needs it. So a rank holds the whole tensor
only if the new layout gives it the whole tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

Box = tuple[tuple[int, int], ...]
"""Range [start, stop) of indices in every dimension."""

Layout = Sequence[Box]
"""Box of every rank."""


def whole_box(shape: Sequence[int]) -> Box:
    return tuple((0, size) for size in shape)


def empty_box(shape: Sequence[int]) -> Box:
    """Box without values, for a tensor that has at least one dimension."""
    return tuple((0, 0) for _ in shape)


def split(box: Box, dim: int, parts: int) -> list[Box]:
    """Divide a box along a dimension, as `torch.chunk` does. The last parts may be empty.

    Args:
        parts: number of parts.
    """
    start, stop = box[dim]
    size = -(-(stop - start) // parts)
    bounds = [min(start + i * size, stop) for i in range(parts + 1)]
    return [(*box[:dim], (bounds[i], bounds[i + 1]), *box[dim + 1 :]) for i in range(parts)]


def layout_of(tensor: DTensor) -> dict[int, Box]:
    """Boxes of a sharded tensor: rank -> box.

    A tensor group or an expert group is the last dimension of a mesh. It divides the tensor first.
    Then FSDP divides the part of each rank.
    """
    mesh, boxes = tensor.device_mesh, dict[int, Box]()
    for place in product(*map(range, mesh.shape)):
        box = whole_box(tensor.shape)
        for at, kind, parts in reversed(
            [*zip(place, tensor.placements, mesh.shape, strict=True)],
        ):
            if isinstance(kind, Shard | _StridedShard):
                box = split(box, kind.dim % tensor.ndim, parts)[at]
        boxes[int(mesh.mesh[place])] = box
    return boxes


def at(box: Box, inside: Box) -> tuple[slice, ...]:
    """Index of the values of `box` in a tensor with the values of the larger box `inside`."""
    return tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(box, inside, strict=True))


def extent(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)


class Move(NamedTuple):
    """Values that one rank sends to another, or keeps."""

    source: int
    target: int
    box: Box


def moves(source: Layout, target: Layout) -> list[Move]:
    """Moves from one layout to another. Each rank gets every value of its new box once.

    Several ranks may hold the same box. A rank then uses its own values if it has them; otherwise
    the holders share the work of sending. Different boxes must not overlap.

    Raises:
        ValueError: if `source` does not have every value of `target` exactly once.
    """
    holders: dict[Box, list[int]] = {}
    for rank, box in enumerate(source):
        holders.setdefault(box, []).append(rank)
    found = []
    for rank, wanted in enumerate(target):
        parts = []
        for box, ranks in holders.items():
            common = _overlap(box, wanted)
            if common is not None:
                sender = rank if rank in ranks else ranks[rank % len(ranks)]
                parts.append(Move(sender, rank, common))
        have, need = sum(_volume(part.box) for part in parts), _volume(wanted)
        if have != need:
            raise ValueError(f"rank {rank} needs {need} values, but the ranks have {have} of them")
        found += parts
    return found


def reshard(own: Tensor, source: Layout, target: Layout) -> Tensor:
    """Move a tensor to another layout. All ranks of the run call this with the same layouts.

    Args:
        own: values of this rank's box in `source`.

    Returns:
        Values of this rank's box in `target`.

    Raises:
        ValueError: if `own` does not fit `source`, or if `source` lacks values of `target`.
    """
    rank = dist.get_rank()
    here, there = source[rank], target[rank]
    if tuple(own.shape) != extent(here):
        raise ValueError(f"rank {rank} holds {tuple(own.shape)}, and its box is {here}")
    plan = moves(source, target)
    sent = sorted((m for m in plan if m.source == rank != m.target), key=lambda m: m.target)
    got = sorted((m for m in plan if m.target == rank != m.source), key=lambda m: m.source)
    outgoing = [own[at(m.box, here)].reshape(-1) for m in sent]
    incoming = own.new_empty(sum(_volume(m.box) for m in got))
    dist.all_to_all_single(
        incoming,
        torch.cat(outgoing) if outgoing else own.new_empty(0),
        [sum(_volume(m.box) for m in got if m.source == r) for r in range(len(source))],
        [sum(_volume(m.box) for m in sent if m.target == r) for r in range(len(source))],
    )
    found = own.new_empty(extent(there))
    for move in plan:
        if move.source == move.target == rank:
            found[at(move.box, there)] = own[at(move.box, here)]
    for move, values in zip(got, incoming.split([_volume(m.box) for m in got]), strict=True):
        found[at(move.box, there)] = values.view(extent(move.box))
    return found


def _overlap(a: Box, b: Box) -> Box | None:
    """Box of the values that two boxes have in common. None if they have none."""
    common = tuple((max(p, r), min(q, s)) for (p, q), (r, s) in zip(a, b, strict=True))
    return common if all(start < stop for start, stop in common) else None


def _volume(box: Box) -> int:
    return math.prod(extent(box))
