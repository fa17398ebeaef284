"""Convert the parameters of a model to those of its checkpoint, one by one."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from ..backends.weight_files import FileForm
from ..sync.versioned import every_name


def checkpoint_form(model: PreTrainedModel) -> FileForm:
    """Names and parts that the parameters of a model have in a checkpoint.

    Some have other names there. A tied parameter has several names, and stacked experts are
    separate tensors. Call this before the model is sharded.
    """
    every: dict[str, list[str]] = {}
    for name, first in every_name(model).items():
        every.setdefault(first, []).append(name)

    def parts(name: str, tensor: Tensor) -> Mapping[str, Tensor]:
        return revert_weight_conversion(model, dict.fromkeys(every[name], tensor))

    empty = {name: torch.empty_like(p, device="meta") for name, p in model.named_parameters()}
    found = {k: t for name, tensor in empty.items() for k, t in parts(name, tensor).items()}
    return FileForm(tuple(found), sum(tensor.numel() for tensor in found.values()), parts)
