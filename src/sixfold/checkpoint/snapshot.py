"""Copy tensors to host memory, so that a checkpoint can be written while training goes on."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

import torch
from torch import Tensor


class Snapshots:
    """Copies tensors to host memory. Every call of `take` reuses the memory of the previous call.

    Copies of GPU tensors are in pinned memory, which is the fastest to copy to.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    @torch.no_grad()
    def take(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy all tensors. The copies of the previous call are overwritten.

        Tensors that share their memory, such as tied weights, also share it in the copy.

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
    """Key that is equal for tensors with the same memory, dtype and layout."""
    where = tensor.device, tensor.untyped_storage().data_ptr(), tensor.storage_offset()
    return *where, tensor.dtype, tensor.shape, tensor.stride()


def _buffer(old: Tensor | None, like: Tensor) -> Tensor:
    """Host memory for a copy of `like`: the old buffer if it fits, otherwise a new one."""
    if old is not None and (old.shape, old.dtype) == (like.shape, like.dtype):
        return old
    return torch.empty(like.shape, dtype=like.dtype, pin_memory=like.is_cuda)
