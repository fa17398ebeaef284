"""Copies of tensors in host memory, so that a checkpoint can be written while training goes on."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

import torch
from torch import Tensor


class Snapshots:
    """Copies tensors to host memory. The next copy uses the same memory again.

    Memory for tensors on a GPU is pinned: they are copied at the speed of the bus.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    @torch.no_grad()
    def take(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy all tensors. Nobody may still read the copies of the call before.

        Tensors that are one in memory, such as tied weights, are one in the copy too.

        Args:
            tensors: tensors by name, on any device.

        Returns:
            The copies by name. They are valid until the next call.
        """
        before, self._buffers = self._buffers, {}
        copies: dict[str, Tensor] = {}
        names: dict[Hashable, str] = {}
        for name, tensor in tensors.items():
            first = names.setdefault(_memory(tensor), name)
            if first == name:
                self._buffers[name] = _buffer(before.get(name), tensor)
                self._buffers[name].copy_(tensor, non_blocking=True)
            copies[name] = self._buffers[first]
        for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        return copies


def _memory(tensor: Tensor) -> Hashable:
    """Equal for tensors that are one in memory."""
    where = tensor.device, tensor.untyped_storage().data_ptr(), tensor.storage_offset()
    return *where, tensor.dtype, tensor.shape, tensor.stride()


def _buffer(old: Tensor | None, like: Tensor) -> Tensor:
    if old is not None and (old.shape, old.dtype) == (like.shape, like.dtype):
        return old
    return torch.empty(like.shape, dtype=like.dtype, pin_memory=like.is_cuda)
