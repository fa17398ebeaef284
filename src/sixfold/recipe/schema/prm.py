"""Settings of process reward models: how a stage trains one, and how it scores as a reward."""

from __future__ import annotations

from typing import Literal

from .base import Real, Section, knob


class PrmConfig(Section):
    """Training of a process reward model on solutions whose steps are labelled."""

    steps: int = knob(0, "number of steps", ge=0)
    epochs: int = knob(
        0, "passes over the solutions, in place of prm.steps (0: steps decides)", ge=0
    )
    examples_per_step: int = knob(64, "solutions per step", ge=1)
    separator: str = knob("\n", "text after each step but the last of a row that lists its steps")
    ends: str = knob(
        "newline",
        "where the model's users end steps, stored with it: newline, blank_line, sentence,"
        " token:TEXT, xml:TAG, every:N (tokens) or path.py:function",
    )
    lm_weight: Real = knob(
        0.0,
        "weight of the cross-entropy of the tokens of right solutions under the language head of"
        " the model that the stage starts from, as reward_model.lm_weight (0: off)",
        ge=0,
    )
    learning_rate: Real = knob(1e-5, "AdamW learning rate", gt=0)
    warmup_steps: int = knob(10, "steps over which the learning rate rises from 0", ge=0)
    weight_decay: Real = knob(0.0, "AdamW weight decay", ge=0)
    schedule: Literal["constant", "linear", "cosine"] = knob(
        "cosine", "learning rate after the warm-up: constant, or a decay to 0 at the last step"
    )


class ProcessScoringConfig(Section):
    """How a process reward model among `environment.rewards` scores steps."""

    convention: Literal["auto", "sixfold", "trl", "math_shepherd", "skywork", "qwen"] = knob(
        "auto",
        "how the model is read: sixfold, trl (a mark after each step, two labels), math_shepherd"
        " (+ or - of a language model after a mark), skywork (one label at each newline), qwen"
        " (<extra_0> after each step), or auto (by its config.json)",
    )
    ends: str = knob(
        "",
        "where steps end: newline, blank_line, sentence, token:TEXT, xml:TAG, every:N (tokens) or"
        " path.py:function (empty: as the model has it)",
    )
    credit: Literal["score", "gain", "min", "log_odds"] = knob(
        "score",
        "reward of a step: its score, its score less that of the step before (gain; their sum is"
        " the last score), its score times its weight in a soft minimum (min; arXiv:2504.15275), or"
        " the gain of the log-odds of its score (log_odds; arXiv:2502.01456)",
    )
    temperature: Real = knob(0.1, "temperature of the soft minimum of credit = 'min'", gt=0)
    beta: Real = knob(
        0.05,
        "scale of the log-ratio of an implicit process reward model, prm:POLICY,REFERENCE: beta of"
        " the policy's training",
        gt=0,
    )
