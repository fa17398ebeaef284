"""Averaging of token losses: one weight per token, fixed for the whole step.

The loss is (weights * token_loss).sum(). The denominators are those of the step, never of a
micro-batch. A row without a scored token has weight 0 and is not counted.

Each function takes mask [B, T] bool, group [B] and the horizon (maximum tokens of a completion). It
returns weights [B, T], which are 0 where the mask is False.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Aggregation = Callable[[Tensor, Tensor, int], Tensor]


def token_mean(mask: Tensor, group: Tensor, horizon: int) -> Tensor:
    """All tokens of the step weigh the same: m / sum m (DAPO, arXiv:2503.14476 eq. 8)."""
    return mask / mask.sum().clamp_min(1)


def sequence_mean(mask: Tensor, group: Tensor, horizon: int) -> Tensor:
    """Mean over sequences of the mean over their tokens: m / |o_i| / B.

    GRPO (arXiv:2402.03300 eq. 3).
    """
    lengths = mask.sum(-1, keepdim=True)
    return mask / lengths.clamp_min(1) / (lengths > 0).sum().clamp_min(1)


def sequence_sum(mask: Tensor, group: Tensor, horizon: int) -> Tensor:
    """Mean over sequences of the sum over their tokens: m / B.

    Used by REINFORCE and RLOO: the log-prob of a sequence is a sum.
    """
    return mask / mask.any(-1).sum().clamp_min(1)


def constant(mask: Tensor, group: Tensor, horizon: int) -> Tensor:
    """The sequence sum divided by the longest allowed completion: m / B / L (Dr. GRPO).

    arXiv:2503.20783 section 3.2. L is `horizon`, a setting. Dividing by the padded width T instead
    would make the loss depend on the batch's longest row.
    """
    return sequence_sum(mask, group, horizon) / horizon


def prompt_mean(mask: Tensor, group: Tensor, horizon: int) -> Tensor:
    """Mean over prompts of the token mean inside the prompt's group (ScaleRL, arXiv:2510.13786)."""
    tokens = torch.zeros(int(group.max()) + 1, dtype=torch.int64, device=mask.device).index_add(
        0, group, mask.sum(-1)
    )
    return mask / tokens.clamp_min(1)[group][:, None] / (tokens > 0).sum().clamp_min(1)


AGGREGATIONS: dict[str, Aggregation] = {
    "token": token_mean,
    "sequence": sequence_mean,
    "sequence-sum": sequence_sum,
    "constant": constant,
    "prompt": prompt_mean,
}
