"""Tensors of one step: `collate` is the only way to make a `Batch` from trajectories.

Index t refers to token t. mask, old_logp, version, ref_logp, advantages and weights at t all belong
to the token at t. The model predicts its probability at position t - 1, so index 0 is never scored.
Rows are right-padded. Padding has mask False and zeros elsewhere (version -1).

`Loss` is the interface between algorithm and trainer: the trainer receives a batch and a loss.
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

from .types import SAMPLED, Group, Reward, Routes, Trajectory

Metrics = dict[str, float | list[float]]
"""Metrics of a step, by key. Every key is documented in docs/metrics.md."""


def number(metrics: Metrics, key: str) -> float:
    """Value of a metric that is one number.

    Raises:
        TypeError: if the metric is a list.
    """
    value = metrics[key]
    if isinstance(value, list):
        raise TypeError(f"metric '{key}' is a list, not a number")
    return value


LARGEST_REWARD = 1e18
"""Above this value, the variance of a group overflows float32 and different rewards look equal."""


@dataclass(frozen=True)
class KeptSets:
    """Token ids that could have been drawn at each token of any shape [...].

    The set of a token is ids[start : start + count].

    Attributes:
        ids: int32, one pool shared by every selection of tokens.
        start: [...] int64.
        count: [...] int64. 0 means the whole vocabulary.
        known: copy of `count` on the CPU. Without it, `members` must read the total back from the
            GPU.
    """

    ids: Tensor
    start: Tensor
    count: Tensor
    known: Tensor | None = None

    def __getitem__(self, index: Tensor | tuple[Tensor, ...]) -> KeptSets:
        return replace(self, start=self.start[index], count=self.count[index], known=None)

    def to(self, device: torch.device | str) -> KeptSets:
        return KeptSets(
            send(self.ids, device), send(self.start, device), send(self.count, device), self.known
        )

    def split(self, size: int) -> list[KeptSets]:
        """Split the sets of tokens [N] into chunks of `size` tokens."""
        starts, counts = self.start.split(size), self.count.split(size)
        known = [None] * len(starts) if self.known is None else self.known.split(size)
        return [KeptSets(self.ids, s, c, n) for s, c, n in zip(starts, counts, known, strict=True)]

    def members(self) -> tuple[Tensor, Tensor]:
        """Members of all sets of tokens [N].

        Returns:
            (token index, token id) of every member, both int64.
        """
        total = int((self.count if self.known is None else self.known).sum())
        token = torch.arange(len(self.count), device=self.count.device).repeat_interleave(
            self.count, output_size=total
        )
        rank = (
            torch.arange(len(token), device=token.device)
            - (self.count.cumsum(0) - self.count)[token]
        )
        return token, self.ids[self.start[token] + rank].long()

    def excluded(self, vocabulary: int) -> Tensor:
        """Bool [N, vocabulary] for tokens [N]: True for ids that could not have been drawn."""
        excluded = (self.count > 0)[:, None].repeat(1, vocabulary)
        excluded[self.members()] = False
        return excluded


@dataclass(frozen=True)
class Batch:
    """Trajectories of one step as tensors of shape [B, T], unless stated otherwise.

    `collate` fills the fields up to `greedy`, and `kept`. The scorers (reference, critic,
    proximal forward pass) fill ref_logp, prox_logp, values and entropy. The algorithm fills the
    fields from advantages to minibatch. The trainer reads all of them.

    Attributes:
        tokens: int64.
        mask: bool, True where the policy sampled the token.
        old_logp: log-prob at sampling time.
        version: int64, version of the weights that sampled the token.
        rewards: final reward on the last sampled token, rewards of turns on the last token of each
            turn, process rewards on the last token of their steps. NaN if the checker failed; those
            rows never train.
        lengths: [B] int64, tokens per row.
        prompt_lengths: [B] int64.
        group: [B] int64, index of the task within the step.
        step_ends: bool, True where a reward belongs: at the end of the row, at process rewards, and
            at the end of every turn if a turn of the row's group has a reward.
        source: [B] int64, hash of the task's source. The same source has the same number in every
            step.
        truncated: [B] bool, True if a limit ended the episode: `Trajectory.truncated`.
        parts: [B, R] named rewards before their weights. NaN where a reward does not apply or
            failed. Without named rewards: R = 1, the reward itself.
        part_names: R names, sorted.
        greedy: [B] reward of the greedy completion of the row's prompt. NaN if its check failed.
            None if no greedy completions were sampled.
        ref_logp: log-probs of the reference or teacher.
        prox_logp: the trainer's own log-probs at the start of the step (proximal policy).
        values: the critic's values of the state before token t.
        entropy: entropy of the distribution from which token t was drawn.
        advantages: advantage of each token.
        weights: weight of each token's loss. A loss is always (weights * token_loss).sum(), so
            every split of the rows gives the same gradient.
        returns: targets of the critic.
        correction: importance weight of each token's policy loss.
        marked: bool, tokens that KL-Cov penalises.
        minibatch: [B] int64, index of the optimizer step that takes the row, within one pass over
            the batch.
        unit: [B] int64, number of the row's unit. Rows of one unit (such as a preference pair) are
            always in the same mini-batch and micro-batch, so a loss sees whole units. None: each
            row is a unit.
        pairs: [B, M, 3] int64, pairs of better and worse rows: `preference.table.pair_table`.
        kept: kept set of each token, or None if nothing was truncated. If set, all log-probs and
            entropies above refer to the renormalised distribution over the kept set.
        routes: experts that computed the tokens of each row at sampling, on the host. None for a
            row without a record. Empty if no row has one, and for a selection of rows.
        names: task and sample of each row, for messages. Empty for a selection of rows.
        host: if the batch is on a GPU, the CPU batch from which it was moved. See `at_host`.
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
    parts: Tensor | None = None
    part_names: tuple[str, ...] = ()
    greedy: Tensor | None = None
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
    unit: Tensor | None = None
    pairs: Tensor | None = None
    kept: KeptSets | None = None
    routes: tuple[Routes | None, ...] = field(default=(), repr=False)
    names: tuple[str, ...] = ()
    host: Batch | None = field(default=None, repr=False)

    def with_(self, **fields: Tensor) -> Batch:
        """Copy of the batch with some fields replaced."""
        changed: dict[str, Any] = dict(fields)
        if not LAYOUT.isdisjoint(changed):
            changed["host"] = None
        return replace(self, **changed)

    def to(self, device: torch.device | str) -> Batch:
        """Move every tensor to `device`.

        A copy to a GPU is asynchronous, and the result keeps the CPU batch as `host`.
        """
        moved = self._map(
            lambda t: send(t, device), None if self.kept is None else self.kept.to(device)
        )
        return replace(
            moved, host=None if moved.tokens.is_cpu else self if self.tokens.is_cpu else self.host
        )

    def at_host(self) -> Batch:
        """Batch on the CPU with the same LAYOUT fields. Other fields may be out of date or missing.

        Use it to lay out rows on the host; reading a GPU batch would wait for the device several
        times per row. The call is free if the batch was collated on the CPU and then moved.
        """
        if self.tokens.is_cpu:
            return self
        return self.host or self._map(
            Tensor.cpu, None if self.kept is None else self.kept.to("cpu")
        )

    def with_host(self) -> Batch:
        """Batch with `host` filled in, so that later calls of `at_host` are free."""
        return self if self.tokens.is_cpu else replace(self, host=self.at_host())

    def rows(self, index: Tensor) -> Batch:
        """Batch of the rows `index` [R], with the same T."""
        return replace(
            self._map(lambda t: t[index], None if self.kept is None else self.kept[index]),
            routes=(),
            names=(),
            host=None,
        )

    def _map(self, f: Callable[[Tensor], Tensor], kept: KeptSets | None) -> Batch:
        changed: dict[str, Any] = {
            name: f(t) for name, t in vars(self).items() if isinstance(t, Tensor)
        }
        return replace(self, kept=kept, **changed)

    @property
    def scores(self) -> Tensor:
        """[B] reward of each trajectory: the sum of its per-token rewards."""
        return self.rewards.sum(-1)


LAYOUT = frozenset(
    {"tokens", "mask", "version", "lengths", "prompt_lengths", "group", "unit", "pairs", "kept"}
)
"""Fields that describe where the tokens of a batch are. No role changes them."""


@dataclass(frozen=True)
class LossOutput:
    """Output of a loss for some rows of the step.

    Attributes:
        loss: scalar with gradient, already weighted. The loss of the step is the sum over any split
            of its rows.
        sums: scalars that add up over a split in the same way.
        means: [B, T] tables. The mean over all scored tokens of the step is logged.
    """

    loss: Tensor
    sums: dict[str, Tensor] = field(default_factory=dict)
    means: dict[str, Tensor] = field(default_factory=dict)


class Loss(Protocol):
    """Loss function that the trainer calls.

    It takes rows of a batch and their log-probs [B, T], which are 0 where mask is False.
    """

    def __call__(self, batch: Batch, logp: Tensor, /) -> LossOutput: ...


def collate(groups: Sequence[Group], scored: bool = True) -> Batch:
    """Turn groups into one right-padded batch.

    Args:
        groups: groups of one step.
        scored: whether the environment has scored the groups. If False, rewards are NaN.

    Raises:
        ValueError: if there are no trajectories, a kept set lacks its sampled token, a process
            reward is on a token that the policy did not sample, or provenance contradicts versions
            and log-probs. If `scored`: also for a missing or too large reward.
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
    mask = torch.zeros_like(tokens, dtype=torch.bool)
    for b, t in enumerate(trajectories):
        letters = np.frombuffer(t.provenance.encode(), dtype=np.uint8)
        mask[b, : len(t.tokens)] = torch.from_numpy(letters == ord(SAMPLED))
    rewards = final_rewards([_score(t) if scored else math.nan for t in trajectories], mask)
    step_ends = last_sampled(mask)
    _add_step_rewards(groups, rewards, step_ends)
    names, parts = _parts(trajectories) if scored else ((), None)
    batch = Batch(
        tokens=tokens,
        mask=mask,
        old_logp=padded("logp", 0, torch.float32),
        version=padded("version", -1, torch.int64),
        rewards=rewards,
        step_ends=step_ends,
        lengths=torch.tensor([len(t.tokens) for t in trajectories]),
        prompt_lengths=torch.tensor([t.prompt_length for t in trajectories]),
        group=torch.tensor([g for g, group in enumerate(groups) for _ in group.trajectories]),
        source=torch.tensor(
            [crc32(group.task.source.encode()) for group in groups for _ in group.trajectories]
        ),
        truncated=torch.tensor([t.truncated for t in trajectories]),
        parts=parts,
        part_names=names,
        greedy=_greedy(groups) if scored else None,
        kept=_kept_sets(trajectories, tokens, mask) if any(t.kept for t in trajectories) else None,
        routes=tuple(t.routes for t in trajectories) if any(t.routes for t in trajectories) else (),
        names=tuple(f"trajectory {t.sample} of task {t.task_id}" for t in trajectories),
    )
    check_mask(batch)
    _refuse(batch, ~batch.mask & (batch.old_logp != 0))
    return batch


def check_mask(batch: Batch) -> None:
    """Rebuild the mask from the versions of the tokens, and compare it with the batch's mask.

    The engine writes the versions, the rollout writes the provenance behind the mask. If they
    differ, an observation would be trained on, or a sampled token would be lost. A row without any
    version holds text that no policy sampled, such as a worked solution. It is not checked. Nothing
    is read from a GPU.

    Raises:
        ValueError: names the trajectory and the token.
    """
    host = batch.at_host()
    stamped = host.version >= 0
    _refuse(host, stamped.any(-1, keepdim=True) & (host.mask != stamped))


def _refuse(host: Batch, wrong: Tensor) -> None:
    """Raise ValueError for the first token of `wrong` [B, T]. `host` is a batch on the CPU."""
    if not wrong.any():
        return
    b, t = wrong.nonzero()[0].tolist()
    name = host.names[b] if host.names else f"row {b}"
    of_token = f"version {int(host.version[b, t])} and log-prob {float(host.old_logp[b, t]):g}"
    claim = "is in the mask" if host.mask[b, t] else "is not in the mask"
    raise ValueError(
        f"{name}: token {t} {claim}, but has {of_token}. Mark exactly the tokens that the policy"
        " sampled with 's' in Trajectory.provenance, and change no mask after collate"
    )


def _add_step_rewards(groups: Sequence[Group], rewards: Tensor, step_ends: Tensor) -> None:
    """Add the rewards of turns and steps to `rewards` [B, T], and mark `step_ends` [B, T].

    If a turn of a group has a reward, every turn of the group is a step: one without a reward has
    reward 0, not none.
    """
    b = 0
    for group in groups:
        turns_count = any(turn.reward for t in group.trajectories for turn in t.turns)
        for t in group.trajectories:
            for index, value in t.step_rewards:
                if not 0 <= index < len(t.tokens) or t.provenance[index] != SAMPLED:
                    raise ValueError(
                        f"collate: a process reward of task {t.task_id} is on token {index}, which"
                        " the policy did not sample"
                    )
                rewards[b, index] += value
                step_ends[b, index] = True
            if turns_count:
                step_ends[b, [u.stop - 1 for u in t.turns if u.stop > u.start]] = True
            b += 1


def _parts(trajectories: Sequence[Trajectory]) -> tuple[tuple[str, ...], Tensor]:
    """Sorted names and [B, R] values of the named rewards; without names, the reward itself.

    Parts of weight 0 are left out: they are only logged.
    """
    given = [t.reward or Reward(None) for t in trajectories]
    named = [{n: v for n, v in r.parts.items() if r.weights.get(n) != 0.0} for r in given]
    names = tuple(sorted({name for parts in named for name in parts}))
    if not names:
        return ("reward",), torch.tensor([[_score(t)] for t in trajectories], dtype=torch.float32)
    rows = [[parts.get(name, math.nan) for name in names] for parts in named]
    return names, torch.tensor(rows, dtype=torch.float32)


def _greedy(groups: Sequence[Group]) -> Tensor | None:
    """[B] reward of each row's greedy completion, process rewards included. None without them."""
    if all(group.greedy is None for group in groups):
        return None
    values: list[float] = []
    for group in groups:
        if group.greedy is None:
            raise ValueError(f"collate: task {group.task.id} has no greedy completion, others have")
        baseline = _score(group.greedy) + sum(value for _, value in group.greedy.step_rewards)
        values += [baseline] * len(group.trajectories)
    return torch.tensor(values, dtype=torch.float32)


def _kept_sets(trajectories: Sequence[Trajectory], tokens: Tensor, mask: Tensor) -> KeptSets:
    """Kept sets of all trajectories in one pool, ordered by row and token.

    Raises:
        ValueError: if a sampled token is not in its own set. Its log-prob would be -inf.
    """
    count = torch.zeros_like(tokens)
    for b, t in enumerate(trajectories):
        if t.kept:
            count[b, mask[b]] = torch.from_numpy(np.asarray(t.kept.counts)).long()
    ids = torch.from_numpy(np.concatenate([np.asarray(t.kept.ids) for t in trajectories if t.kept]))
    sets = KeptSets(ids, (count.flatten().cumsum(0) - count.flatten()).view_as(count), count)
    sampled = sets[mask]
    token, member = sampled.members()
    found = torch.zeros_like(sampled.count).index_add_(
        0, token, (member == tokens[mask][token]).long()
    )
    missing = mask.nonzero()[(sampled.count > 0) & (found == 0)]
    if len(missing):
        b, index = missing[0].tolist()
        raise ValueError(
            f"collate: trajectory {trajectories[b].sample} of task {trajectories[b].task_id}: token"
            f" {index} is not in its kept set"
        )
    return sets


def send(x: Tensor, device: torch.device | str) -> Tensor:
    """Move x to `device`. A copy from the CPU to a GPU does not block the host."""
    device = torch.device(device)
    if device.type == "cuda" and x.is_cpu:
        x = x.pin_memory()  # a copy from pageable memory would block
    # A copy to the CPU must be complete before it is read, so it blocks.
    return x.to(device, non_blocking=x.is_cpu)


def upload(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Copy int64 arrays [N] to `device` in a single transfer."""
    whole = send(torch.from_numpy(np.concatenate(arrays)), device)
    return list(whole.split([len(array) for array in arrays]))


def filled(field_: Tensor | None, name: str) -> Tensor:
    """Return a field that some role must have filled in.

    Raises:
        ValueError: if the field is None.
    """
    if field_ is None:
        raise ValueError(f"batch.{name} is not filled in yet")
    return field_


def last_sampled(mask: Tensor) -> Tensor:
    """[B, T] bool, True on the last sampled token of each row, where its final reward belongs.

    A row without sampled tokens is True at index 0.
    """
    last = (mask * torch.arange(mask.shape[1], device=mask.device)).argmax(-1)
    return torch.zeros_like(mask).scatter(1, last[:, None], True)


def final_rewards(scores: Sequence[float] | Tensor, mask: Tensor) -> Tensor:
    """[B, T] tensor with each row's score on its last sampled token and zeros elsewhere."""
    values = scores if isinstance(scores, Tensor) else torch.tensor(scores, dtype=torch.float32)
    return torch.where(last_sampled(mask), values[:, None], 0.0)


def _score(trajectory: Trajectory) -> float:
    if trajectory.reward is None:
        raise ValueError(
            f"collate: trajectory {trajectory.sample} of task {trajectory.task_id} has no reward;"
            " score the groups first"
        )
    value = trajectory.reward.value
    if value is not None and LARGEST_REWARD < abs(value) < math.inf:
        raise ValueError(
            f"collate: reward {value:g} of task {trajectory.task_id} is too large for float32"
            " statistics"
        )
    return float("nan") if value is None else value
