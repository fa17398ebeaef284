"""Predicted seconds of the phases of a run's steps, stored with the run as `prediction.json`.

The file has the inputs of the prediction too. With them the report repeats it for the lengths that
the run has measured. A measured hardware file is copied into the run folder as `hardware.toml`.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from sixfold.errors import UserError
from sixfold.report.prediction import FILE, PHASES, STEP, Lengths

from .architectures import Architecture
from .hardware import Cluster, find_accelerator
from .hardware_file import read_hardware
from .placed import Placed, placed_step
from .samplers import sampler_of
from .workload import Workload

HARDWARE = "hardware.toml"


@dataclass(frozen=True)
class Prediction:
    """What planning expects of a run.

    Attributes:
        arch: sizes of the model.
        cluster: devices of the run.
        measured: the devices were measured by `sixfold plan --measure`. Otherwise their figures are
            those of data sheets (`hardware.TABLE`).
        work: work of a step, with the lengths assumed before the run.
        placed: where the roles compute.
        first_step: first step that runs on these devices with these settings. A resume on another
            machine starts a new prediction.
        memory_bytes: predicted peak of one device, in bytes. None: not known.
    """

    arch: Architecture
    cluster: Cluster
    measured: bool
    work: Workload
    placed: Placed
    first_step: int
    memory_bytes: int | None = None

    def seconds(
        self, lengths: Lengths | None = None, trained_share: float = 1.0
    ) -> dict[str, float]:
        """Seconds of each phase of a step, and of the step.

        Args:
            lengths: tokens of prompts and completions. None: those assumed before the run.
            trained_share: share of the tokens that the trainer computes. It leaves out groups
                without a gradient.

        Raises:
            UserError: if the devices cannot hold the model's weights.
        """
        # Waiting for checks is a phase of its own if sampling and training take turns.
        ahead = self.placed.staleness > 0
        sampler_of(self.arch, self.cluster.device, 1)  # refuses a model that one cannot hold
        plan = placed_step(
            self.arch,
            self.cluster,
            self.measured_work(lengths),
            self.placed,
            check_s=lengths.check if ahead and lengths else 0.0,
            trained_share=trained_share,
        )
        found = {phase: getattr(plan.phases, phase) for phase in PHASES}
        found[STEP] = plan.step.seconds
        if ahead:  # the trainer measures how long it waits for samples
            found["rollout"] = max(0.0, plan.step.trainer_idle)
            # Its own phases are longer by what the samplers cost them meanwhile.
            alone = found["reference"] + found["trainer"] + found["sync"]
            slower = (plan.step.training + plan.step.sync) / alone if alone else 1.0
            for phase in ("reference", "trainer", "sync"):
                found[phase] *= slower
        return found

    @property
    def devices(self) -> str:
        """The devices in words, and where their figures come from."""
        figures = (
            "measured by sixfold plan --measure"
            if self.measured
            else "by its data sheet (sixfold plan --measure measures it)"
        )
        return f"{self.cluster.count} x {self.cluster.device.name}, {figures}"

    def trained_tokens(self, lengths: Lengths | None) -> float:
        """Tokens that the trainer computes in a step if no group is left out."""
        work = self.measured_work(lengths)
        return work.sequences * work.trained * work.epochs

    def measured_work(self, lengths: Lengths | None) -> Workload:
        """Work of a step with measured lengths. None: with those assumed before the run."""
        if lengths is None:
            return self.work
        # Empty completions too have at least one token, or the step would have no work.
        mean = max(1.0, lengths.mean)
        return replace(
            self.work,
            prompt_tokens=max(1.0, lengths.prompt),
            mean_tokens=mean,
            longest_tokens=max(mean, lengths.longest),
        )

    def record(self) -> dict[str, Any]:
        """The contents of `prediction.json`."""
        return {
            "seconds": self.seconds(),
            "memory_bytes": self.memory_bytes,
            "first_step": self.first_step,
            "device": HARDWARE if self.measured else self.cluster.device.name,
            "count": self.cluster.count,
            "model": asdict(self.arch),
            "work": asdict(self.work),
            "placed": asdict(self.placed),
        }


def read(folder: Path) -> Prediction | str:
    """The prediction of a run.

    Args:
        folder: folder of the run. It must hold `prediction.json`.

    Returns:
        The reason as text if nothing was predicted.

    Raises:
        UserError: if a file cannot be read, or has another form.
    """
    try:
        record = json.loads((folder / FILE).read_bytes())
        if "missing" in record:
            return str(record["missing"])
        measured = record["device"] == HARDWARE
        device = (
            read_hardware(folder / HARDWARE).device
            if measured
            else find_accelerator(record["device"])
        )
        found = Prediction(
            arch=Architecture(**record["model"]),
            cluster=Cluster(device, record["count"]),
            measured=measured,
            work=Workload(**record["work"]),
            placed=Placed(**record["placed"]),
            first_step=int(record["first_step"]),
            memory_bytes=record["memory_bytes"] and int(record["memory_bytes"]),
        )
        found.seconds()  # a value of the wrong type is found here, not in the middle of a report
    except (OSError, KeyError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise UserError(f"not a prediction of this release ({error!r})") from None
    return found
