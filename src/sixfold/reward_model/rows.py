"""Rows of a reward model: which hidden states its score is read from.

A trainer reads the value of token t at the hidden state of t - 1. So a row is the completion and
one closing token, which repeats its last token. Tokens whose value is read are in the mask:

  last   the closing token alone: the score is the value at the last token of the completion
  mean   every token after the first of the completion, and the closing one: the score is the mean
         of the values at all tokens of the completion. As the head is linear, that is the value of
         the mean state

No padding is computed, so the id of the pad token has no influence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from ..batch import Batch
from ..types import OBSERVATION, PROMPT, SAMPLED, Group, Trajectory, Turn

Head = Literal["last", "mean"]


def scored_groups(groups: Sequence[Group], head: Head) -> list[Group]:
    """The groups with a closing token after every completion, and a mask for the head.

    Args:
        groups: completions of given texts, without log-probs and versions.
        head: where the score is read.
    """
    return [Group(g.task, [_row(t, head) for t in g.trajectories]) for g in groups]


def _row(t: Trajectory, head: Head) -> Trajectory:
    """One completion with its closing token."""
    before, length = t.prompt_length, len(t.tokens)
    first = min(before + 1, length) if head == "mean" else length
    return Trajectory(
        task_id=t.task_id,
        sample=t.sample,
        tokens=[*t.tokens, t.tokens[-1]],
        provenance=PROMPT * before
        + OBSERVATION * (first - before)
        + SAMPLED * (length + 1 - first),
        logp=[0.0] * (length + 1),
        version=[-1] * (length + 1),
        turns=(Turn(first, length + 1),),
        text=t.text,
        reward=t.reward,
    )


def row_scores(batch: Batch, values: Tensor, head: Head) -> Tensor:
    """[B] score of each row from the values [B, T] of its tokens, where the head reads."""
    last = batch.lengths[:, None] - 1
    first = torch.minimum(batch.prompt_lengths[:, None] + 1, last) if head == "mean" else last
    column = torch.arange(values.shape[1], device=values.device)
    read = (column >= first) & (column <= last)
    return torch.where(read, values, 0.0).sum(-1) / read.sum(-1)


def completion_tokens(batch: Batch) -> Tensor:
    """[B, T] True at the tokens of each completion, without the closing token."""
    column = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
    inside = column < batch.lengths[:, None] - 1
    return inside & (column >= batch.prompt_lengths[:, None])


def completion_lengths(batch: Batch) -> Tensor:
    """[B] tokens of each completion, without the closing token, as float64."""
    return (batch.lengths - 1 - batch.prompt_lengths).double()


def pairs_of(table: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The pairs of some rows, whole groups, as `pair_table` has written them down.

    Args:
        table: [B, M, 3].

    Returns:
        (better row [N], worse row [N], weight [N]). The weights of a group add up to 1.
    """
    chosen, column = table[..., 2].nonzero(as_tuple=True)
    offset, _, of_group = table[chosen, column].unbind(-1)
    return chosen, chosen + offset, 1.0 / of_group.float()
