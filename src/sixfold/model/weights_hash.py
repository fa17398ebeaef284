"""Hash of a model's weights, by which files say which model has made them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def weights_hash(weights: Mapping[str, Tensor]) -> str:
    """Hash of the names and the bytes of weights, in the order of the names.

    One tensor is read after the other, so weights that are gathered need no room for all. If some
    are sharded, all ranks call this at the same time.
    """
    digest = hashlib.sha256()
    for name in sorted(weights):
        tensor = weights[name]
        if isinstance(tensor, DTensor):
            tensor = tensor.full_tensor()
        digest.update(name.encode())
        digest.update(
            tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        )
    return digest.hexdigest()
