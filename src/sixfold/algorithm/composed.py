"""Run a row of the zoo: `prepare` once per step, `compute_loss` in every update.

    prepare, once, over all rows of the step:
        rewards -> shaped -> advantages [B, T] -> entropy rule, importance weights -> weights [B, T]
    compute_loss, for any rows of it:
        token loss -> held-back tokens -> entropy, KL -> (weights * loss).sum()

Everything that compares rows (group statistics, denominators, the tokens that a rule selects)
happens in `prepare`. So `compute_loss` gives the same gradient for any split of the rows into
micro-batches or ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..batch import Batch, LossOutput, filled, final_rewards
from .aggregation import AGGREGATIONS, token_mean
from .entropy import clip_cov_tokens, kl_cov_tokens, top_entropy_tokens
from .kl import KL, unbiased
from .losses import clipped_value_loss, exp_clamped
from .method import Method
from .off_policy import CORRECTIONS, negative_sequence_mask
from .parts import (
    ADVANTAGES,
    CRITICS,
    LOSSES,
    Step,
    Terms,
    known,
    log_rho,
    old_policy,
    shaped_scores,
)
from .returns import whiten
from .steering import Steering

CLIP_COV_FRACTION, CLIP_COV_BAND = 2e-4, (1.0, 5.0)
KL_COV_FRACTION, KL_COV_BETA = 2e-3, 1.0
# In nats. A smaller gap is rounding, yet |gap| has its full gradient there, with a random sign.
KL_COV_DEAD_ZONE = 1e-3
TOP_ENTROPY_QUANTILE = 0.8
"""Settings of the entropy rules in the papers (arXiv:2505.22617, arXiv:2506.01939)."""


@dataclass
class Composed:
    """The algorithm of a method, as the training loop calls it.

    Attributes:
        horizon: longest completion that the run allows, in tokens.
        part_weights: weight of each named reward in the sum, for a method that reads the rewards
            one by one. A name that is missing weighs 1.
        steering: values of the method that change during the run.
    """

    method: Method
    horizon: int
    part_weights: Mapping[str, float] = field(default_factory=dict)
    steering: Steering = field(init=False, compare=False)

    def __post_init__(self) -> None:
        self.steering = Steering(self.method)

    @property
    def needs_reference(self) -> bool:
        return self.method.needs_reference

    def prepare(self, batch: Batch) -> Batch:
        """Fill in everything that the loss reads: `compute_advantages`, mini-batches and weights.

        It must see all rows of the step at once.
        """
        batch = self.compute_advantages(batch)
        minibatch = _minibatches(batch.group, self.method.minibatches)
        return self._weigh(batch.with_(minibatch=minibatch))

    def compute_advantages(self, batch: Batch) -> Batch:
        """Fill in advantages and importance weights, and the critic's returns if there is one."""
        m = self.method
        scores = shaped_scores(batch, m, self.horizon)
        self.steering.observe(batch, scores)
        rewards = self._token_rewards(batch, self.steering.whitened(batch, scores))
        step = Step(batch, rewards, m, self.part_weights)
        if m.needs_critic:
            advantages, returns = CRITICS[m.advantage](step)
            batch = batch.with_(returns=torch.where(known(step), returns, 0.0))
            advantages = whiten(advantages, known(step))
        else:
            advantages = ADVANTAGES[m.advantage](step)
        if advantages.ndim == 1:
            advantages = advantages[:, None]
        advantages = torch.where(known(step) | (m.needs_teacher & batch.mask), advantages, 0.0)
        batch = batch.with_(advantages=advantages)
        if m.correction in CORRECTIONS:
            batch = batch.with_(
                correction=CORRECTIONS[m.correction](log_rho(batch), batch.mask, *m.band)
            )
        return self._entropy_rule(batch)

    def compute_loss(self, batch: Batch, logp: Tensor) -> LossOutput:
        m, mask = self.method, batch.mask
        weights = torch.where(mask, filled(batch.weights, "weights"), 0.0)
        trained, old, advantages = (
            torch.where(mask, t, 0.0)
            for t in (logp, old_policy(batch, m), filled(batch.advantages, "advantages"))
        )
        s = LOSSES[m.loss](Terms(trained, old, advantages, mask), m)
        token_loss, means = s.loss, dict[str, Tensor]()
        if batch.marked is not None:
            gap = trained - old
            penalised = (
                KL_COV_BETA * (gap.abs() - KL_COV_DEAD_ZONE).clamp_min(0.0)
                - exp_clamped(gap) * advantages
            )
            token_loss = torch.where(batch.marked, penalised, token_loss)
        if (importance := self._importance(batch, trained)) is not None:
            token_loss = token_loss * importance
            means |= {
                "correction/weight": importance,
                "correction/dropped_frac": (importance == 0).to(logp.dtype),
            }
        if m.clip_low is not None or m.clip_high is not None:
            means |= {
                "train/clipped_frac": s.outside.to(logp.dtype),
                "train/clip_active_frac": s.active.to(logp.dtype),
            }
        policy_loss = loss = (weights * token_loss).sum()
        if self.needs_reference:
            kl = self._kl(trained, batch)
            means["train/kl"] = kl.detach()
            if m.kl_in_loss:
                loss = loss + self.steering.beta * (weights * kl).sum()
        if m.entropy_in_loss:
            loss = (
                loss
                - self.steering.entropy_bonus
                * (weights * torch.where(mask, filled(batch.entropy, "entropy"), 0.0)).sum()
            )
        means |= {
            key: torch.full_like(weights, value) for key, value in self.steering.metrics().items()
        }
        return LossOutput(
            loss, {"train/pg_loss": policy_loss.detach(), "train/loss": loss.detach()}, means
        )

    def value_batch(self, batch: Batch) -> Batch:
        """The batch with the critic's weights.

        Every scored token weighs the same. Rows whose checker failed have weight 0.
        """
        mask = batch.mask & batch.scores.isfinite()[:, None]
        return batch.with_(
            weights=_per_minibatch(
                lambda rows: token_mean(mask[rows], batch.group[rows], self.horizon), batch, mask
            )
        )

    def compute_value_loss(self, batch: Batch, values: Tensor) -> LossOutput:
        """Clipped squared error of the critic for some rows of `value_batch`. values: [B, T].

        arXiv:1707.06347, as in OpenAI Baselines.
        """
        tables = (values, filled(batch.values, "values"), filled(batch.returns, "returns"))
        new, old, returns = (torch.where(batch.mask, t, 0.0) for t in tables)
        token_loss = clipped_value_loss(new, old, returns, self.method.value_clip)
        loss = (filled(batch.weights, "weights") * token_loss).sum()
        return LossOutput(loss, {"critic/loss": loss.detach()})

    def _token_rewards(self, batch: Batch, scores: Tensor) -> Tensor:
        """[B, T] rewards that sum to `scores` in each row.

        If the KL belongs in the reward, beta * KL is subtracted on every sampled token.
        """
        m = self.method
        shift = torch.where(scores.isfinite(), scores - batch.scores, 0.0)
        rewards = batch.rewards + final_rewards(shift, batch.mask)
        if m.beta > 0 and m.kl_in == "reward":
            kl = torch.where(
                batch.mask, KL[m.kl](old_policy(batch, m), filled(batch.ref_logp, "ref_logp")), 0.0
            )
            # Otherwise it would pass for a failed check, and the row be dropped silently.
            if not bool(kl.isfinite().all()):
                raise ValueError(
                    "the KL to the reference is not finite on a sampled token: old_logp or ref_logp"
                    " holds NaN or inf"
                )
            rewards = rewards - self.steering.beta * kl
        return rewards

    def _entropy_rule(self, batch: Batch) -> Batch:
        """Apply the entropy rule: weight 0 for excluded tokens, or a mark on tokens to hold back.

        Both kinds still count in the denominators.
        """
        rule, advantages = self.method.entropy_rule, filled(batch.advantages, "advantages")
        if rule == "none":
            return batch
        mask = batch.mask & batch.scores.isfinite()[:, None]
        # A share of a small batch may be less than one token: then use one.
        one = 1.0 / max(int(mask.sum()), 1)
        if rule == "kl-cov":
            return batch.with_(
                marked=kl_cov_tokens(
                    advantages,
                    filled(batch.prox_logp, "prox_logp"),
                    mask,
                    max(KL_COV_FRACTION, one),
                )
            )
        if rule == "clip-cov":
            share, logp = max(CLIP_COV_FRACTION, one), filled(batch.prox_logp, "prox_logp")
            kept = ~clip_cov_tokens(
                advantages, logp, mask, share, *CLIP_COV_BAND, seed=self.steering.steps
            )
        else:
            kept = top_entropy_tokens(filled(batch.entropy, "entropy"), mask, TOP_ENTROPY_QUANTILE)
        importance = torch.ones_like(advantages) if batch.correction is None else batch.correction
        return batch.with_(correction=torch.where(kept, importance, 0.0))

    def _importance(self, batch: Batch, logp: Tensor) -> Tensor | None:
        """[B, T] factor of each token's policy loss. None: no factor."""
        if self.method.correction != "negative-sequence":
            return batch.correction
        # Always against the sampler: the rule measures how far samples are from the current policy.
        keep = negative_sequence_mask(
            logp.detach(),
            batch.old_logp,
            filled(batch.advantages, "advantages"),
            batch.mask,
            self.method.band[1] or 0.0,
        )
        return keep[:, None] * (
            torch.ones_like(logp) if batch.correction is None else batch.correction
        )

    def _kl(self, logp: Tensor, batch: Batch) -> Tensor:
        sampler, ref_logp = (
            torch.where(batch.mask, t, 0.0)
            for t in (batch.old_logp, filled(batch.ref_logp, "ref_logp"))
        )
        return (
            unbiased(logp, sampler, ref_logp)
            if self.method.kl == "k3-unbiased"
            else KL[self.method.kl](logp, ref_logp)
        )

    def _weigh(self, batch: Batch) -> Batch:
        """Add the aggregation's weights.

        Rows that cannot change the loss (no advantage and no regulariser, or a failed check) get
        weight 0 after the denominators are fixed. The gradient is the same, and the trainer need
        not compute them.
        """
        aggregate = AGGREGATIONS[self.method.aggregation]
        weights = _per_minibatch(
            lambda rows: aggregate(batch.mask[rows], batch.group[rows], self.horizon),
            batch,
            batch.mask,
        )
        signal = filled(batch.advantages, "advantages")
        if batch.correction is not None:
            signal = signal * batch.correction
        idle = (signal == 0).all(-1)
        failed = ~batch.scores.isfinite() & (not self.method.needs_teacher)
        still = failed if self.method.regularised or batch.marked is not None else failed | idle
        return batch.with_(weights=torch.where(still[:, None], 0.0, weights))


def _minibatches(group: Tensor, count: int) -> Tensor:
    """[B] update of each row: whole groups, in order, in at most `count` nearly equal parts."""
    numbers, rank = group.unique(return_inverse=True)
    return rank * min(count, len(numbers)) // len(numbers)


def _per_minibatch(weigh: Callable[[Tensor], Tensor], batch: Batch, mask: Tensor) -> Tensor:
    """[B, T] weights whose denominators are those of each row's own update.

    Args:
        weigh: row numbers -> their weights.
        mask: [B, T], for the shape of the result.
    """
    number = filled(batch.minibatch, "minibatch")
    weights = torch.zeros(mask.shape, dtype=batch.old_logp.dtype, device=mask.device)
    for m in number.unique():
        rows = (number == m).nonzero()[:, 0]
        weights[rows] = weigh(rows).to(weights.dtype)
    return weights


def make_algorithm(method: Method, horizon: int) -> Composed:
    """The algorithm of a resolved method.

    `horizon` is the longest completion that the run allows, in tokens.
    """
    return Composed(method, horizon)
