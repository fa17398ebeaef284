"""Random tables that both sides read, and the comparison: a loss and its gradient in the log-probs.

Log-ratios are mostly small, a few far outside every clip, and in the extreme cases beyond the +-20
at which they are clamped. Masks are ragged, with a hole (a tool's tokens) where asked. What stands
under the mask is a finite number of the same kind: peers multiply by the mask.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from sixfold.algorithm.aggregation import AGGREGATIONS

SEEDS = (0, 1, 2, 3)
HORIZON = 23
_SHAPES = ((2, 4, 7), (3, 2, 11), (4, 5, 5), (1, 6, 16))


@dataclass(frozen=True)
class Tables:
    """One step's tables: [B, T] log-probs, token advantages, values and rewards; [B] rewards in
    [-1, 2], lengths and groups; mask [B, T] bool.
    """

    logp: Tensor
    old_logp: Tensor
    ref_logp: Tensor
    sampler_logp: Tensor
    token_advantages: Tensor
    values: Tensor
    old_values: Tensor
    token_rewards: Tensor
    mask: Tensor
    rewards: Tensor
    group: Tensor
    samples: int

    @property
    def advantages(self) -> Tensor:
        """[B, T], the same on every token of a row: what a group baseline gives."""
        return self.token_advantages[:, :1].expand_as(self.mask).clone()

    @property
    def lengths(self) -> Tensor:
        """[B] scored tokens of each row."""
        return self.mask.sum(-1)

    @property
    def index(self) -> np.ndarray:
        """[B] the group's name of each row, as verl takes it."""
        return np.array([f"prompt-{g}" for g in self.group.tolist()], dtype=object)

    @property
    def counted(self) -> Tensor:
        """[B, T] the mask as a float table, as peers take it."""
        return self.mask.to(self.logp.dtype)


def make_tables(
    seed: int, *, holes: bool = False, extreme: bool = False, dtype: torch.dtype = torch.float64
) -> Tables:
    """Tables of the seed's shape: prompts x samples rows, groups in order. holes: tool tokens
    inside rows. extreme: log-ratios past +-20.
    """
    prompts, samples, width = _SHAPES[seed % len(_SHAPES)]
    rows = prompts * samples
    g = torch.Generator().manual_seed(1000 + seed)

    def normal(scale: float) -> Tensor:
        return torch.randn(rows, width, generator=g, dtype=torch.float64) * scale

    def few(share: float) -> Tensor:
        return torch.rand(rows, width, generator=g) < share

    old = -normal(1.0).abs() - 0.05
    drift = torch.where(few(0.25), normal(1.2), normal(0.08))
    if extreme:
        drift = torch.where(few(0.1), normal(1.0).sign() * 24.0, drift)
    lengths = torch.randint(1, width + 1, (rows,), generator=g)
    lengths[0] = width
    mask = torch.arange(width) < lengths[:, None]
    if holes:
        # The first and the last token of a row are never a tool's.
        inside = (torch.arange(width) > 0) & (torch.arange(width) < lengths[:, None] - 1)
        mask &= ~(few(0.3) & inside)
    made = Tables(
        logp=old + drift,
        old_logp=old,
        ref_logp=old + torch.where(few(0.2), normal(1.5), normal(0.1)),
        sampler_logp=old + torch.where(few(0.2), normal(0.8), normal(0.02)),
        token_advantages=normal(1.0),
        values=normal(1.0),
        old_values=normal(1.0),
        token_rewards=normal(0.5),
        mask=mask,
        rewards=torch.rand(rows, generator=g, dtype=torch.float64) * 3 - 1,
        group=torch.arange(rows) // samples,
        samples=samples,
    )
    return (
        made
        if dtype == torch.float64
        else replace(made, **{k: v.to(dtype) for k, v in vars(made).items() if _is_float(v)})
    )


def binary_rewards(tables: Tables, seed: int) -> Tensor:
    """[B] rewards of 0 or 1; the first group all 1 (nothing to learn), every other group with at
    least one of each.
    """
    g = torch.Generator().manual_seed(seed)
    rewards = torch.randint(0, 2, tables.rewards.shape, generator=g).double()
    rewards[:: tables.samples] = 1.0
    rewards[tables.samples - 1 :: tables.samples] = 0.0
    rewards[: tables.samples] = 1.0
    return rewards


def value_and_gradient(loss: Callable[[Tensor], Tensor], at: Tensor) -> tuple[Tensor, Tensor]:
    """A scalar loss of a table and its gradient there."""
    leaf = at.clone().requires_grad_()
    value = loss(leaf)
    (gradient,) = torch.autograd.grad(value, leaf)
    return value.detach(), gradient


def aggregated(table: Tensor, tables: Tables, how: str, horizon: int = HORIZON) -> Tensor:
    """Our scalar: the table weighed by our aggregation."""
    return torch.where(
        tables.mask, AGGREGATIONS[how](tables.mask, tables.group, horizon) * table, 0.0
    ).sum()


def assert_same(ours: Tensor, theirs: Tensor, rtol: float = 1e-6, atol: float = 1e-8) -> None:
    """Equal within the tolerance, the peer's dtype notwithstanding (a few peers round to float32
    inside).
    """
    torch.testing.assert_close(ours.double(), theirs.double(), rtol=rtol, atol=atol)


def assert_same_loss(
    ours: Callable[[Tensor], Tensor],
    theirs: Callable[[Tensor], Tensor],
    at: Tensor,
    rtol: float = 1e-6,
) -> None:
    """Two losses agree in value and in gradient, and the gradient is not zero everywhere."""
    (our_value, our_gradient), (their_value, their_gradient) = (
        value_and_gradient(ours, at),
        value_and_gradient(theirs, at),
    )
    assert their_gradient.abs().max() > 0
    assert_same(our_value, their_value, rtol)
    assert_same(our_gradient, their_gradient, rtol)


def _is_float(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
