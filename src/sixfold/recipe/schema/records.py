"""Settings of what a run measures and keeps: evaluation, checkpoints and logs."""

from __future__ import annotations

from typing import Literal

from .base import Real, Section, knob


class EvalConfig(Section):
    """Held-out evaluation during training and by `sixfold eval`."""

    every: int = knob(10, "steps between held-out evaluations (0: first and last only)", ge=0)
    tasks: int = knob(
        0,
        "held-out tasks per evaluation during training (0: all); the first and last"
        " evaluation use all",
        ge=0,
    )
    samples: int = knob(1, "completions per held-out task", ge=1)
    temperature: Real = knob(0.0, "sampling temperature of evaluations (0: greedy)", ge=0)
    metric: str = knob(
        "",
        "metric of evaluations: the name of a reward, or 'reward' for the weighted sum"
        " (empty: the verifier among the rewards; the sum if several have the largest weight)",
    )
    solved_at: Real = knob(
        1.0,
        "value of the metric from which a completion counts as solved; for 'reward' it is"
        " multiplied by the sum of the weights",
    )
    strict: str = knob(
        "",
        "stricter verifier for held-out completions, which training never sees, such as"
        " math_strict: its share solved and the gap to it are reported (empty: none)",
    )


class CheckpointConfig(Section):
    """Checkpoints, from which a run can resume."""

    every: int = knob(
        50, "steps between checkpoints, of SFT and of RL (0: at their ends only)", ge=0
    )
    asynchronous: bool = knob(
        False,
        "write checkpoints in the background while training goes on; needs host memory for a copy"
        " of everything that is saved",
    )
    keep: int = knob(2, "number of newest checkpoints that are kept", ge=1)
    keep_best: int = knob(
        0,
        "number of checkpoints with the best held-out accuracy that are kept besides the newest;"
        " a step whose evaluation is among the best is always saved",
        ge=0,
    )


class LogConfig(Section):
    """Outputs of metrics besides metrics.jsonl. Only wandb sends anything from this machine."""

    to: tuple[Literal["csv", "tensorboard", "trackio", "wandb"], ...] = knob(
        (),
        "additional loggers: csv (metrics.csv), tensorboard (event files), trackio"
        " (local), wandb (Weights & Biases); each but csv needs the extra of its name",
    )
    project: str = knob("sixfold", "project of the run in trackio and wandb", min_length=1)
    entity: str = knob("", "user or team of the run in wandb (empty: your default)")
    trace_steps: int = knob(
        0,
        "newest steps whose timeline over all processes is kept in trace.json, which"
        " ui.perfetto.dev opens (0: none)",
        ge=0,
        le=1000,
    )
    rollouts_every: int = knob(1, "steps between dumps of all trajectories (0: no dumps)", ge=0)
