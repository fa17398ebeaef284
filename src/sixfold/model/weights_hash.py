"""Hash of a model's weights, by which files say which model has made them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor


def weights_hash(weights: Iterable[tuple[str, Tensor]]) -> str:
    """Hash of the names and the bytes of weights, in the order of the names."""
    digest = hashlib.sha256()
    for name, tensor in sorted(weights, key=lambda item: item[0]):
        digest.update(name.encode())
        digest.update(
            tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        )
    return digest.hexdigest()
