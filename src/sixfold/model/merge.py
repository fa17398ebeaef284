"""Merge a LoRA adapter into the weights of its base model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from .lora import LoraAdapter


class MergedWeights(Mapping[str, Tensor]):
    """Weights of the base model by name, with an adapter merged into the weights that it adapts.

    A merged tensor is recomputed on each access, so there is never a second copy of all weights.

    Args:
        base: the model without the adapter. Its weights are not changed.
    """

    def __init__(self, base: PreTrainedModel, adapter: LoraAdapter) -> None:
        self._base = base
        self._adapter = adapter
        self._weights = dict(base.named_parameters())

    def __getitem__(self, name: str) -> Tensor:
        weight = self._weights[name]
        layer = name.removesuffix(".weight")
        if not name.endswith(".weight") or layer not in self._adapter.layers:
            return weight
        return merged_weight(
            weight.detach(),
            self._adapter.layers[layer],
            self._adapter.magnitudes.get(layer),
            transposed=isinstance(self._base.get_submodule(layer), Conv1D),
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


def merged_weight(
    weight: Tensor,
    pair: tuple[Tensor, Tensor],
    magnitude: Tensor | None,
    *,
    transposed: bool = False,
) -> Tensor:
    """Compute W + up @ down. With DoRA, rescale each row of the sum to its `magnitude`.

    LoRA: arXiv:2106.09685, equation 3. DoRA: arXiv:2402.09353, equation 5.

    Args:
        weight: weight of the base, [out, in].
        pair: down [r, in] and up [out, r]. `up` contains the scale.
        magnitude: length of each row, [out]. None for plain LoRA.
        transposed: weight is [in, out] (`Conv1D`).

    Returns:
        The merged weight in float32, in the layout of `weight`.
    """
    down, up = (side.float() for side in pair)
    merged = (weight.T if transposed else weight).float() + up @ down
    if magnitude is not None:
        length = torch.linalg.norm(merged, dim=1)
        merged = merged * (magnitude.float() / length)[:, None]
    return merged.T.contiguous() if transposed else merged


@torch.no_grad()
def merge_into(base: PreTrainedModel, adapter: LoraAdapter) -> None:
    """Overwrite the weights of `base` with the merged ones, in place."""
    merged = MergedWeights(base, adapter)
    for layer in adapter.layers:
        base.get_submodule(layer).get_parameter("weight").copy_(merged[f"{layer}.weight"])
