"""Split of devices between sampling and training."""

from __future__ import annotations

from dataclasses import dataclass

from . import checks


@dataclass(frozen=True)
class Split:
    """Devices of two pools that work at the same time.

    Attributes:
        rollout_seconds: time to sample one batch.
        trainer_seconds: time to train on one batch.
    """

    rollout: int
    trainer: int
    rollout_seconds: float
    trainer_seconds: float

    @property
    def seconds(self) -> float:
        """Duration of a step in which both pools work at the same time."""
        return max(self.rollout_seconds, self.trainer_seconds)

    @property
    def ratio(self) -> float:
        """Devices that sample per device that trains."""
        return self.rollout / self.trainer


def ideal_ratio(
    *, rollout_tokens: float, trainer_tokens: float, rollout_rate: float, trainer_rate: float
) -> float:
    """Sampling devices per training device at which both pools take equally long.

    Solves `rollout_tokens / (n_r rollout_rate) = trainer_tokens / (n_t trainer_rate)`.

    Args:
        rollout_tokens: tokens sampled per step, with discarded ones.
        trainer_tokens: tokens trained on per step.
        rollout_rate: sampled tokens per second of one device.
        trainer_rate: trained tokens per second of one device. Sampling is 3 to 6 times slower.
    """
    return (rollout_tokens / rollout_rate) / (trainer_tokens / trainer_rate)


def balanced_split(devices: int, *, rollout_work: float, trainer_work: float) -> Split:
    """Whole-number split with the shortest step. With equal steps, the one that trains on more.

    Rates are taken as proportional to the number of devices.

    Args:
        devices: devices to split. At least 2.
        rollout_work: device-seconds of sampling per step.
        trainer_work: device-seconds of training per step, with reference and critic.

    Raises:
        UserError: if a phase takes no time, as a hardware file may say.
    """
    checks.positive(rollout_work=rollout_work, trainer_work=trainer_work)
    # Each phase gets faster with its devices, so the best split is one of those beside the point at
    # which both take the same time.
    equal = int(devices * rollout_work / (rollout_work + trainer_work))
    first, last = (min(max(n, 1), devices - 1) for n in (equal - 1, equal + 2))
    splits = (
        Split(n, devices - n, rollout_work / n, trainer_work / (devices - n))
        for n in range(first, last + 1)
    )
    return min(splits, key=lambda split: split.seconds)


def usual_split(devices: int) -> tuple[int, int]:
    """Devices that sample and that train, of at least 2: two to one, as a rule of thumb."""
    rollout = min(devices - 1, round(devices * 2 / 3))
    return rollout, devices - rollout
