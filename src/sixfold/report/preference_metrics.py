"""Metrics of a stage that trains on preferences.

In the formulas, w is the better and l the worse completion of a pair, |y| the tokens of a
completion, and h = log pi(y) - log pi_ref(y), without a reference log pi(y). Every comparison has
the same weight, which its pairs share.
"""

from __future__ import annotations

from .metric import Metric

PREFERENCE = (
    Metric(
        "preference/accuracy",
        "share",
        "pairs of the step whose better completion has the larger score; a tie counts half",
        "Σ weight · [margin > 0]",
    ),
    Metric(
        "preference/margin",
        "score",
        "mean margin between better and worse completions",
        "Σ weight · beta · margin of the first loss; of DPO, beta · (h_w - h_l)",
    ),
    Metric(
        "preference/reward_chosen",
        "score",
        "implicit reward of better completions; absent without a reference",
        "Σ weight · beta · h_w",
    ),
    Metric(
        "preference/reward_rejected",
        "score",
        "implicit reward of worse completions; absent without a reference",
        "Σ weight · beta · h_l",
    ),
    Metric(
        "preference/logp_chosen",
        "nats",
        "log-prob of better completions, per token",
        "Σ weight · log pi(w) / |w|",
    ),
    Metric(
        "preference/logp_rejected",
        "nats",
        "log-prob of worse completions, per token",
        "Σ weight · log pi(l) / |l|",
    ),
    Metric(
        "preference/chosen_shift",
        "nats",
        "log-prob that better completions have gained on the reference, per token",
        "Σ weight · h_w / |w|",
    ),
    Metric(
        "preference/rejected_shift",
        "nats",
        "log-prob that worse completions have gained on the reference, per token",
        "Σ weight · h_l / |l|",
    ),
    Metric(
        "preference/displacement",
        "nats",
        "likelihood displacement: log-prob that better completions have lost, per token, although"
        " the margin is positive",
        "max(0, -preference/chosen_shift) if preference/margin > 0, else 0",
    ),
    Metric(
        "preference/length_corr",
        "share",
        "correlation of the margin with the difference of lengths; near 1, length is what is"
        " preferred",
        "Pearson's, of margin and |w| - |l|, over the pairs of the step",
    ),
    Metric(
        "preference/cut_frac",
        "share",
        "training pairs with a completion whose end is cut (comparisons.truncate)",
        "pairs with a cut side / pairs",
    ),
    Metric(
        "preference/on_policy_frac",
        "share",
        "comparisons of the step that the policy sampled with the weights with which the stage"
        " begins; absent if no row says which weights sampled it",
        "comparisons whose completions all have the hash of these weights / comparisons",
    ),
    Metric(
        "preference/liked_frac",
        "share",
        "completions of the step that are liked, of losses of single completions",
        "liked completions / completions",
    ),
    Metric(
        "preference/liked_reward",
        "score",
        "implicit reward of liked completions",
        "mean of beta · h over liked completions",
    ),
    Metric(
        "preference/disliked_reward",
        "score",
        "implicit reward of disliked completions",
        "mean of beta · h over disliked completions",
    ),
    Metric(
        "preference/heldout_loss",
        "nats",
        "loss of held-out comparisons",
        "as train/loss, with all of them as one step",
    ),
    Metric(
        "preference/heldout_accuracy",
        "share",
        "held-out pairs that the policy orders right",
        "as preference/accuracy",
    ),
    Metric(
        "preference/heldout_accuracy_low",
        "share",
        "lower end of the 95 % interval of preference/heldout_accuracy",
        "Agresti and Coull's interval over comparisons",
    ),
    Metric(
        "preference/heldout_accuracy_high",
        "share",
        "upper end of the 95 % interval of preference/heldout_accuracy",
        "Agresti and Coull's interval over comparisons",
    ),
    Metric(
        "preference/heldout_margin", "score", "margin of held-out pairs", "as preference/margin"
    ),
    Metric(
        "preference/heldout_logp_chosen",
        "nats",
        "log-prob of held-out better completions, per token",
        "as preference/logp_chosen",
    ),
    Metric(
        "preference/heldout_logp_rejected",
        "nats",
        "log-prob of held-out worse completions, per token",
        "as preference/logp_rejected",
    ),
    Metric(
        "preference/heldout_displacement",
        "nats",
        "log-prob that held-out better completions have lost since the start of the stage, per"
        " token, although the margin has grown",
        "max(0, start - now) of preference/heldout_logp_chosen if the margin has grown, else 0",
    ),
)
