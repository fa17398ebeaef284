"""What a simulation measures."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from ..stragglers import straggler_tax
from .engine import GroupRun
from .settings import Settings
from .timing import Timing


@dataclass(frozen=True)
class StepRecord:
    """One batch that was trained.

    Attributes:
        tokens: sampled tokens.
        useful: sampled tokens of groups whose rewards differ.
        longest: longest sample divided by the mean of the batch.
        group_longest: the same within a group, averaged over the groups.
        staleness: weight versions between the first token and training, of each group.
    """

    tokens: int
    useful: int
    longest: float
    group_longest: float
    staleness: tuple[int, ...]


def step_record(batch: list[GroupRun], version: int) -> StepRecord:
    """Describe a batch.

    Args:
        version: version of the weights that the batch trains.
    """
    lengths = [length for group in batch for length in group.lengths]
    return StepRecord(
        tokens=sum(lengths),
        useful=sum(group.tokens for group in batch if group.mixed),
        longest=1 + straggler_tax(lengths),
        group_longest=sum(1 + straggler_tax(group.lengths) for group in batch) / len(batch),
        staleness=tuple(version - group.begun for group in batch if group.begun is not None),
    )


@dataclass
class Clocks:
    """Totals at one moment of a simulation, in seconds.

    Attributes:
        time: time since the start.
        sampling: time in which engines had sequences, summed over the engines.
        load: integral of the number of running sequences.
        training: time of reference and training.
        sync: time in which all devices wait for new weights.
    """

    time: float = 0.0
    sampling: float = 0.0
    load: float = 0.0
    training: float = 0.0
    sync: float = 0.0


@dataclass
class Tokens:
    """Where the sampled tokens of a whole simulation went.

    `sampled` is counted while engines decode; the others are counted from lengths. Their sum must
    be equal to it.

    Attributes:
        sampled: all tokens.
        trained: trained on, and not lost afterwards.
        discarded: of groups with equal rewards that were sampled again.
        lost: lost by failures, with training that had to be repeated.
        unfinished: of groups that had not been trained at the end.
    """

    sampled: float = 0.0
    trained: float = 0.0
    discarded: float = 0.0
    lost: float = 0.0
    unfinished: float = 0.0


@dataclass(frozen=True)
class Shares:
    """Use of the devices in the measured steps.

    Attributes:
        sampling: share of the sampling devices' time in which their engine has sequences.
        training: share of the training devices' time in which they train.
        idle: share of all device time with nothing to do, not even a weight sync.
        running: mean number of sequences of an engine that has any.
    """

    seconds: float
    sampling: float
    training: float
    idle: float
    running: float


def shares(settings: Settings, timing: Timing, start: Clocks, end: Clocks) -> Shares:
    """Use of the devices between two moments."""
    seconds = end.time - start.time
    sampling = (end.sampling - start.sampling) / timing.replicas / seconds
    training, sync = (end.training - start.training) / seconds, (end.sync - start.sync) / seconds
    work = timing.sampling_devices * sampling + timing.training_devices * training
    idle = 1 - sync - work / settings.devices(timing)
    running = (end.load - start.load) / (end.sampling - start.sampling)
    return Shares(seconds, sampling, training, max(0.0, idle), running)  # 0: rounding


@dataclass(frozen=True)
class Outcome:
    """Result of a simulation. The first steps, which fill the pipeline, are not measured.

    Attributes:
        groups: groups of the whole simulation whose samples all ended.
        equal: share of these groups with equal rewards.
        failures: failures of devices in the whole simulation.
        tokens: where the sampled tokens went.
    """

    shares: Shares
    total_seconds: float
    records: tuple[StepRecord, ...]
    groups: int
    equal: float
    failures: int
    tokens: Tokens

    @property
    def step_seconds(self) -> float:
        return self.shares.seconds / len(self.records)

    @property
    def staleness(self) -> dict[int, float]:
        """Share of trained groups by weight versions between first token and training."""
        ages = Counter(age for record in self.records for age in record.staleness)
        return {age: ages[age] / ages.total() for age in sorted(ages)}

    @property
    def longest(self) -> float:
        """Longest sample of a step divided by the mean, averaged over the steps."""
        return sum(record.longest for record in self.records) / len(self.records)

    @property
    def group_longest(self) -> float:
        """Longest sample of a group divided by the mean, averaged over the groups."""
        return sum(record.group_longest for record in self.records) / len(self.records)

    @property
    def tokens_per_second(self) -> float:
        """Sampled tokens that are trained on, per second."""
        return sum(record.tokens for record in self.records) / self.shares.seconds

    @property
    def useful_per_second(self) -> float:
        """Sampled tokens per second of trained groups whose rewards differ."""
        return sum(record.useful for record in self.records) / self.shares.seconds
