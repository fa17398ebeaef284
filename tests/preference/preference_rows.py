"""Tables of pairs and completions that the tests of preference losses share."""

from __future__ import annotations

from dataclasses import fields, replace

import torch
from torch import Tensor

from sixfold.preference.loss import PreferenceLoss, Settings
from sixfold.preference.pairs import Pairs, Unpaired

Rows = Pairs | Unpaired


def made(
    row: PreferenceLoss, n: int, seed: int, *, spread: float = 3.0, dtype: torch.dtype | None = None
) -> Rows:
    """N rows with unequal weights, of which the last has none, as a table's filling has."""
    g = torch.Generator().manual_seed(seed)
    dtype = dtype or torch.float64

    def logp() -> Tensor:
        return -1.0 - spread * torch.rand(n, generator=g, dtype=dtype)

    tokens = [torch.randint(1, 9, (n,), generator=g).to(dtype) for _ in range(2)]
    weight = torch.rand(n, generator=g, dtype=dtype) + 0.5
    weight[-1] = 0.0
    if row.unpaired:
        liked = torch.rand(n, generator=g) < 0.5
        liked[:2] = torch.tensor([True, False])
        return Unpaired(logp(), logp(), liked, weight, logp() + spread)
    heads = [logp() / 2 for _ in range(4)]
    return Pairs(
        *(logp(), logp(), *tokens, logp(), logp(), weight),
        *heads,
    )


def with_gradient(rows: Rows) -> tuple[Rows, list[Tensor]]:
    """The rows with leaves for what the policy computes, and these leaves."""
    names = ("chosen", "rejected", "chosen_head", "rejected_head", "logp")
    own = [f.name for f in fields(rows) if f.name in names]
    leaves = {name: getattr(rows, name).clone().requires_grad_() for name in own}
    return replace(rows, **leaves), list(leaves.values())


def loss_and_gradient(
    row: PreferenceLoss, rows: Rows, settings: Settings, parts: list[Tensor]
) -> tuple[Tensor, Tensor]:
    """Weighted sum of the losses of all parts, and its gradient in all leaves."""
    statistics = row.whole_batch(rows, settings)
    total = torch.zeros((), dtype=rows.weights.dtype)
    tracked, leaves = with_gradient(rows)
    for part in parts:
        some = tracked.of(part)
        losses = row.per_pair(some, settings, statistics.of(part))
        (some.weights * losses).sum().backward()
        total += (some.weights * losses.detach()).sum()
    grads = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
    return total, torch.stack(grads)
