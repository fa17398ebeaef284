"""Settings of what a run measures and keeps: evaluation, checkpoints and logs."""

from __future__ import annotations

from typing import Literal

from .base import Real, Section, knob


class EvalConfig(Section):
    """Held-out evaluation during training and by `sixfold eval`."""

    every: int = knob(10, "steps between held-out evaluations (0: first and last only)", ge=0)
    tasks: int = knob(
        0,
        "held-out tasks per evaluation during training (0: all); the first and last always use all",
        ge=0,
    )
    samples: int = knob(1, "completions per task", ge=1)
    temperature: Real = knob(0.0, "0: greedy", ge=0)
    metric: str = knob(
        "",
        "what is evaluated: the name of a reward, or 'reward' for the weighted sum; empty: the"
        " verifier among them",
    )
    solved_at: Real = knob(
        1.0,
        "a completion counts as solved from this value of the metric on; for 'reward', times the"
        " sum of the weights",
    )


class CheckpointConfig(Section):
    """What is kept on disk to resume from."""

    every: int = knob(
        50, "steps between checkpoints, of SFT and of RL (0: at their ends only)", ge=0
    )
    keep: int = knob(2, "newest checkpoints kept", ge=1)


class LogConfig(Section):
    """Where metrics go besides metrics.jsonl. Nothing leaves the machine unless wandb is named."""

    to: tuple[Literal["csv", "tensorboard", "trackio", "wandb"], ...] = knob(
        (),
        "csv: metrics.csv, metrics.jsonl as a table; tensorboard: event files; trackio: locally;"
        " wandb: to Weights & Biases (extras of their names)",
    )
    project: str = knob("sixfold", "project of the run in trackio and wandb", min_length=1)
    entity: str = knob("", "user or team of the run in wandb (empty: your default there)")
    rollouts_every: int = knob(1, "steps between dumps of every trajectory (0: never)", ge=0)
