"""A preference loss as data: a function of the margin, and the numbers that it reads. No torch.

A pair has a margin, the score of the better completion minus that of the worse one:

    h       = log pi(y | x) - log pi_ref(y | x)        (without a reference: log pi(y | x))
    score   = f'(exp h) of the divergence; h itself for the reverse KL
    margin  = score_w - shift * score_l                (per token: each divided by its length)

Most losses are a `link` of this margin. A named loss is its predecessor with some choices changed
(`dataclasses.replace`), as in the zoo of algorithms.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from .pairs import Pairs, Statistics, Unpaired

MARGIN = ("beta", "tail_weight", "sft_weight")
"""Settings that every loss of pairs reads."""
SCORES = (*MARGIN, "shift", "divergence", "divergence_alpha")
"""Settings that a loss of the margin reads."""


@dataclass(frozen=True)
class Settings:
    """Numbers of a loss. Each loss reads some of them (`PreferenceLoss.reads`).

    Attributes:
        beta: scale of the margin: the weight of the KL to the reference.
        label_smoothing: probability that a label is wrong.
        sft_weight: weight of the cross-entropy of the better completion, per token of the step.
        target_margin: margin that a pair must exceed.
        shift: weight of the worse completion in the margin.
        tail_weight: weight of the tokens after the length of the pair's shorter completion.
        penalty: weight of the fall of the better completion below the reference.
        divergence: "reverse-kl", "forward-kl", "js", "alpha" or "squared".
        divergence_alpha: alpha of the divergence "alpha".
        liked_weight: weight of liked completions.
        disliked_weight: weight of disliked completions.
        per_token: whether scores are divided by the completion's number of tokens.
        policy_weights: whether a pair is weighted by its probability under the policy (WPO).
        modulation: temperature of DiscoPOP's blend.
        adaptation: how far beta follows the margin of the step.
        kept: share of the pairs of a step that are trained.
        momentum: momentum of the running average over steps.
    """

    beta: float = 0.1
    label_smoothing: float = 0.0
    sft_weight: float = 0.0
    target_margin: float = 0.0
    shift: float = 1.0
    tail_weight: float = 1.0
    penalty: float = 0.0
    divergence: str = "reverse-kl"
    divergence_alpha: float = 0.5
    liked_weight: float = 1.0
    disliked_weight: float = 1.0
    per_token: bool = False
    policy_weights: bool = False
    modulation: float = 0.05
    adaptation: float = 0.6
    kept: float = 1.0
    momentum: float = 0.9

    @property
    def needs_head(self) -> bool:
        """True if the sums over the first tokens are read (`Pairs.chosen_head`)."""
        return self.tail_weight != 1.0


@dataclass(frozen=True)
class PreferenceLoss:
    """One row of the zoo.

    Attributes:
        name: name of the loss.
        patches: name of the predecessor. Empty for a root.
        paper: reference.
        formula: the loss of a pair or of a completion in one line.
        change: what it changes of its predecessor, in words.
        use: when to choose it.
        link: name of its function in `losses.LINKS` or `losses.UNPAIRED`.
        peers: names of other frameworks for it.
        reads: the settings that it reads.
        defaults: its own values of the settings.
        needs_reference: whether it compares with a reference model.
        unpaired: whether it takes single completions, liked or disliked, in place of pairs.
        statistics: name in `statistics.PAIRED` or `UNPAIRED` of what it needs of the whole step,
            from the policy's log-probs before the step's update. Empty: nothing.
    """

    name: str
    patches: str
    paper: str
    formula: str
    change: str
    use: str
    link: str
    peers: str = ""
    reads: tuple[str, ...] = SCORES
    defaults: Settings = field(default_factory=Settings)
    needs_reference: bool = True
    unpaired: bool = False
    statistics: str = ""

    @property
    def cost(self) -> str:
        """Models in memory, and a further forward pass of the policy, in words."""
        models = "policy + reference" if self.needs_reference else "policy"
        return f"{models}; scores the step before its update" if self.statistics else models

    def whole_batch(
        self, rows: Pairs | Unpaired, settings: Settings, running: float | None = None
    ) -> Statistics:
        """What the loss needs of a whole step: of all its micro-batches and ranks.

        Args:
            rows: all pairs or completions of the step, without gradient.
            settings: the settings of the loss.
            running: `Statistics.running` of the step before. None in the first step.
        """
        from .statistics import whole_batch

        return whole_batch(self, rows, settings, running)

    def per_pair(
        self, rows: Pairs | Unpaired, settings: Settings, statistics: Statistics
    ) -> Tensor:
        """Loss of each row.

        Args:
            rows: N pairs or completions: all of a step, or some.
            settings: the settings of the loss.
            statistics: those of the step, of the same N rows (`Statistics.of`).

        Returns:
            [N] losses. The loss of a step is their mean with the weights of the rows.
        """
        from .losses import per_pair

        return per_pair(self, rows, settings, statistics)
