"""An algorithm as data: a row of choices, each the name of a function or a number.

No torch, so the command line can read the whole zoo.

    advantage      functions of `advantages.py` and `returns.py`: rewards to a signal per token
    loss           functions of `losses.py`: what a token's signal does to its log-prob
    aggregation    functions of `aggregation.py`: how token losses are averaged
    the rest       clip, KL, entropy, correction, shaping: numbers, and names of the same kind

A named algorithm is its predecessor with some choices changed (`dataclasses.replace`), so the zoo
also shows which algorithm patches which. `composed.py` turns a row into the two methods that the
loop calls.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class AdvantageKind(NamedTuple):
    """Properties of an advantage function.

    Attributes:
        baseline: what is subtracted from the reward, in words, for the table.
        scale: what it is divided by, in words.
        needs: "group" (at least 2 samples per prompt), "greedy" (a greedy completion per prompt),
            "critic", "teacher", or "" for nothing.
    """

    baseline: str
    scale: str
    needs: str = ""


ADVANTAGES: dict[str, AdvantageKind] = {
    "no_baseline": AdvantageKind("none", "-"),
    "group_mean": AdvantageKind("group mean", "-", "group"),
    "group_zscore": AdvantageKind("group mean", "group std", "group"),
    "leave_one_out": AdvantageKind("mean of the others", "-", "group"),
    "batch_std": AdvantageKind("group mean", "batch std", "group"),
    "length_weighted": AdvantageKind("length-weighted mean", "-", "group"),
    "maxrl": AdvantageKind("group mean", "group mean", "group"),
    "gpg": AdvantageKind("group mean", "share of mixed groups", "group"),
    "pass_at_k": AdvantageKind("pass@k of the group", "its std", "group"),
    "top_gap": AdvantageKind("second best of the group", "-", "group"),
    "normalise_then_sum": AdvantageKind("group mean", "group and batch std", "group"),
    "greedy_baseline": AdvantageKind("greedy completion", "-", "greedy"),
    "process": AdvantageKind("mean of the group's steps", "their std", "group"),
    "whitened_return": AdvantageKind("batch mean", "batch std"),
    "whitened_group_mean": AdvantageKind("group mean", "batch std", "group"),
    "gae": AdvantageKind("critic", "batch std", "critic"),
    "vtrace": AdvantageKind("critic", "batch std", "critic"),
    "teacher": AdvantageKind("none", "-", "teacher"),
}


class LossKind(NamedTuple):
    """Properties of a token loss.

    Attributes:
        ratio: "token", "sequence" or "none".
        clips: how the ratio is bounded, in words. None: the loss takes no clip.
    """

    ratio: str
    clips: str | None


LOSSES: dict[str, LossKind] = {
    "policy_gradient": LossKind("none", None),
    "clipped_surrogate": LossKind("token", "clip"),
    "sequence_surrogate": LossKind("sequence", "clip"),
    "sequence_token_surrogate": LossKind("sequence", "clip"),
    "length_scaled_sequence_surrogate": LossKind("sequence", "clip"),
    "clipped_weight": LossKind("token", "clip of the weight, gradient kept"),
    "soft_gate": LossKind("token", None),
    "geometric_surrogate": LossKind("sequence", "clip of each log-ratio"),
    "power_weight": LossKind("sequence", None),
    "mirror_descent": LossKind("sequence", None),
}

PASS_AT_K = 4
"""The k of `pass_at_k`, and its minimum number of samples per prompt."""

CORRECTION_BANDS: dict[str, tuple[float | None, float | None]] = {
    "none": (None, None),
    "truncated": (None, 2.0),
    "truncated-sequence": (None, 2.0),
    "masked": (0.5, 5.0),
    "masked-sequence": (None, 3.0),
    "geometric": (0.999, 1.002),
    "decoupled": (None, 5.0),
    "negative-sequence": (None, 0.5),
}
"""Rule -> (smallest, largest) weight in its paper, or in the peer that ships it."""


@dataclass(frozen=True)
class Method:
    """One row of the zoo, or a row with the overrides of a recipe.

    Attributes:
        name: name of the algorithm.
        patches: name of the predecessor. Empty for a root.
        paper: reference.
        advantage: key of `ADVANTAGES`.
        loss: key of `LOSSES`.
        aggregation: key of `aggregation.AGGREGATIONS`.
        clip_low: the ratio is at least 1 - clip_low. None: no lower bound.
        clip_high: the ratio is at most 1 + clip_high. None: no upper bound.
        dual_clip: where A < 0 the loss is at most -dual_clip * A. 0: off.
        tau: temperature of a soft gate, or strength of the mirror step.
        tau_negative: temperature of a soft gate where A < 0.
        beta: weight of the KL to the reference. 0: no KL and no reference.
        kl: estimator of the KL.
        kl_in: "loss" or "reward".
        kl_target: KL that beta is adapted to. 0: beta is fixed.
        gamma: discount of token rewards.
        lam: lambda of GAE.
        value_clip: largest change of the critic's values from those at collection.
        whiten: whether rewards are standardised by running statistics: none, all, source.
        entropy_bonus: weight of the entropy in the objective. 0: off.
        entropy_target: entropy that the bonus is adapted to, in nats. 0: the bonus is fixed.
        entropy_rule: none, clip-cov, kl-cov, top-entropy.
        correction: rule for importance weights, a key of `CORRECTION_BANDS`.
        correction_low: smallest weight that the rule lets through. None: the rule's own.
        correction_high: largest weight that the rule lets through. None: the rule's own.
        overlong_buffer: share of the completion limit over which the reward falls. 0: off.
        overlong_penalty: how far the reward falls over the buffer.
        overlong_truncated_only: whether only truncated completions pay it.
        length_penalty: none, kimi, cosine, stop-properly.
        dynamic_sampling: maximum rounds of sampling per step. 0: off.
        epochs: passes over a step's samples.
        minibatches: optimizer steps per pass.
    """

    name: str
    patches: str
    paper: str
    advantage: str
    loss: str
    aggregation: str
    clip_low: float | None = None
    clip_high: float | None = None
    dual_clip: float = 0.0
    tau: float | None = None
    tau_negative: float | None = None
    beta: float = 0.0
    kl: str = "k3"
    kl_in: str = "loss"
    kl_target: float = 0.0
    gamma: float = 1.0
    lam: float = 1.0
    value_clip: float = 0.2
    whiten: str = "none"
    entropy_bonus: float = 0.0
    entropy_target: float = 0.0
    entropy_rule: str = "none"
    correction: str = "none"
    correction_low: float | None = None
    correction_high: float | None = None
    overlong_buffer: float = 0.0
    overlong_penalty: float = 1.0
    overlong_truncated_only: bool = False
    length_penalty: str = "none"
    dynamic_sampling: int = 0
    epochs: int = 1
    minibatches: int = 1

    @property
    def group_baseline(self) -> bool:
        """True if the advantage compares samples of a prompt, so that at least 2 are needed."""
        return ADVANTAGES[self.advantage].needs == "group"

    @property
    def needs_greedy(self) -> bool:
        """True if the baseline is the reward of a greedy completion of the prompt."""
        return ADVANTAGES[self.advantage].needs == "greedy"

    @property
    def equal_rewards_idle(self) -> bool:
        """True if a group whose rewards are all equal gets no advantage."""
        return self.group_baseline and self.advantage != "normalise_then_sum"

    @property
    def needs_critic(self) -> bool:
        """True if the advantage needs the value of every state."""
        return ADVANTAGES[self.advantage].needs == "critic"

    @property
    def needs_teacher(self) -> bool:
        """True if the advantage comes from a teacher's log-probs."""
        return ADVANTAGES[self.advantage].needs == "teacher"

    @property
    def needs_reference(self) -> bool:
        """True if `ref_logp` is read: there is a KL term, or a teacher."""
        return self.beta > 0 or self.needs_teacher

    @property
    def kl_in_loss(self) -> bool:
        """True if beta * KL is a term of the loss."""
        return self.beta > 0 and self.kl_in == "loss"

    @property
    def ratio_from_trainer(self) -> bool:
        """True if ratios are against the trainer's own log-probs at the start of the step.

        The gap to the sampler is then an importance weight.
        """
        return self.correction not in ("none", "negative-sequence") or self.advantage == "vtrace"

    @property
    def needs_proximal(self) -> bool:
        """True if the trainer must score the samples before the first update.

        Corrections and entropy rules are computed from these log-probs.
        """
        return self.ratio_from_trainer or self.entropy_rule != "none"

    @property
    def entropy_in_loss(self) -> bool:
        """True if the entropy is a term of the loss, so that its gradient is needed."""
        return self.entropy_bonus > 0 or self.entropy_target > 0

    @property
    def regularised(self) -> bool:
        """True if samples without an advantage still change the weights.

        They do so by the KL, the entropy, or the mirror step.
        """
        return self.kl_in_loss or self.entropy_in_loss or self.loss == "mirror_descent"

    @property
    def updates(self) -> int:
        """Optimizer steps made on the samples of one step."""
        return self.epochs * self.minibatches

    @property
    def band(self) -> tuple[float | None, float | None]:
        """(lowest, highest) importance weight of the correction."""
        low, high = CORRECTION_BANDS[self.correction]
        return (low if self.correction_low is None else self.correction_low), (
            high if self.correction_high is None else self.correction_high
        )

    @property
    def models(self) -> str:
        """The models in memory, in words."""
        other = (
            ["critic"] * self.needs_critic
            + ["teacher"] * self.needs_teacher
            + ["reference"] * (self.beta > 0 and not self.needs_teacher)
        )
        return " + ".join(["policy", *other])
