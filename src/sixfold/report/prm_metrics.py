"""Metrics of a stage that trains a process reward model."""

from __future__ import annotations

from .metric import Metric

PRM = (
    Metric(
        "prm/accuracy",
        "share",
        "labelled steps of the training step on the right side of 0.5",
        "Σ weight · [(score >= 0.5) = (label >= 0.5)]; every solution has the same weight",
    ),
    Metric(
        "prm/lm_loss",
        "nats",
        "cross-entropy of the tokens of right solutions under the language head, which"
        " `prm.lm_weight` adds to the loss",
        "mean over solutions of [right] · -mean over its tokens of log p",
    ),
    Metric(
        "prm/heldout_accuracy",
        "share",
        "held-out labelled steps on the right side of 0.5",
        "steps with (score >= 0.5) = (label >= 0.5) / steps",
    ),
    Metric(
        "prm/heldout_calibration_error",
        "share",
        "distance of the scores from the share of right steps",
        "Σ over ten bins of the score: steps / all · |mean score - mean label|",
    ),
    Metric(
        "prm/heldout_error_found",
        "share",
        "held-out solutions with an error whose first wrong step is found",
        "first step with score < 0.5 is the first with label < 0.5 / solutions with an error",
    ),
    Metric(
        "prm/heldout_all_right",
        "share",
        "held-out solutions without an error in which no step has a score below 0.5",
        "such solutions / solutions without an error",
    ),
    Metric(
        "prm/heldout_first_error_f1",
        "share",
        "ProcessBench's F1",
        "harmonic mean of prm/heldout_error_found and prm/heldout_all_right",
    ),
)
