"""Log-probs and entropies of a linear output head on the CPU, tile by tile.

A tile holds the logits of some positions for some tokens of the vocabulary, and fits in the cache.
One pass over a tile updates a running maximum and running sums for each position, from which
log-prob and entropy follow (Milakov & Gimelshein 2018, arXiv:1805.02867). So no table of logits
exists.

With a frozen head (LoRA) the forward pass also computes the gradient of each log-prob with respect
to its hidden state: weight[target] - Σ_v p_v weight[v]. The sum is rescaled from tile to tile, as
in FlashAttention (arXiv:2205.14135). The backward pass then only scales this gradient, and does not
compute logits again.

With `HeadSettings.direct` the gradient of the head's weight is added to its `.grad` as it is
computed, so it never exists beside `.grad`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ..batch import KeptSets
from ..kernels.cpu.head_kernels import HeadKernels, head_kernels
from .head_settings import HeadSettings

ROWS, COLUMNS = 512, 2048
"""Largest tile: positions and tokens of the vocabulary (4 MB)."""


def tile_kernels(
    head: nn.Linear, settings: HeadSettings, kept: KeptSets | None
) -> HeadKernels | None:
    """Kernels for `TiledHead`. None if it is not supported or would not help.

    It supports float32 on a CPU with a C compiler, without truncated distributions, soft caps and
    gradients of entropies. It does not help if the vocabulary fits in one tile.

    Args:
        settings: temperature, precision and soft cap.
        kept: token sets after truncation, or None.
    """
    weight = head.weight
    plain = settings.finish.cap is None and settings.product is None and kept is None
    if settings.entropy_gradient or not plain or len(weight) <= COLUMNS:
        return None
    fits = weight.device.type == "cpu" and weight.dtype == torch.float32 and weight.is_contiguous()
    return head_kernels() if fits else None


class TiledHead(torch.autograd.Function):
    """Autograd function: hidden [S, H], weight [V, H], bias [V] or None -> two [S] tensors.

    The results are log-probs and entropies. `trains` of `forward` says whether a backward pass may
    follow.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        settings: HeadSettings,
        kernels: HeadKernels,
        trains: bool,
    ) -> tuple[Tensor, Tensor]:
        tiles = _Tiles(hidden, weight, bias, settings)
        stats = torch.zeros(len(hidden), 4)
        stats[:, 0] = -torch.inf
        for_hidden, *for_head = ctx.needs_input_grad[:3]
        frozen = trains and for_hidden and not any(for_head)
        mean = torch.zeros_like(hidden) if frozen else None
        factors = torch.empty(ROWS)
        for rows, columns, tile in tiles:
            about = tile, columns.start, target[rows], stats[rows]
            if mean is None:
                kernels.fold(*about)
                continue
            kernels.fold(*about, factors)
            mean[rows].mul_(factors[: len(tile), None]).addmm_(tile, weight[columns])
        most, total, weighted, chosen = stats.unbind(1)
        norm = total.log()
        if mean is None:
            ctx.save_for_backward(hidden, weight, bias, target, most + norm)
        else:  # d log-prob / d hidden = weight[target] - mean of all rows of weight under p
            slope = weight.index_select(0, target).sub_(mean.div_(total[:, None]))
            ctx.save_for_backward(slope.mul_(settings.factor))
        ctx.settings, ctx.kernels, ctx.frozen = settings, kernels, frozen
        entropy = norm - weighted / total
        ctx.mark_non_differentiable(entropy)
        ctx.set_materialize_grads(False)
        return chosen - most - norm, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gain: Tensor | None, _: Tensor | None) -> Any:
        """Gradients of hidden, weight and bias, each only if it is needed."""
        if gain is None:
            return (None,) * 7
        if ctx.frozen:
            (slope,) = ctx.saved_tensors
            return slope * gain[:, None], *(None,) * 6
        hidden, weight, bias, target, norm = ctx.saved_tensors
        for_hidden, for_weight, for_bias = ctx.needs_input_grad[:3]
        tiles = _Tiles(hidden, weight, bias, ctx.settings)
        hidden_sum = torch.zeros_like(hidden) if for_hidden else None
        weight_sum, given = _sum_of(weight, for_weight, ctx.settings.direct)
        bias_sum, bias_given = _sum_of(bias, for_bias, ctx.settings.direct)
        gain = gain.contiguous()
        for rows, columns, tile in tiles:
            ctx.kernels.gradient(tile, columns.start, target[rows], norm[rows], gain[rows])
            if hidden_sum is not None:
                hidden_sum[rows].addmm_(tile, weight[columns], alpha=ctx.settings.factor)
            if weight_sum is not None:
                weight_sum[columns].addmm_(tile.t(), tiles.states[rows])
            if bias_sum is not None:
                bias_sum[columns].add_(tile.sum(0), alpha=ctx.settings.factor)
        return hidden_sum, given, bias_given, None, None, None, None


def _sum_of(
    parameter: Tensor | None, needed: bool, direct: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Tensor in which to sum a parameter's gradient, and the gradient that backward returns.

    Args:
        parameter: the parameter, or None.
        direct: sum in the parameter's `.grad`. Backward then returns None.
    """
    if parameter is None or not needed:
        return None, None
    if not direct:
        made = torch.zeros_like(parameter)
        return made, made
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad, None


class _Tiles:
    """Iterates over the tiles of logits, which share one buffer.

    Attributes:
        states: [S, H] hidden states times the factor between matrix product and logits.
    """

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, settings: HeadSettings
    ) -> None:
        factor = settings.factor
        self.states = hidden if factor == 1.0 else hidden * factor
        self._bias = bias if bias is None or factor == 1.0 else bias * factor
        self._weight = weight
        self._buffer = torch.empty(min(ROWS, len(hidden)) * COLUMNS)

    def __iter__(self) -> Iterator[tuple[slice, slice, Tensor]]:
        """Positions, tokens and logits of each tile. The logits may be overwritten."""
        for first in range(0, len(self._weight), COLUMNS):
            columns = slice(first, min(first + COLUMNS, len(self._weight)))
            part = self._weight[columns].t()
            bias = None if self._bias is None else self._bias[columns]
            for start in range(0, len(self.states), ROWS):
                rows = slice(start, min(start + ROWS, len(self.states)))
                shape = rows.stop - start, columns.stop - first
                tile = self._buffer[: shape[0] * shape[1]].view(shape)
                torch.mm(self.states[rows], part, out=tile)
                yield rows, columns, tile if bias is None else tile.add_(bias)
