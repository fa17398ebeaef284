"""Duration of a training step from the times of its phases, for three topologies."""

from __future__ import annotations

from dataclasses import dataclass, fields

from . import checks

TOPOLOGIES = ("colocated", "disaggregated", "async")
POOLS = ("trainer", "sampler")
"""Devices of their own, unless all are colocated. The reference may be on either."""


@dataclass(frozen=True)
class PhaseSeconds:
    """Duration of each phase of a step, modelled or measured, in seconds.

    Attributes:
        rollout: sampling of all completions.
        verifier: reward checks that sampling does not hide.
        reference: log-probabilities of the reference model.
        trainer: forward, backward and optimizer steps.
        sync: transfer of new weights to the engine.

    Raises:
        UserError: if a time is negative.
    """

    rollout: float
    verifier: float
    reference: float
    trainer: float
    sync: float

    def __post_init__(self) -> None:
        checks.not_negative(**{f"{name} seconds": value for name, value in self.items()})

    def items(self) -> list[tuple[str, float]]:
        """Pairs of phase and seconds, in the order of a step."""
        return [(field.name, getattr(self, field.name)) for field in fields(self)]

    @property
    def dominant(self) -> str:
        """The longest phase. The first in the order of a step if several are equal."""
        return max(self.items(), key=lambda item: item[1])[0]

    @property
    def total(self) -> float:
        return sum(value for _, value in self.items())


@dataclass(frozen=True)
class StepTime:
    """Duration of a step and idle time of the two pools of devices.

    Attributes:
        sampling: seconds in which the pool with the engine works, without sync.
        training: seconds in which the pool with the trainer works, without sync.
        sync: seconds in which both pools wait for new weights. 0 if sync is hidden.
    """

    seconds: float
    sampling: float
    training: float
    sync: float

    @property
    def sampler_idle(self) -> float:
        """Seconds per step in which the sampling devices wait for the trainer."""
        return self.seconds - self.sampling - self.sync

    @property
    def trainer_idle(self) -> float:
        """Seconds per step in which the training devices wait for samples."""
        return self.seconds - self.training - self.sync

    @property
    def steps_per_hour(self) -> float:
        return 3600 / self.seconds


def step_time(
    phases: PhaseSeconds, *, topology: str, sync_hidden: bool, reference_on: str = "trainer"
) -> StepTime:
    """Duration of a step.

    Colocated: `R + V + ref + T + S`. Disaggregated: `max(R + V, ref + T) + S`. Async:
    `max(R + V, ref + T, S)`. With the reference beside the sampler, its time counts there.

    Args:
        phases: duration of each phase, each on the devices that it has in this topology.
        topology: "colocated", "disaggregated" or "async".
        sync_hidden: async only: sync never limits the step, because the engine loads weights
            between two decode steps. Otherwise a step takes at least as long as a sync.
        reference_on: the pool that computes the reference's log-probs.

    Raises:
        UserError: if all phases take no time, as a hardware file may say.
    """
    checks.positive(**{"seconds of all phases": phases.total})
    sampling = phases.rollout + phases.verifier
    training = phases.trainer
    if reference_on == "sampler":
        sampling += phases.reference
    else:
        training += phases.reference
    if topology == "colocated":
        return StepTime(phases.total, sampling, training, phases.sync)
    longest = max(sampling, training)
    if topology == "disaggregated":
        return StepTime(longest + phases.sync, sampling, training, phases.sync)
    return StepTime(max(longest, 0 if sync_hidden else phases.sync), sampling, training, 0)


def trainer_utilisation(phases: PhaseSeconds, step: StepTime) -> float:
    """Share of a step, without waiting for sync, in which training devices compute."""
    return (phases.reference + phases.trainer) / (step.seconds - step.sync)


def useful_tokens_per_second(
    *, prompts: int, samples: int, mean_length: float, keep_rate: float, seconds: float
) -> float:
    """Completion tokens per second that reach the loss: `B K L keep_rate / seconds`.

    Args:
        prompts: prompts B per step.
        samples: samples K per prompt.
        mean_length: mean length L of completions, in tokens.
        keep_rate: share of sampled tokens that reach the loss, 0 to 1.
    """
    return prompts * samples * mean_length * keep_rate / seconds
