"""An algorithm as data: a row of choices, each the name of a function or a number. No torch, so the
command line can read the whole zoo.

    advantage     functions of `advantages.py` and `returns.py`    how rewards become a signal for
    each token loss          functions of `losses.py`                         what a token's signal
    does to its log-prob aggregation   functions of `aggregation.py`                    how token
    losses become one number the rest      clip, KL, entropy, correction, shaping           numbers
    and names of the same kind

A named algorithm is its predecessor with some choices changed (`dataclasses.replace`), so the zoo
is also the account of who patched whom. `composed.py` turns a row into the two methods that the
loop calls.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class AdvantageKind(NamedTuple):
    """What an advantage function stands on. baseline, scale: in words, for the table. needs: group
    (K >= 2), greedy (a greedy completion per prompt), critic, teacher, or
    nothing.
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
    """What a token loss looks at. ratio: token, sequence or none. clips: how it holds the ratio
    back, in words; None: it takes no clip.
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
"""The k of `pass_at_k`: fewest samples of a prompt that it can look at."""

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
"""Rule -> (lowest, highest) that its paper, or the peer that ships it, lets through."""


@dataclass(frozen=True)
class Method:
    """One row of the zoo: the vetted defaults of a named algorithm, or those with a recipe's
    overrides laid over them.

    name, patches (the predecessor), paper. advantage, loss, aggregation: see the module.
    clip_low, clip_high: the ratio is held to [1 - clip_low, 1 + clip_high]; None: that side is
    open. dual_clip: where A < 0 the loss is capped at -dual_clip * A; 0: off. tau, tau_negative: of
    a soft gate, or the mirror step.
    beta: weight of the KL to the reference. kl: its estimator. kl_in: "loss" or "reward".
    kl_target: beta follows the KL; 0: fixed.
    gamma, lam, value_clip: of GAE and the critic. whiten: rewards standardised by what the run has
    seen (none, all, source).
    entropy_bonus, entropy_target: weight of the entropy, and what it is steered to; 0: off.
    entropy_rule: none, clip-cov, kl-cov, top-entropy.
    correction: an importance-sampling rule, with the band it lets through; None: the rule's own.
    overlong_buffer: share of the completion limit over which the reward falls by overlong_penalty,
    of all answers or only of those cut off; 0: off.
    length_penalty: none, kimi, cosine, stop-properly.
    dynamic_sampling: most rounds of sampling in a step; 0: off. epochs, minibatches: passes over a
    step's samples, optimizer steps in a pass.
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
        """The advantage is taken within a group: one sample a prompt has none."""
        return ADVANTAGES[self.advantage].needs == "group"

    @property
    def needs_greedy(self) -> bool:
        """The baseline is the reward of a greedy completion of the prompt."""
        return ADVANTAGES[self.advantage].needs == "greedy"

    @property
    def needs_critic(self) -> bool:
        """The advantage needs a value of every state."""
        return ADVANTAGES[self.advantage].needs == "critic"

    @property
    def needs_teacher(self) -> bool:
        """The advantage is a teacher's opinion of each token."""
        return ADVANTAGES[self.advantage].needs == "teacher"

    @property
    def needs_reference(self) -> bool:
        """`ref_logp` is read: there is a KL term, or a teacher."""
        return self.beta > 0 or self.needs_teacher

    @property
    def kl_in_loss(self) -> bool:
        """beta * KL is a term of the loss."""
        return self.beta > 0 and self.kl_in == "loss"

    @property
    def ratio_from_trainer(self) -> bool:
        """Ratios are against the trainer's own log-probs when the step began; what led there from
        the sampler is an importance weight.
        """
        return self.correction not in ("none", "negative-sequence") or self.advantage == "vtrace"

    @property
    def needs_proximal(self) -> bool:
        """A pass over the samples with the trainer's weights before the first update: what
        corrections and entropy rules are computed from.
        """
        return self.ratio_from_trainer or self.entropy_rule != "none"

    @property
    def entropy_in_loss(self) -> bool:
        """The entropy is a term of the loss, so its gradient is needed."""
        return self.entropy_bonus > 0 or self.entropy_target > 0

    @property
    def regularised(self) -> bool:
        """Samples without an advantage still move the weights: by the KL, the entropy, or the
        mirror step.
        """
        return self.kl_in_loss or self.entropy_in_loss or self.loss == "mirror_descent"

    @property
    def updates(self) -> int:
        """Optimizer steps that a step's samples are used for."""
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
        """Models in memory."""
        other = (
            ["critic"] * self.needs_critic
            + ["teacher"] * self.needs_teacher
            + ["reference"] * (self.beta > 0 and not self.needs_teacher)
        )
        return " + ".join(["policy", *other])
