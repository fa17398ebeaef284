"""The linear layers and norms of one decoder layer, on the CPU kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from ..kernels.cpu.body_kernels import BodyKernels, CLayer, CNorm, Packed
from .base import LayerAdditions

Weights = Mapping[str, Tensor | None]
"""A module's parameter dictionary.

Parameters are looked up at every use, so a replaced one is seen.
"""


@dataclass(frozen=True)
class Norm:
    weights: Weights
    epsilon: float

    @property
    def weight(self) -> Tensor:
        return self.weights["weight"]  # type: ignore[return-value]

    def as_c(self) -> CNorm:
        return CNorm(self.weight.data_ptr(), self.epsilon)


@dataclass
class Linear:
    """Linear layers with the same input, computed as one matrix product.

    Attributes:
        parts: parameter dictionary of each layer.
        packed: packed copy of the layers' weights, made at the first use.
        half: pack the weights in bfloat16.
    """

    parts: list[Weights]
    paths: list[str]
    packed: Packed | None = None
    half: bool = False

    def pack(self, kernels: BodyKernels) -> Packed:
        """Packed copy of the layers' weights. It is made if there is none."""
        if self.packed is None:
            weights = [part["weight"] for part in self.parts]
            biases = [part.get("bias") for part in self.parts]
            self.packed = kernels.pack(weights, biases, self.half)  # type: ignore[arg-type]
        return self.packed

    def run(
        self,
        kernels: BodyKernels,
        x: Tensor,
        out: Tensor,
        additions: LayerAdditions | None,
        *,
        add: bool = False,
    ) -> None:
        """Write x W^T + b and the additions to `out`. With `add`, add them to `out` instead.

        Args:
            kernels: computes the product.
            x: input [N, inputs].
            out: results of all layers side by side, [N, outputs].
            additions: added to each layer's columns of `out`; None for none.
            add: keep the values of `out` as a summand.
        """
        kernels.product(x, self.pack(kernels), out, add=add)
        if additions is not None:
            for path, own in zip(
                self.paths, out.split([rows_of(part) for part in self.parts], dim=1), strict=True
            ):
                additions.add(path, x, own)


@dataclass(frozen=True)
class DecoderLayer:
    """The linear layers and norms of one decoder layer.

    `heads`: query and key norms, if there are any.
    """

    qkv: Linear
    output: Linear
    gate_up: Linear
    down: Linear
    before_attention: Norm
    before_mlp: Norm
    heads: tuple[Norm, Norm] | None

    def as_c(self, kernels: BodyKernels) -> CLayer:
        linears = (
            linear.pack(kernels).as_c()
            for linear in (self.qkv, self.output, self.gate_up, self.down)
        )
        heads = (norm.as_c() for norm in self.heads) if self.heads else (CNorm(), CNorm())
        return CLayer(*linears, self.before_attention.as_c(), self.before_mlp.as_c(), *heads)


def layer_of(block: nn.Module, path: str) -> DecoderLayer:
    attention = block.get_submodule("self_attn")

    def linear(room: str, *names: str) -> Linear:
        return Linear(
            [block.get_submodule(f"{room}.{name}")._parameters for name in names],
            [f"{path}.{room}.{name}" for name in names],
        )

    return DecoderLayer(
        linear("self_attn", "q_proj", "k_proj", "v_proj"),
        linear("self_attn", "o_proj"),
        linear("mlp", "gate_proj", "up_proj"),
        linear("mlp", "down_proj"),
        norm_of(block.get_submodule("input_layernorm")),
        norm_of(block.get_submodule("post_attention_layernorm")),
        (
            (norm_of(attention.get_submodule("q_norm")), norm_of(attention.get_submodule("k_norm")))
            if "q_norm" in attention._modules
            else None
        ),
    )


def norm_of(module: nn.Module) -> Norm:
    return Norm(module._parameters, module.variance_epsilon)  # type: ignore[arg-type]


def rows_of(weights: Weights, dimension: int = 0) -> int:
    return weights["weight"].shape[dimension]  # type: ignore[union-attr]
