"""Log-probs and entropies of a linear output head, with one table of logits in memory at a time.

Autograd would keep the logits of every position for the backward pass, and several tables of that
size during it. `fused_scores` works on chunks of positions instead. The forward pass keeps one
number per position, and the table of the chunk that it computes last. The backward pass begins with
that chunk, and computes the logits of the other chunks again. It replaces each table by its
gradient in place, and adds the chunk's share to one gradient of the head's weight.

In float32 the scores have the same bits as `log_softmax` of the logits, chunk by chunk. On a CPU
`tiled_head.py` computes most large heads instead, in less memory and time, up to rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ..batch import KeptSets
from ..model.head import wide_mm, wide_products
from .head_settings import HeadSettings
from .tiled_head import TiledHead, tile_kernels

SLICE = 1 << 24
"""Maximum numbers in one temporary product that is added to the weight's gradient (67 MB)."""
ENTROPY_TABLE = 1 << 22
"""Maximum number of log-probs whose entropies are computed at once: two tables of 17 MB."""


def fused_scores(
    head: nn.Linear,
    hidden: Tensor,
    target: Tensor,
    settings: HeadSettings,
    kept: KeptSets | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-prob and entropy of each target token.

    Args:
        hidden: [S, hidden] hidden states.
        target: [S] token ids.
        settings: temperature, chunk size and precision.
        kept: [S] token sets after truncation. Other logits count as -inf.

    Returns:
        (log-prob of the target, entropy), each [S] float32 (float64 for a float64 head).
    """
    kernels = tile_kernels(head, settings, kept)
    if kernels is not None and hidden.dtype == torch.float32:
        given = head.weight, head.bias, target.contiguous(), settings, kernels
        return TiledHead.apply(hidden.contiguous(), *given, torch.is_grad_enabled())
    with _without_autocast(hidden.device.type):
        logp, entropy = FusedHead.apply(hidden, head.weight, head.bias, target, kept, settings)
    return logp, entropy


def _without_autocast(device: str) -> AbstractContextManager[Any]:
    """Context in which autocast is off. The meta device has no autocast."""
    if not torch.amp.autocast_mode.is_autocast_available(device):
        return nullcontext()
    return torch.autocast(device, enabled=False)


class FusedHead(torch.autograd.Function):
    """Autograd function: hidden [S, H], weight [V, H], bias [V] or None -> two [S] tensors.

    The results are log-probs and entropies. See `fused_scores`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        kept: KeptSets | None,
        settings: HeadSettings,
    ) -> tuple[Tensor, Tensor]:
        table = _Table(weight, bias, settings)
        parts, last = [], None
        for at, inside in reversed([*_chunks(len(hidden), settings.chunk, kept)]):
            last = None  # free it before the next one is computed
            last = table.logp(hidden[at], inside)[0]
            parts.append(_scores(last, target[at]))
        logp, entropy = (torch.cat(column) for column in zip(*reversed(parts), strict=True))
        ctx.save_for_backward(hidden, weight, bias, target, entropy)
        ctx.kept, ctx.settings = kept, settings
        # The backward pass begins with this chunk. With a soft cap it needs a second table.
        reusable = any(ctx.needs_input_grad) and settings.finish.cap is None
        ctx.first = last if reusable else None
        if not settings.entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        ctx.set_materialize_grads(False)
        return logp, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, logp_grad: Tensor | None, entropy_grad: Tensor | None) -> Any:
        """Gradients of hidden, weight and bias, each only if it is needed."""
        hidden, weight, bias, target, entropy = ctx.saved_tensors
        if logp_grad is None and entropy_grad is None:
            return (None,) * 6
        if logp_grad is None:
            logp_grad = torch.zeros_like(entropy)
        table = _Table(weight, bias, ctx.settings)
        sums = _Sums(hidden, table, *ctx.needs_input_grad[:3])
        kept_table, ctx.first = ctx.first, None  # a second backward pass computes it again
        for at, inside in _chunks(len(hidden), ctx.settings.chunk, ctx.kept):
            if kept_table is None:
                grad, capped = table.logp(hidden[at], inside, keep_cap=True)
            else:
                grad, capped, kept_table = kept_table, None, None
            gains = None if entropy_grad is None else (entropy_grad[at], entropy[at])
            grad = _score_gradient(grad, target[at], logp_grad[at], gains)
            sums.add(at, _finish_gradient(grad, capped, ctx.settings))
            del grad, capped  # else they would be alive beside the next chunk's table
        return sums.hidden, sums.weight, sums.bias, None, None, None


class _Table:
    """Computes log-probs of one chunk of positions.

    Args:
        weight: [V, H] weight of the head. It is converted once to the dtype of the matrix product.
        bias: [V], or None.
        settings: temperature, precision and soft cap.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, settings: HeadSettings) -> None:
        self.settings = settings
        self.wide = settings.product is not None and wide_products(weight.device.type)
        if settings.product is not None:
            weight = weight.to(settings.product)
        self.weight = weight if self.wide or settings.product is None else weight.float()
        self.bias = bias

    def factor(self, hidden: Tensor) -> Tensor:
        """Hidden states in the dtype of the matrix product."""
        if self.settings.product is not None:
            hidden = hidden.to(self.settings.product)
        return hidden if self.wide else hidden.to(self.weight.dtype)

    def logp(
        self, hidden: Tensor, kept: KeptSets | None, keep_cap: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the logits of a chunk, and overwrite them with their log-softmax.

        Args:
            hidden: [C, H] hidden states of the chunk.
            kept: [C] token sets after truncation. None: the whole vocabulary.
            keep_cap: also return the tanh of the soft cap, which the backward pass needs.

        Returns:
            Log-probs [C, V], and tanh values [C, V] or None.
        """
        x = self.factor(hidden)
        if self.wide:
            z = wide_mm(x, self.weight.t())
            if self.bias is not None:
                z += self.bias
        else:
            bias = None if self.bias is None else self.bias.to(self.weight.dtype)
            z = F.linear(x, self.weight, bias)
            z = z.to(torch.promote_types(z.dtype, torch.float32))
        z, capped = self.settings.finish.apply_(z, keep_cap)
        if self.settings.temperature != 1.0:
            z = z.div_(self.settings.temperature)
        if kept is not None:
            z = z.masked_fill_(kept.excluded(z.shape[-1]), -torch.inf)
        return torch.log_softmax(z, -1, dtype=None, out=z), capped


class _Sums:
    """Gradients of hidden states, weight and bias, added up over the chunks.

    Args:
        hidden: [S, H] hidden states.
        table: supplies the head's weight and its dtype.
    """

    def __init__(
        self, hidden: Tensor, table: _Table, for_hidden: bool, for_weight: bool, for_bias: bool
    ) -> None:
        self._states, self._table, self._begun = hidden, table, False
        wide = torch.promote_types(torch.float32, table.weight.dtype)
        self.hidden = torch.empty_like(hidden) if for_hidden else None
        # Float32 also for a bfloat16 weight: small shares would vanish in a bfloat16 sum.
        self.weight = torch.empty_like(table.weight, dtype=wide) if for_weight else None
        self.bias = table.weight.new_zeros(len(table.weight), dtype=wide) if for_bias else None

    def add(self, at: slice, grad: Tensor) -> None:
        """Add the share of a chunk.

        Args:
            grad: [C, V] gradient of the logits.
        """
        table, x = self._table, self._table.factor(self._states[at])
        if self.bias is not None:
            self.bias += grad.sum(0)
        grad = grad.to(x.dtype)
        if self.hidden is not None:
            share = grad @ table.weight
            rounded = share if table.settings.product is None else share.to(table.settings.product)
            self.hidden[at] = rounded
        if self.weight is not None:
            product = wide_mm if table.wide else torch.mm
            rows = max(1, SLICE // max(1, x.shape[-1]))
            for total, part in zip(self.weight.split(rows), grad.split(rows, -1), strict=True):
                share = product(part.t(), x)
                _ = total.add_(share) if self._begun else total.copy_(share)
        self._begun = True


def _chunks(
    count: int, size: int, kept: KeptSets | None
) -> Iterator[tuple[slice, KeptSets | None]]:
    """Chunks of `count` positions, with their token sets."""
    starts = range(0, max(1, count), size)  # without positions there is one empty chunk
    sets = [None] * len(starts) if kept is None else kept.split(size)
    for start, inside in zip(starts, sets, strict=True):
        yield slice(start, min(count, start + size)), inside


def _scores(logp: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probs of the targets and entropies, [C] each, from log-probs [C, V]."""
    rows = max(1, ENTROPY_TABLE // logp.shape[-1])
    # Clamped: 0 * -inf would be NaN for a token that truncation excludes.
    entropy = [-part.exp().mul_(part.clamp_min(-1e4)).sum(-1) for part in logp.split(rows)]
    return logp.gather(-1, target[:, None])[:, 0], torch.cat(entropy)


def _score_gradient(
    logp: Tensor,
    target: Tensor,
    grad: Tensor,
    gains: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """Gradient of the loss with respect to the finished logits, [C, V]. It overwrites `logp`.

    With logits z, p = softmax(z), target a and entropy H:
    d logp(a) / d z_j = [j = a] - p_j, and d H / d z_j = -p_j (log p_j + H).

    Args:
        logp: [C, V] log-probs.
        target: [C] token ids.
        grad: [C] gradient with respect to the targets' log-probs.
        gains: (gradient with respect to the entropies, entropies), each [C]. None: the loss does
            not depend on the entropies.
    """
    if gains is None:
        p = logp.exp_().mul_(-grad[:, None])
    else:
        entropy_grad, entropy = gains
        # For a token that truncation excludes p is 0 and log p is clamped: 0 * -inf would be NaN.
        slope = logp.clamp_min(-1e4).add_(entropy[:, None]).mul_(entropy_grad[:, None])
        p = logp.exp_().mul_(slope.add_(grad[:, None])).neg_()
    return p.scatter_add_(-1, target[:, None], grad[:, None])


def _finish_gradient(grad: Tensor, capped: Tensor | None, settings: HeadSettings) -> Tensor:
    """Gradient with respect to the head's raw output. It overwrites `grad`.

    Args:
        grad: [C, V] gradient with respect to the logits after scaling, soft cap and temperature.
        capped: [C, V] tanh values of the soft cap, or None.
        settings: temperature and soft cap.
    """
    if settings.temperature != 1.0:
        grad = grad.div_(settings.temperature)
    return settings.finish.backward_(grad, capped)
