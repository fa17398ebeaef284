"""Formulas of the preference losses: [N] losses of N pairs or completions.

Each takes what is named in its docstring and returns a loss per row, so that the sum over any split
of a step is the loss of the step. What belongs to the whole step comes in `Statistics`.

Log-probs may be far apart: no function overflows or gives NaN for log-ratios of +-1000 in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from .pairs import Pairs, Statistics, Unpaired

if TYPE_CHECKING:
    from .loss import PreferenceLoss, Settings

LARGEST_EXPONENT = 20.0
"""exp of more is continued by its tangent: it would overflow float32."""

Link = Callable[[Pairs, "Settings", Statistics], Tensor]
LinkUnpaired = Callable[[Unpaired, "Settings", Statistics], Tensor]


def per_pair(
    row: PreferenceLoss, rows: Pairs | Unpaired, settings: Settings, statistics: Statistics
) -> Tensor:
    """Loss of each row: see `PreferenceLoss.per_pair`."""
    if isinstance(rows, Unpaired):
        return UNPAIRED[row.link](rows, settings, statistics)
    pairs = compared(row, rows, settings)
    losses = LINKS[row.link](pairs, settings, statistics)
    if settings.policy_weights:
        losses = losses * policy_weights(rows)
    if statistics.factor is not None:
        losses = losses * statistics.factor
    if settings.sft_weight:
        losses = losses + settings.sft_weight * cross_entropy(rows, statistics)
    return losses


# Parts of a margin


def compared(row: PreferenceLoss, pairs: Pairs, settings: Settings) -> Pairs:
    """Pairs as a loss compares them: its reference, and its weight of the tail."""
    return without_tail(pairs if row.needs_reference else pairs.without_reference(), settings)


def without_tail(pairs: Pairs, s: Settings) -> Pairs:
    """Pairs whose tokens after the shorter completion's length are weighted by `s.tail_weight`.

    LD-DPO, arXiv:2409.06411 eq. 9.
    """
    if not s.needs_head:
        return pairs

    def weighted(whole: Tensor, head: Tensor | None) -> Tensor:
        if head is None:
            raise ValueError("tail_weight needs the sums over the heads of the completions")
        return head + s.tail_weight * (whole - head)

    pairs = replace(
        pairs,
        chosen=weighted(pairs.chosen, pairs.chosen_head),
        rejected=weighted(pairs.rejected, pairs.rejected_head),
    )
    if pairs.ref_chosen is None or pairs.ref_rejected is None:
        return pairs
    return replace(
        pairs,
        ref_chosen=weighted(pairs.ref_chosen, pairs.ref_chosen_head),
        ref_rejected=weighted(pairs.ref_rejected, pairs.ref_rejected_head),
    )


def log_ratios(pairs: Pairs) -> tuple[Tensor, Tensor]:
    """h of the better and the worse completions: ([N], [N])."""
    if pairs.ref_chosen is None or pairs.ref_rejected is None:
        return pairs.chosen, pairs.rejected
    return pairs.chosen - pairs.ref_chosen, pairs.rejected - pairs.ref_rejected


def score(h: Tensor, s: Settings) -> Tensor:
    """f'(exp h) of a divergence, up to a constant (arXiv:2309.16240; squared: arXiv:2602.06788).

    Args:
        h: [N] log-ratios.
        s: reads `divergence` and `divergence_alpha`.
    """
    if s.divergence == "forward-kl":
        return 1 - _exp(-h)
    if s.divergence == "js":
        return math.log(2) + logsigmoid(h)
    if s.divergence == "squared":
        return h * _exp(-h)
    power = s.divergence_alpha - 1
    if s.divergence == "alpha" and abs(power) >= 1e-6:
        return (_exp(power * h) - 1) / power
    return h


def margin(pairs: Pairs, s: Settings) -> Tensor:
    """score_w - shift * score_l of each pair: [N]. Not yet multiplied by beta."""
    chosen, rejected = (score(h, s) for h in log_ratios(pairs))
    if s.per_token:
        chosen, rejected = chosen / pairs.chosen_tokens, rejected / pairs.rejected_tokens
    return chosen - s.shift * rejected


def policy_weights(pairs: Pairs) -> Tensor:
    """[N] weights without gradient: product of both completions' mean-token probabilities.

    WPO, arXiv:2406.11827 eq. 2, without its division by the sum of squared probabilities.
    """
    means = pairs.chosen / pairs.chosen_tokens + pairs.rejected / pairs.rejected_tokens
    return means.detach().exp()


def cross_entropy(pairs: Pairs, statistics: Statistics) -> Tensor:
    """[N] terms whose weighted mean is the cross-entropy per token of the better completions."""
    assert statistics.mean_tokens is not None
    return -pairs.chosen / statistics.mean_tokens


def _exp(x: Tensor) -> Tensor:
    bounded = x.clamp(max=LARGEST_EXPONENT)
    return bounded.exp() + math.exp(LARGEST_EXPONENT) * (x - bounded)


def _smoothed(z: Tensor, s: Settings) -> Tensor:
    """-log sigmoid(z) with label smoothing."""
    if not s.label_smoothing:
        return -logsigmoid(z)
    return -(1 - s.label_smoothing) * logsigmoid(z) - s.label_smoothing * logsigmoid(-z)


# Losses of the margin


def logistic(pairs: Pairs, s: Settings, statistics: Statistics) -> Tensor:
    """-log sigmoid(beta * margin - target_margin), with label smoothing.

    Its gradient in the margin is -beta * sigmoid(-(beta * margin - target_margin)).
    """
    beta = s.beta if statistics.beta is None else statistics.beta
    return _smoothed(beta * margin(pairs, s) - s.target_margin, s)


def robust(pairs: Pairs, s: Settings, statistics: Statistics) -> Tensor:
    """Logistic loss without the bias of labels that are wrong with probability label_smoothing."""
    z, e = s.beta * margin(pairs, s), s.label_smoothing
    return (-(1 - e) * logsigmoid(z) + e * logsigmoid(-z)) / (1 - 2 * e)


def hinge(pairs: Pairs, s: Settings, statistics: Statistics) -> Tensor:
    """max(0, 1 - beta * margin)."""
    return torch.relu(1 - s.beta * margin(pairs, s))


def square(pairs: Pairs, s: Settings, statistics: Statistics) -> Tensor:
    """(margin - 1 / (2 beta))^2: the loss and its gradient are 0 at that margin."""
    return (margin(pairs, s) - 1 / (2 * s.beta)) ** 2


def exo(pairs: Pairs, s: Settings, statistics: Statistics) -> Tensor:
    """KL(q || p) of q = sigmoid(beta * margin) and p = 1 - label_smoothing."""
    z, e = s.beta * margin(pairs, s), s.label_smoothing
    return torch.sigmoid(z) * (logsigmoid(z) - math.log1p(-e)) + torch.sigmoid(-z) * (
        logsigmoid(-z) - math.log(e)
    )


def discopop(pairs: Pairs, s: Settings, statistics: Statistics) -> Tensor:
    """(1 - a) log(1 + exp(-z)) + a exp(-z), with a = sigmoid(z / modulation), z = beta * margin."""
    z = s.beta * margin(pairs, s)
    blend = z / s.modulation
    # a exp(-z) as one exponential: exp(-z) alone overflows where a is 0
    return -logsigmoid(z) * torch.sigmoid(-blend) + _exp(logsigmoid(blend) - z)


def positive(pairs: Pairs, s: Settings, statistics: Statistics) -> Tensor:
    """-log sigmoid(beta * (margin - penalty * max(0, -h_w)))."""
    fall = torch.relu(-log_ratios(pairs)[0])
    return -logsigmoid(s.beta * (margin(pairs, s) - s.penalty * fall))


# Losses of the two log-ratios


def nca(pairs: Pairs, s: Settings, statistics: Statistics) -> Tensor:
    """-log sigmoid(beta h_w) - (log sigmoid(-beta h_w) + log sigmoid(-beta h_l)) / 2."""
    better, worse = (s.beta * h for h in log_ratios(pairs))
    return -logsigmoid(better) - 0.5 * logsigmoid(-better) - 0.5 * logsigmoid(-worse)


def bco_pair(pairs: Pairs, s: Settings, statistics: Statistics) -> Tensor:
    """-log sigmoid(beta h_w) - log sigmoid(-beta h_l)."""
    better, worse = (s.beta * h for h in log_ratios(pairs))
    return -logsigmoid(better) - logsigmoid(-worse)


def sppo(pairs: Pairs, s: Settings, statistics: Statistics) -> Tensor:
    """(h_w - 1 / (2 beta))^2 + (h_l + 1 / (2 beta))^2."""
    better, worse = log_ratios(pairs)
    return (better - 0.5 / s.beta) ** 2 + (worse + 0.5 / s.beta) ** 2


def apo_zero(pairs: Pairs, s: Settings, statistics: Statistics) -> Tensor:
    """sigmoid(-beta h_w) + sigmoid(beta h_l)."""
    better, worse = (s.beta * h for h in log_ratios(pairs))
    return torch.sigmoid(-better) + torch.sigmoid(worse)


def apo_down(pairs: Pairs, s: Settings, statistics: Statistics) -> Tensor:
    """sigmoid(beta h_w) + sigmoid(-beta (h_w - h_l))."""
    better, worse = (s.beta * h for h in log_ratios(pairs))
    return torch.sigmoid(better) + torch.sigmoid(worse - better)


def odds_ratio(pairs: Pairs, s: Settings, statistics: Statistics) -> Tensor:
    """-beta * log sigmoid(log odds_w - log odds_l), odds p / (1 - p) of the mean-token p."""

    def log_odds(logp: Tensor, tokens: Tensor) -> Tensor:
        mean = (logp / tokens).clamp(max=-1e-6)  # at p = 1 the odds are infinite
        return mean - torch.log(-torch.expm1(mean))

    z = log_odds(pairs.chosen, pairs.chosen_tokens) - log_odds(
        pairs.rejected, pairs.rejected_tokens
    )
    return -s.beta * logsigmoid(z)


def none(pairs: Pairs, s: Settings, statistics: Statistics) -> Tensor:
    """0 for each pair: the cross-entropy is all that is trained."""
    return torch.zeros_like(pairs.chosen)


# Losses of sorted pairs


def aot(pairs: Pairs, s: Settings, statistics: Statistics) -> Tensor:
    """Logistic loss of log pi_w - log pi_l minus the reference's difference of the same rank."""
    assert statistics.chosen_partner is not None
    return _smoothed(s.beta * (pairs.chosen - pairs.rejected - statistics.chosen_partner), s)


def aot_unpaired(pairs: Pairs, s: Settings, statistics: Statistics) -> Tensor:
    """Logistic loss of h_w of a rank minus h_l of the same rank.

    The better and the worse completion of a pair have different ranks. Each is compared with its
    partner: half of the two losses, with the gradient of the whole, gives the sum over the ranks.
    """
    assert statistics.chosen_partner is not None and statistics.rejected_partner is not None
    better, worse = log_ratios(pairs)
    both = _smoothed(s.beta * (better - statistics.chosen_partner), s) + _smoothed(
        s.beta * (statistics.rejected_partner - worse), s
    )
    return both - both.detach() / 2


LINKS: dict[str, Link] = {
    "logistic": logistic,
    "robust": robust,
    "hinge": hinge,
    "square": square,
    "exo": exo,
    "discopop": discopop,
    "positive": positive,
    "nca": nca,
    "bco_pair": bco_pair,
    "sppo": sppo,
    "apo_zero": apo_zero,
    "apo_down": apo_down,
    "odds_ratio": odds_ratio,
    "none": none,
    "aot": aot,
    "aot_unpaired": aot_unpaired,
}


# Losses of single completions


def kto(rows: Unpaired, s: Settings, statistics: Statistics) -> Tensor:
    """weight * sigmoid(-beta (h - z0)) if liked, weight * sigmoid(beta (h - z0)) if not."""
    assert statistics.reference_point is not None
    z = s.beta * (rows.logp - rows.ref_logp - statistics.reference_point)
    return _label_weights(rows, s) * torch.sigmoid(torch.where(rows.liked, -z, z))


def bco(rows: Unpaired, s: Settings, statistics: Statistics) -> Tensor:
    """-log sigmoid(beta h - delta) if liked, -log sigmoid(delta - beta h) if not."""
    assert statistics.reference_point is not None
    z = s.beta * (rows.logp - rows.ref_logp) - statistics.reference_point
    return -_label_weights(rows, s) * logsigmoid(torch.where(rows.liked, z, -z))


def apo_zero_unpaired(rows: Unpaired, s: Settings, statistics: Statistics) -> Tensor:
    """sigmoid(-beta h) if liked, sigmoid(beta h) if not."""
    z = s.beta * (rows.logp - rows.ref_logp)
    return _label_weights(rows, s) * torch.sigmoid(torch.where(rows.liked, -z, z))


def outcome(rows: Unpaired, s: Settings, statistics: Statistics) -> Tensor:
    """-log sigmoid(beta h) if liked, -log sigmoid(-beta h) if not."""
    z = s.beta * (rows.logp - rows.ref_logp)
    return -_label_weights(rows, s) * logsigmoid(torch.where(rows.liked, z, -z))


def _label_weights(rows: Unpaired, s: Settings) -> Tensor:
    ones = torch.ones_like(rows.ref_logp)
    return torch.where(rows.liked, s.liked_weight * ones, s.disliked_weight * ones)


UNPAIRED: dict[str, LinkUnpaired] = {
    "kto": kto,
    "bco": bco,
    "apo_zero_unpaired": apo_zero_unpaired,
    "outcome": outcome,
}
