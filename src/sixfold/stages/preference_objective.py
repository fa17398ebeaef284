"""What a preference stage minimises: losses of pairs, or of single completions.

A completion's log-prob is the sum over its tokens. What a loss needs of the whole step is computed
before the step is split into micro-batches, and every loss is a sum over the pairs, so the split,
the packing and the number of ranks change neither loss nor gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..batch import Batch, LossOutput, Metrics, collate, filled, final_rewards, number
from ..checkpointable import Checkpointable, WithoutTensors
from ..data.comparisons import Comparison
from ..evaluation.statistics import bounded_interval
from ..preference.losses import log_ratios
from ..preference.mixture import Mixture
from ..preference.pairs import Pairs, Statistics, Unpaired
from ..preference.table import pair_table, pairs_of, single_completions
from ..reference.base import KeptReference
from ..trainer.logprobs import SCORED_TOGETHER
from ..types import Group, Trajectory
from .examples import Examples

_MOMENTS = ("margin", "length", "margin_squared", "length_squared", "margin_length")
"""Means from which the correlation of margin and length follows."""


class PreferenceObjective:
    """Prefers better completions to worse ones.

    Args:
        mixture: the losses.
        reference: the reference, or a stand-in without one.
        score: log-probs [B, T] of the policy, without gradient.
        device: device of the batches.
        limit: longest sequence of the policy, in tokens.
        teacher: the reference is a separate model, which no checkpoint stores.
        cut_frac: share of the pairs with a completion whose end is cut.
        prepare: called before the first step: computes a cached reference.
        policy_hash: gives the hash of the policy's weights. None: the comparisons do not say which
            weights sampled them.
    """

    root = None

    def __init__(
        self,
        mixture: Mixture,
        reference: KeptReference,
        score: Callable[[Batch], Tensor],
        *,
        device: str,
        limit: int,
        teacher: bool = False,
        cut_frac: float = 0.0,
        prepare: Callable[[], None] | None = None,
        policy_hash: Callable[[], str] | None = None,
    ) -> None:
        self._mixture = mixture
        self._reference = reference
        self._score = score
        self._device = device
        self._limit = limit
        self._teacher = teacher
        self._cut_frac = cut_frac
        self._prepare = prepare
        self._policy_hash = policy_hash
        self._statistics: Sequence[Statistics] = ()
        self._total = 1.0
        self._start = _Start()
        self._on_policy: float | None = None

    @property
    def frozen(self) -> Callable[..., Tensor] | None:
        return self._reference.scorer

    def restored(self, model: Path) -> None:
        """Does nothing."""

    def components(self) -> Mapping[str, Checkpointable]:
        found: dict[str, Checkpointable] = {
            "preference": WithoutTensors(self._mixture),
            "preference_start": WithoutTensors(self._start),
        }
        if self._mixture.needs_reference and not self._teacher:
            found["reference"] = self._reference
        return found

    def begin(self, examples: Examples) -> None:
        """Compute a cached reference, and measure held-out examples before the first step."""
        if self._prepare:
            self._prepare()
        if self._policy_hash:
            self._start.model = self._policy_hash()
        found = self.heldout(examples.heldout) if examples.heldout else {}
        if "preference/heldout_margin" in found:
            self._start.logp = number(found, "preference/heldout_logp_chosen")
            self._start.margin = number(found, "preference/heldout_margin")

    def batch(self, groups: Sequence[Group]) -> Batch:
        own = [_model(group) == self._start.model for group in groups]
        self._on_policy = sum(own) / len(own) if self._start.model else None
        batch, rows, _ = self._rows(groups, first=self._mixture.scores_first)
        self._total = float(rows.weights.sum())
        self._statistics = self._mixture.whole_batch(rows) if self._total else ()
        return batch

    def compute_loss(self, batch: Batch, logp: Tensor) -> LossOutput:
        statistics = self._statistics
        if self._mixture.unpaired:
            rows: Pairs | Unpaired = self._single(batch, logp, batch.ref_logp)
        else:
            table = filled(batch.pairs, "pairs")
            rows = pairs_of(batch, table, logp, batch.ref_logp, self._mixture.needs_head)
            numbers = table[..., 1].reshape(-1)
            statistics = [one.of(numbers) for one in statistics]
        weights = rows.weights / self._total
        loss = (weights * self._mixture.per_pair(rows, statistics)).sum()
        with torch.no_grad():
            sums = {"train/loss": loss.detach(), **self._sums(rows, weights)}
        return LossOutput(loss, sums)

    def derived(self, metrics: Metrics) -> Metrics:
        metrics = {**metrics, "preference/cut_frac": self._cut_frac}
        if self._on_policy is not None:
            metrics["preference/on_policy_frac"] = self._on_policy
        if all(f"preference/{name}" in metrics for name in _MOMENTS):
            moments = [number(metrics, f"preference/{name}") for name in _MOMENTS]
            for name in _MOMENTS[1:]:
                del metrics[f"preference/{name}"]
            metrics["preference/length_corr"] = _correlation(*moments)
        if "preference/liked_frac" in metrics:
            liked = number(metrics, "preference/liked_frac")
            for side, share in (("liked", liked), ("disliked", 1 - liked)):
                total = number(metrics, f"preference/{side}_reward")
                del metrics[f"preference/{side}_reward"]
                if share > 0:
                    metrics[f"preference/{side}_reward"] = total / share
        if "preference/chosen_shift" in metrics:
            metrics["preference/displacement"] = _displacement(
                number(metrics, "preference/chosen_shift"), number(metrics, "preference/margin")
            )
        return metrics

    @torch.no_grad()
    def heldout(self, examples: Sequence[Group]) -> Metrics:
        """Metrics of held-out comparisons. Statistics of the losses are those of all of them."""
        parts, accuracies = [], list[float]()
        for at in range(0, len(examples), SCORED_TOGETHER):
            _, rows, groups = self._rows(examples[at : at + SCORED_TOGETHER], first=True)
            parts.append(rows)
            if isinstance(rows, Pairs):
                accuracies += _accuracies(rows, groups, self._mixture)
        rows = _joined(parts)
        total = float(rows.weights.sum())
        if not total:
            return {}
        statistics = self._mixture.whole_batch(rows, advance=False)
        weights = rows.weights / total
        loss = (weights * self._mixture.per_pair(rows, statistics)).sum()
        sums = {name: float(value) for name, value in self._sums(rows, weights).items()}
        found: Metrics = {"preference/heldout_loss": float(loss)}
        for name in ("margin", "logp_chosen", "logp_rejected"):
            if f"preference/{name}" in sums:
                found[f"preference/heldout_{name}"] = sums[f"preference/{name}"]
        if accuracies:
            interval = bounded_interval(accuracies)
            found["preference/heldout_accuracy"] = interval.mean
            found["preference/heldout_accuracy_low"] = interval.low
            found["preference/heldout_accuracy_high"] = interval.high
        if self._start.logp is not None:
            found["preference/heldout_displacement"] = _displacement(
                number(found, "preference/heldout_logp_chosen") - self._start.logp,
                number(found, "preference/heldout_margin") - self._start.margin,
            )
        return found

    def _rows(
        self, groups: Sequence[Group], first: bool
    ) -> tuple[Batch, Pairs | Unpaired, list[int]]:
        """The batch of a step, and all its pairs or completions without gradient.

        Args:
            groups: the comparisons.
            first: whether the rows need the policy's log-probs. Otherwise they are 0.

        Returns:
            (batch, rows, group of each row).
        """
        host = collate(groups)
        if self._mixture.unpaired:
            host = host.with_(rewards=_labels(host), weights=host.mask.float())
        else:
            table, places = pair_table(host.group, host.scores)
            of_pairs = host.group[places // table.shape[1]]
            weights = host.mask * torch.isin(host.group, of_pairs)[:, None]
            host = host.with_(unit=host.group, pairs=table, weights=weights.float())
        batch = self._reference.score(host.to(self._device))
        none = torch.zeros(batch.mask.shape, device=self._device)
        logp = self._score(batch) if first else none
        ref_logp = batch.ref_logp
        if first and self._mixture.needs_reference and ref_logp is None:
            raise ValueError("the losses need the reference's log-probs before the update")
        if not self._mixture.unpaired:
            table = filled(batch.pairs, "pairs")
            pairs = pairs_of(batch, table, logp, ref_logp, self._mixture.needs_head)
            return batch, pairs.of(places.to(self._device)), of_pairs.tolist()
        other = self._mismatched(groups) if self._mixture.needs_mismatched else None
        rows = self._single(batch, logp, none if ref_logp is None else ref_logp, other)
        return batch, rows, host.group.tolist()

    def _single(
        self,
        batch: Batch,
        logp: Tensor,
        ref_logp: Tensor | None,
        mismatched: Tensor | None = None,
    ) -> Unpaired:
        weight = torch.ones(len(batch.tokens), device=logp.device)
        return single_completions(batch, logp, filled(ref_logp, "ref_logp"), weight, mismatched)

    def _mismatched(self, groups: Sequence[Group]) -> Tensor:
        """[B] log-ratios to the reference of another prompt's completions after each prompt."""
        batch = collate(mismatched(groups, self._limit), scored=False).to(self._device)
        ratio = self._score(batch) - filled(self._reference.score(batch).ref_logp, "ref_logp")
        return ratio.sum(-1)

    def _sums(self, rows: Pairs | Unpaired, weights: Tensor) -> dict[str, Tensor]:
        """Metrics that add up over a split of the step.

        Args:
            rows: some rows of the step.
            weights: [N] their weights, with sum 1 over the step.
        """
        beta = self._mixture.shown.settings.beta
        if isinstance(rows, Unpaired):
            liked, h = rows.liked.to(weights.dtype), beta * (rows.logp - rows.ref_logp)
            return {
                "preference/liked_frac": (weights * liked).sum(),
                "preference/liked_reward": (weights * liked * h).sum(),
                "preference/disliked_reward": (weights * (1 - liked) * h).sum(),
            }
        chosen, rejected = log_ratios(rows)
        gap = self._mixture.margin(rows)
        length = rows.chosen_tokens - rows.rejected_tokens
        found = {
            "accuracy": _won(gap),
            "margin": gap,
            "logp_chosen": rows.chosen / rows.chosen_tokens,
            "logp_rejected": rows.rejected / rows.rejected_tokens,
        }
        if rows.ref_chosen is not None:
            found |= {
                "reward_chosen": beta * chosen,
                "reward_rejected": beta * rejected,
                "chosen_shift": chosen / rows.chosen_tokens,
                "rejected_shift": rejected / rows.rejected_tokens,
            }
        moments = (gap, length, gap**2, length**2, gap * length)
        found |= dict(zip(_MOMENTS, moments, strict=True))
        return {f"preference/{name}": (weights * value).sum() for name, value in found.items()}


@dataclass
class _Start:
    """The policy before the first step.

    Attributes:
        logp: mean log-prob per token of held-out better completions. None: not measured.
        margin: mean margin of held-out pairs.
        model: hash of its weights. Empty: no comparison says which weights sampled it.
    """

    logp: float | None = None
    margin: float = 0.0
    model: str = ""

    def state(self) -> dict[str, Any]:
        return {"logp": self.logp, "margin": self.margin, "model": self.model}

    def load(self, state: dict[str, Any]) -> None:
        self.logp, self.margin, self.model = state["logp"], state["margin"], state["model"]


def _model(group: Group) -> str:
    """Hash of the weights that sampled a comparison, or empty."""
    return group.task.model if isinstance(group.task, Comparison) else ""


def mismatched(groups: Sequence[Group], limit: int) -> list[Group]:
    """Each completion's prompt with a completion of the next group that has another prompt.

    If all prompts are equal, the completions are those of the next row.

    Args:
        groups: groups of a step.
        limit: longest sequence; the completion is cut to it.
    """
    rows = [(group.task, one) for group in groups for one in group.trajectories]
    found = []
    for at, (task, own) in enumerate(rows):
        prompt = own.tokens[: own.prompt_length]
        later = [rows[(at + step) % len(rows)][1] for step in range(1, len(rows) + 1)]
        other = next((one for one in later if one.tokens[: one.prompt_length] != prompt), later[0])
        reply = other.tokens[other.prompt_length :][: max(1, limit - len(prompt))]
        length = len(reply)
        row = Trajectory.one_turn(task.id, at, prompt, reply, [0.0] * length, [-1] * length, "stop")
        found.append(Group(task, [row]))
    return found


def _labels(host: Batch) -> Tensor:
    """[B, T] rewards of 1 for liked completions and 0 for others, in place of grades.

    A single completion is liked if its grade is above 0, and one of several if it is above their
    mean.
    """
    sizes = torch.bincount(host.group).to(host.scores.dtype)
    means = torch.zeros_like(sizes).index_add_(0, host.group, host.scores) / sizes
    alone = sizes[host.group] == 1
    liked = torch.where(alone, host.scores > 0, host.scores > means[host.group])
    return final_rewards(liked.to(host.rewards.dtype), host.mask)


def _won(gap: Tensor) -> Tensor:
    """[N] 1 where the margin prefers the better completion, 1/2 where it is undecided."""
    return (gap > 0).to(gap.dtype) + 0.5 * (gap == 0).to(gap.dtype)


def _accuracies(pairs: Pairs, groups: Sequence[int], mixture: Mixture) -> list[float]:
    """Share of the pairs of each group that the policy orders right. groups: that of each pair."""
    found: dict[int, list[float]] = {}
    for group, won in zip(groups, _won(mixture.margin(pairs)).tolist(), strict=True):
        found.setdefault(group, []).append(won)
    return [sum(won) / len(won) for won in found.values()]


def _joined(parts: Sequence[Pairs | Unpaired]) -> Pairs | Unpaired:
    """All rows as one table."""
    columns: dict[str, Any] = {
        name: None if value is None else torch.cat([getattr(part, name) for part in parts])
        for name, value in vars(parts[0]).items()
    }
    return type(parts[0])(**columns)


def _displacement(shift: float, margin_: float) -> float:
    """Nats per token by which better completions have lost log-prob although the margin is up."""
    return max(0.0, -shift) if margin_ > 0 else 0.0


def _correlation(x: float, y: float, xx: float, yy: float, xy: float) -> float:
    """Pearson's correlation from the means of x, y, x², y², xy. 0 if one does not vary."""
    spread = max(0.0, xx - x * x) * max(0.0, yy - y * y)
    return (xy - x * y) / math.sqrt(spread) if spread > 1e-18 else 0.0
