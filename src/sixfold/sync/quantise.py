"""Weights as a quantised engine would hold them: int8 with a scale for each output channel, or fp8 (e4m3) with one for the tensor.

Simulated: what comes out is float32 again, so log-probs move as they would on real int8 or fp8 weights, and neither memory nor time is saved.

A scale has the 8 significant bits of bfloat16. Its product with an int8 number (7 bits) or an e4m3 number (4 bits) is then exact in float32: the
error is the format's alone, and quantising what is quantised already changes no bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

INT8_MAX = 127.0
E4M3_MAX = 448.0
LEAST_SCALE = 2.0**-100
"""A channel of zeros would divide by zero; and from here on no product with a scale is subnormal in float32."""


@dataclass(frozen=True)
class Quantised:
    """numbers: int8 or float8_e4m3fn, in the weight's shape. scale: what a 1 of them stands for, float32, one for each channel or for all."""

    numbers: Tensor
    scale: Tensor

    def values(self) -> Tensor:
        """The weights that are computed with, float32, exactly numbers * scale."""
        return self.numbers.float() * self.scale


def to_int8(w: Tensor, outputs: int = 0) -> Quantised:
    """w [.., ..] with its output channels along dimension `outputs` -> whole numbers from -127 to 127, the largest of each channel near 127.

    |w - values| <= scale / 2 (up to float32's rounding of w / scale). A channel that is not finite comes out as NaN.
    """
    w = w.float()
    scale = _scale(w.abs().amax(1 - outputs, keepdim=True), INT8_MAX)
    return Quantised((w / scale).round().clamp(-INT8_MAX, INT8_MAX).to(torch.int8), scale)


def to_fp8(w: Tensor) -> Quantised:
    """w, of any shape -> float8_e4m3fn, the largest near 448.

    |w - values| <= |w| / 16 where |w| >= scale / 64, and <= scale / 1024 below, where e4m3 has no smaller exponent. A tensor that is not finite comes
    out as NaN.
    """
    w = w.float()
    scale = _scale(w.abs().amax(), E4M3_MAX)
    return Quantised((w / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), scale)  # clamped: older PyTorch makes NaN of 465


def _scale(largest: Tensor, most: float) -> Tensor:
    return (largest / most).bfloat16().float().clamp_min(LEAST_SCALE)


class QuantisedWeights(Mapping[str, Tensor]):
    """The model's weights by name, the matrices of its linear layers quantised, the others its own.

    A quantised tensor is made anew each time that it is asked for, from the weights of then, so
    that there is never a second table of weights.
    """

    def __init__(self, model: PreTrainedModel, form: str) -> None:
        """form: int8 or fp8."""
        self._form = form
        self._weights = dict(model.named_parameters())
        self._outputs = _linear(model)

    def __getitem__(self, name: str) -> Tensor:
        weight = self._weights[name]
        if id(weight) not in self._outputs:
            return weight
        return _rounded(weight.detach(), self._form, self._outputs[id(weight)])

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


def quantised_weights(model: PreTrainedModel, form: str) -> QuantisedWeights:
    """The model's weights as an engine in int8 or fp8 would have them.

    Left as they are: embeddings and the head, tied or not (vLLM and llm-compressor leave it too: it decides every log-prob directly), norms, biases,
    and matrices outside a linear layer, such as stacked experts and their router.
    """
    return QuantisedWeights(model, form)


def quantised_share(model: PreTrainedModel) -> float:
    """Share of the model's numbers that `quantised_weights` rounds."""
    outputs = _linear(model)
    return sum(p.numel() for p in model.parameters() if id(p) in outputs) / sum(p.numel() for p in model.parameters())


def _linear(model: PreTrainedModel) -> dict[int, int]:
    """Identity of each matrix to be quantised -> the dimension of its outputs."""
    apart = {id(layer.weight) for layer in (model.get_input_embeddings(), model.get_output_embeddings())}
    kinds = [(module.weight, int(isinstance(module, Conv1D))) for module in model.modules() if isinstance(module, nn.Linear | Conv1D)]
    return {id(weight): outputs for weight, outputs in kinds if id(weight) not in apart}


def _rounded(w: Tensor, form: str, outputs: int) -> Tensor:
    quantised = to_int8(w, outputs) if form == "int8" else to_fp8(w)
    return quantised.values()
