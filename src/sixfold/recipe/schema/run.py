"""Settings of the run as a whole."""

from __future__ import annotations

from typing import Literal

from .base import NAME, Device, Real, Section, knob


class RunConfig(Section):
    """Name, folder, end, seed and machine of the run."""

    name: str = knob("run", "name of the run; its folder is DIR/NAME", pattern=NAME)
    dir: str = knob("runs", "folder that holds the runs")
    seed: int = knob(0, "seed of task order, initial weights and sampling noise", ge=0)
    steps: int = knob(100, "RL steps", ge=0)
    max_minutes: Real = knob(
        0.0,
        "minutes of wall time after which the run writes a checkpoint and stops (0: no limit)",
        ge=0,
    )
    target_reward: Real = knob(
        0.0,
        "stop when the moving average of the reward reaches this value, from step 10 on (0: never)",
        ge=0,
    )
    target_accuracy: Real = knob(
        0.0,
        "stop when a held-out evaluation solves this share of its tasks (0: never)",
        ge=0,
        le=1,
    )
    patience: int = knob(
        0,
        "stop after this many held-out evaluations in a row without a new best accuracy (0: never)",
        ge=0,
    )
    device: Device = knob(
        "auto",
        "device of the model: auto (a GPU if there is one), cpu, cuda, or cuda:N for GPU number N",
    )
    precision: Literal["float32", "bfloat16"] = knob(
        "float32",
        "dtype of the forward passes; gradients are float32, weights as trainer.weights says",
    )
    silence_s: Real = knob(
        1800.0,
        "longest time without a sign of life of the engine or the reference process, in seconds;"
        " then the run ends",
        gt=0,
    )
    restarts: int = knob(
        0,
        "times that `sixfold train` starts the run again from its newest checkpoint, because the"
        " engine, a sampler, a server or the reference process was silent or has ended; not with"
        " --only, --from or several ranks",
        ge=0,
    )
    threads: int = knob(0, "CPU threads of torch (0: one per core)", ge=0, le=1024)

    @property
    def product_bytes(self) -> int:
        """Bytes per number in the matrix products of a forward pass."""
        return 2 if self.precision == "bfloat16" else 4
