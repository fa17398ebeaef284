"""Simulate quantised weights: int8 with one scale per output channel, or fp8 with one per tensor.

The result is float32 again. Log-probs change as they would with real int8 or fp8 (e4m3) weights,
but neither memory nor time is saved.

A scale has the 8 significant bits of bfloat16. Its product with an int8 (7 bits) or e4m3 (4 bits)
number is therefore exact in float32. The only error is that of the format, and quantising twice
changes no bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ..kernels.cpu.round_kernels import round_kernels

Form = Literal["int8", "fp8"]

INT8_MAX = 127.0
E4M3_MAX = 448.0
LEAST_SCALE = 2.0**-100
"""Smallest scale.

It prevents a division by zero for a channel of zeros, and subnormal float32 products.
"""


@dataclass(frozen=True)
class Quantised:
    """A quantised weight.

    Attributes:
        numbers: int8 or float8_e4m3fn, in the shape of the weight.
        scale: float32 value of the number 1, per output channel or for the whole tensor.
    """

    numbers: Tensor
    scale: Tensor

    def values(self) -> Tensor:
        """Dequantised float32 weights, exactly numbers * scale."""
        return self.numbers.float() * self.scale


def to_int8(w: Tensor, outputs: int = 0) -> Quantised:
    """Quantise a matrix to int8, from -127 to 127, with one scale per output channel.

    The error |w - values| is at most scale / 2, up to the float32 rounding of w / scale. A channel
    with a non-finite value becomes NaN.

    Args:
        w: weight with two dimensions.
        outputs: dimension of the output channels.
    """
    w = w.float()
    scale = _scale(w.abs().amax(1 - outputs, keepdim=True), INT8_MAX)
    return Quantised((w / scale).round().clamp(-INT8_MAX, INT8_MAX).to(torch.int8), scale)


def to_fp8(w: Tensor) -> Quantised:
    """Quantise a tensor of any shape to float8_e4m3fn. The largest value is near 448.

    The error |w - values| is at most |w| / 16 where |w| >= scale / 64. Below that, where e4m3 has
    no smaller exponent, it is at most scale / 1024. A tensor with a non-finite value becomes NaN.
    """
    w = w.float()
    scale = _scale(w.abs().amax(), E4M3_MAX)
    # Clamp: older PyTorch turns 465 into NaN.
    return Quantised((w / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), scale)


def _scale(largest: Tensor, most: float) -> Tensor:
    return (largest / most).bfloat16().float().clamp_min(LEAST_SCALE)


class QuantisedWeights(Mapping[str, Tensor]):
    """Weights of a model by name, with the matrices of its linear layers quantised.

    A quantised tensor is recomputed from the current weights on each access, so there is never a
    second copy of all weights.
    """

    def __init__(
        self, model: PreTrainedModel, form: Form, weights: Mapping[str, Tensor] | None = None
    ) -> None:
        """Wrap a model without modifying its weights.

        Args:
            model: the policy.
            form: the format.
            weights: weights to use instead of the model's own, by name. None: the model's own.
        """
        self._form = form
        self._own = dict(model.named_parameters())
        self._weights = self._own if weights is None else weights
        self._outputs = _linear(model)

    def __getitem__(self, name: str) -> Tensor:
        weight, own = self._weights[name], self._own[name]
        if id(own) not in self._outputs:
            return weight
        return rounded(weight.detach(), self._form, self._outputs[id(own)])

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


def quantised_weights(
    model: PreTrainedModel, form: Form, weights: Mapping[str, Tensor] | None = None
) -> QuantisedWeights:
    """Weights of the model as an int8 or fp8 engine would hold them.

    Not quantised: embeddings and the head, tied or not; norms; biases; and matrices outside a
    linear layer, such as stacked experts and their router. vLLM and llm-compressor also keep the
    head, because every log-prob depends on it directly.

    Args:
        model: the policy.
        form: the format.
        weights: weights to use instead of the model's own, by name. None: the model's own.
    """
    return QuantisedWeights(model, form, weights)


def quantised_share(model: PreTrainedModel) -> float:
    """Share of the model's parameters that `quantised_weights` rounds."""
    outputs = _linear(model)
    return sum(p.numel() for p in model.parameters() if id(p) in outputs) / sum(
        p.numel() for p in model.parameters()
    )


def _linear(model: PreTrainedModel) -> dict[int, int]:
    """Map from the id of each matrix to be quantised to the dimension of its output channels."""
    apart = {
        id(layer.weight) for layer in (model.get_input_embeddings(), model.get_output_embeddings())
    }
    kinds = [
        (module.weight, int(isinstance(module, Conv1D)))
        for module in model.modules()
        if isinstance(module, nn.Linear | Conv1D)
    ]
    return {id(weight): outputs for weight, outputs in kinds if id(weight) not in apart}


def rounded(w: Tensor, form: Form, outputs: int = 0) -> Tensor:
    """Values of a matrix after quantisation. On CPUs, scale and cast are one fused pass.

    Both ways give the same bits.

    Args:
        w: weight with two dimensions.
        form: the format.
        outputs: dimension of the output channels.
    """
    kernels = round_kernels() if w.device.type == "cpu" else None
    if kernels and not (form == "int8" and outputs):
        return kernels.rounded(w.float().contiguous(), form)
    return (to_int8(w, outputs) if form == "int8" else to_fp8(w)).values()
