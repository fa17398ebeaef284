"""From lists to tensors, once a step: `collate` is the only way in.

Index t speaks of token t: mask, old_logp, version, ref_logp, advantages and weights at t all belong to the token at t, whose probability the
model gives at t - 1. So index 0 is never scored. Rows are right-padded; padding has mask False and holds zeros (version -1).

`Loss` is the other half of the seam between algorithm and trainer: what the trainer is handed beside a batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from .types import Group, Trajectory

Metrics = dict[str, float | list[float]]
"""What a step logs, by key; every key is documented in docs/metrics.md."""


LARGEST_REWARD = 1e18
"""Beyond this, the variance of a group overflows float32, and rewards that differ look equal."""


@dataclass(frozen=True)
class KeptSets:
    """Which token ids could have been drawn where tokens were: for tokens of any shape [...], ids[start : start + count].

    ids: int32, one pool that every selection of tokens shares. start, count: [...] int64; count 0: all of the vocabulary. known: count on the CPU;
    without it, the sets of a GPU are read back when their members are listed.
    """

    ids: Tensor
    start: Tensor
    count: Tensor
    known: Tensor | None = None

    def __getitem__(self, index: Tensor | tuple[Tensor, ...]) -> KeptSets:
        """The sets of some of the tokens."""
        return replace(self, start=self.start[index], count=self.count[index], known=None)

    def to(self, device: torch.device | str) -> KeptSets:
        """The sets on `device`."""
        return KeptSets(send(self.ids, device), send(self.start, device), send(self.count, device), self.known)

    def split(self, size: int) -> list[KeptSets]:
        """Sets of tokens [N], `size` tokens at a time."""
        starts, counts = self.start.split(size), self.count.split(size)
        known = [None] * len(starts) if self.known is None else self.known.split(size)
        return [KeptSets(self.ids, s, c, n) for s, c, n in zip(starts, counts, known, strict=True)]

    def members(self) -> tuple[Tensor, Tensor]:
        """Of tokens [N]: (token number, id) of every member of their sets, both int64."""
        total = int((self.count if self.known is None else self.known).sum())
        token = torch.arange(len(self.count), device=self.count.device).repeat_interleave(self.count, output_size=total)
        rank = torch.arange(len(token), device=token.device) - (self.count.cumsum(0) - self.count)[token]
        return token, self.ids[self.start[token] + rank].long()

    def excluded(self, vocabulary: int) -> Tensor:
        """Of tokens [N]: bool [N, vocabulary], True for what could not have been drawn."""
        excluded = (self.count > 0)[:, None].repeat(1, vocabulary)
        excluded[self.members()] = False
        return excluded


@dataclass(frozen=True)
class Batch:
    """One step's trajectories as tensors, [B, T] unless said otherwise. Who fills what: collate the first block, the scorers (reference, critic,
    proximal pass) the second, the algorithm the third; the trainer reads all.

    tokens: int64. mask: bool, True where the policy sampled the token. old_logp: log-prob at sampling. version: int64, weights that sampled it.
    rewards: final reward on the trajectory's last sampled token (NaN where the checker failed: those rows never train), process rewards on the
    last token of their steps. step_ends: bool, True where a reward belongs. lengths, prompt_lengths, group, source: [B] int64; group numbers the
    prompts of the step, source says where their tasks came from (a hash: the same number in every step). truncated: [B] bool, cut off at the limit.

    ref_logp: of the reference or teacher. prox_logp: the trainer's own log-probs when the step began (the proximal policy). values: the critic's,
    of the state before token t. entropy: of the distribution that token t was drawn from.

    kept: what truncated sampling kept of each token; all log-probs and entropies above are then of the distribution over that set, renormalised.
    None: nothing was truncated.

    advantages. weights: how much each token's loss counts, so that a loss is always (weights * token_loss).sum() and any split of the rows gives the
    same gradient. returns: what the critic learns. correction: importance weight of each token's policy loss. marked: bool, tokens that KL-Cov
    holds back. minibatch: [B] int64, the optimizer step, within a pass over the batch, that takes the row.

    host: where the batch is on a GPU, the CPU's batch that it was moved from; see `at_host`.
    """

    tokens: Tensor
    mask: Tensor
    old_logp: Tensor
    version: Tensor
    rewards: Tensor
    lengths: Tensor
    prompt_lengths: Tensor
    group: Tensor
    step_ends: Tensor | None = None
    source: Tensor | None = None
    truncated: Tensor | None = None
    ref_logp: Tensor | None = None
    prox_logp: Tensor | None = None
    values: Tensor | None = None
    entropy: Tensor | None = None
    advantages: Tensor | None = None
    weights: Tensor | None = None
    returns: Tensor | None = None
    correction: Tensor | None = None
    marked: Tensor | None = None
    minibatch: Tensor | None = None
    kept: KeptSets | None = None
    host: Batch | None = field(default=None, repr=False)

    def with_(self, **fields: Tensor) -> Batch:
        """A copy with some fields filled in."""
        changed: dict[str, Any] = dict(fields)
        if not LAYOUT.isdisjoint(changed):
            changed["host"] = None
        return replace(self, **changed)

    def to(self, device: torch.device | str) -> Batch:
        """The batch with every tensor on `device`. A copy to a GPU does not wait, and the result remembers the CPU's batch as `host`."""
        moved = self._map(lambda t: send(t, device), None if self.kept is None else self.kept.to(device))
        return replace(moved, host=None if moved.tokens.is_cpu else self if self.tokens.is_cpu else self.host)

    def at_host(self) -> Batch:
        """A batch on the CPU whose LAYOUT fields are this one's; the other fields may be out of date or missing.

        Rows are laid out on the host, which would otherwise wait for the device several times per row. Free if the batch was collated on the
        CPU and then moved.
        """
        if self.tokens.is_cpu:
            return self
        return self.host or self._map(Tensor.cpu, None if self.kept is None else self.kept.to("cpu"))

    def with_host(self) -> Batch:
        """The batch with `host` filled in, so that `at_host` is free from now on."""
        return self if self.tokens.is_cpu else replace(self, host=self.at_host())

    def rows(self, index: Tensor) -> Batch:
        """The rows `index` [R] as a batch of their own, same T."""
        return replace(self._map(lambda t: t[index], None if self.kept is None else self.kept[index]), host=None)

    def _map(self, f: Callable[[Tensor], Tensor], kept: KeptSets | None) -> Batch:
        changed: dict[str, Any] = {name: f(t) for name, t in vars(self).items() if isinstance(t, Tensor)}
        return replace(self, kept=kept, **changed)

    @property
    def scores(self) -> Tensor:
        """[B] the reward of each trajectory: its per-token rewards summed."""
        return self.rewards.sum(-1)


LAYOUT = frozenset({"tokens", "mask", "version", "lengths", "prompt_lengths", "group", "kept"})
"""Fields of a batch that say where its tokens are. No role changes them."""


@dataclass(frozen=True)
class LossOutput:
    """What a loss gives back for some rows of the step.

    loss: scalar with gradient, already weighted: the step's loss is the sum over any split of its rows. sums: scalars that add up likewise.
    means: [B, T] tables whose mean over the step's scored tokens is logged.
    """

    loss: Tensor
    sums: dict[str, Tensor] = field(default_factory=dict)
    means: dict[str, Tensor] = field(default_factory=dict)


class Loss(Protocol):
    """Any loss that the trainer can be handed: rows of a batch and their log-probs [B, T] (0 where mask is False)."""

    def __call__(self, batch: Batch, logp: Tensor, /) -> LossOutput: ...


def collate(groups: Sequence[Group], scored: bool = True) -> Batch:
    """Groups, scored by the environment, to one right-padded batch. scored: False before it has, and rewards are then NaN.

    Raises ValueError on an empty list, on a trajectory whose kept sets lack a sampled token, or, if scored, on one without a reward.
    """
    trajectories = [t for group in groups for t in group.trajectories]
    if not trajectories:
        raise ValueError("collate: no trajectories")
    longest = max(len(t.tokens) for t in trajectories)

    def padded(stream: str, fill: float, dtype: torch.dtype) -> Tensor:
        out = torch.full((len(trajectories), longest), fill, dtype=dtype)
        for b, t in enumerate(trajectories):
            out[b, : len(t.tokens)] = torch.tensor(getattr(t, stream), dtype=dtype)
        return out

    tokens = padded("tokens", 0, torch.int64)
    mask = padded("mask", 0, torch.bool)
    rewards = final_rewards([_score(t) if scored else math.nan for t in trajectories], mask)
    step_ends = last_sampled(mask)
    for b, t in enumerate(trajectories):
        for index, value in t.reward.steps if t.reward else ():
            if not (0 <= index < len(t.tokens) and t.mask[index]):
                raise ValueError(f"collate: a process reward of task {t.task_id} is on token {index}, which the policy did not sample")
            rewards[b, index] += value
            step_ends[b, index] = True
    return Batch(
        tokens=tokens,
        mask=mask,
        old_logp=padded("logp", 0, torch.float32),
        version=padded("version", -1, torch.int64),
        rewards=rewards,
        step_ends=step_ends,
        lengths=torch.tensor([len(t.tokens) for t in trajectories]),
        prompt_lengths=torch.tensor([t.prompt_length for t in trajectories]),
        group=torch.tensor([g for g, group in enumerate(groups) for _ in group.trajectories]),
        source=torch.tensor([crc32(group.task.source.encode()) for group in groups for _ in group.trajectories]),
        truncated=torch.tensor([t.finish_reason == "length" for t in trajectories]),
        kept=_kept_sets(trajectories, tokens, mask) if any(t.kept for t in trajectories) else None,
    )


def _kept_sets(trajectories: Sequence[Trajectory], tokens: Tensor, mask: Tensor) -> KeptSets:
    """The trajectories' sets, one pool in the order of rows and tokens. Raises ValueError where a token is not in its own set: its log-prob would be
    -inf."""
    count = torch.zeros_like(tokens)
    for b, t in enumerate(trajectories):
        if t.kept:
            count[b, mask[b]] = torch.from_numpy(np.asarray(t.kept.counts)).long()
    ids = torch.from_numpy(np.concatenate([np.asarray(t.kept.ids) for t in trajectories if t.kept]))
    sets = KeptSets(ids, (count.flatten().cumsum(0) - count.flatten()).view_as(count), count)
    sampled = sets[mask]
    token, member = sampled.members()
    found = torch.zeros_like(sampled.count).index_add_(0, token, (member == tokens[mask][token]).long())
    missing = mask.nonzero()[(sampled.count > 0) & (found == 0)]
    if len(missing):
        b, index = missing[0].tolist()
        raise ValueError(f"collate: trajectory {trajectories[b].sample} of task {trajectories[b].task_id}: token {index} is not in its kept set")
    return sets


def send(x: Tensor, device: torch.device | str) -> Tensor:
    """x on `device`. A copy from the CPU to a GPU does not block the host."""
    device = torch.device(device)
    if device.type == "cuda" and x.is_cpu:
        x = x.pin_memory()  # from pageable memory the copy would wait all the same
    return x.to(device, non_blocking=x.is_cpu)  # to the CPU the copy must be whole when it is read


def upload(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Arrays [N] of int64 on `device`, by one copy for all of them."""
    whole = send(torch.from_numpy(np.concatenate(arrays)), device)
    return list(whole.split([len(array) for array in arrays]))


def filled(field_: Tensor | None, name: str) -> Tensor:
    """A field that some role must have filled in by now. Raises ValueError, naming it, where none has."""
    if field_ is None:
        raise ValueError(f"batch.{name} is not filled in yet")
    return field_


def last_sampled(mask: Tensor) -> Tensor:
    """[B, T] bool, True on each row's last sampled token (a row without one: on index 0), where its final reward belongs."""
    last = (mask * torch.arange(mask.shape[1], device=mask.device)).argmax(-1)
    return torch.zeros_like(mask).scatter(1, last[:, None], True)


def final_rewards(scores: Sequence[float] | Tensor, mask: Tensor) -> Tensor:
    """[B, T] zeros but for each row's score on its last sampled token."""
    values = scores if isinstance(scores, Tensor) else torch.tensor(scores, dtype=torch.float32)
    return torch.where(last_sampled(mask), values[:, None], 0.0)


def _score(trajectory: Trajectory) -> float:
    if trajectory.reward is None:
        raise ValueError(f"collate: trajectory {trajectory.sample} of task {trajectory.task_id} has no reward; score the groups first")
    value = trajectory.reward.value
    if value is not None and LARGEST_REWARD < abs(value) < math.inf:
        raise ValueError(f"collate: reward {value:g} of task {trajectory.task_id} is too large for float32 statistics")
    return float("nan") if value is None else value
