"""Metrics of a stage that trains a reward model."""

from __future__ import annotations

from ..types import DELTA_EDGES
from .metric import Metric

REWARD_MODEL = (
    Metric(
        "reward_model/accuracy",
        "share",
        "pairs, or labelled completions, of the step that scores order right; a tie counts half",
        "Σ weight · [delta > 0]; every comparison has the same weight",
    ),
    Metric(
        "reward_model/delta",
        "score",
        "mean score of better completions above worse ones",
        "Σ weight · delta; delta is r_w - r_l, or ±r of a labelled completion",
    ),
    Metric(
        "reward_model/lm_loss",
        "nats",
        "cross-entropy of the better completions' tokens under the language head, which"
        " `reward_model.lm_weight` adds to the loss",
        "-mean over the tokens of log p",
    ),
    Metric("reward_model/score_mean", "score", "mean score of the step", "Σ weight · r"),
    Metric(
        "reward_model/score_std",
        "score",
        "standard deviation of the scores of the step",
        "√(Σ weight · r² - mean²)",
    ),
    Metric(
        "reward_model/heldout_accuracy",
        "share",
        "held-out pairs, or labelled completions, that the scores order right, after"
        " `reward_model.length_debias`",
        "mean over comparisons: (pairs with delta > 0, and half of those with 0) / pairs",
    ),
    Metric(
        "reward_model/heldout_accuracy_low",
        "share",
        "lower end of the 95 % interval of reward_model/heldout_accuracy",
        "Agresti and Coull's interval over comparisons",
    ),
    Metric(
        "reward_model/heldout_accuracy_high",
        "share",
        "upper end of the 95 % interval of reward_model/heldout_accuracy",
        "Agresti and Coull's interval over comparisons",
    ),
    Metric(
        "reward_model/heldout_delta_hist",
        "count",
        "held-out pairs by |delta|",
        "bins from 0, 0.5, 1, 2, 4 and 8, the last without an end",
        is_list=True,
        edges=DELTA_EDGES,
    ),
    Metric(
        "reward_model/heldout_healthy_frac",
        "share",
        "held-out pairs in the healthy band",
        "pairs with 0.5 <= |delta| <= 4 / pairs",
    ),
    Metric(
        "reward_model/heldout_calibration_error",
        "share",
        "distance of the promised from the real accuracy; 0 if a pair with delta = 1 is right in 73"
        " of 100 cases",
        "Σ over the bins of |delta|: pairs / all · |mean sigma(|delta|) - accuracy|",
    ),
    Metric(
        "reward_model/heldout_length_correlation",
        "share",
        "correlation of score and length among completions of one prompt, -1 to 1, before"
        " `reward_model.length_debias`",
        "of the differences from the means of each group",
    ),
)
