"""Measure the stages of a weight sync."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from ..engine.weight_stages import Stage, count_bytes, record_stages, stage
from .base import WeightSync


class MeasuredSync:
    """Weight sync that measures the stages of another one.

    Args:
        sync: the sync to measure.

    Attributes:
        metrics: seconds and bytes of each stage of the last call. Empty if nothing was passed.
    """

    def __init__(self, sync: WeightSync) -> None:
        self._sync = sync
        self.metrics: dict[str, float] = {}

    def sync(self, version: int) -> None:
        with record_stages() as record:
            self._sync.sync(version)
        self.metrics = record.metrics()


class StagedWeights(Mapping[str, Tensor]):
    """Weights by name. Reading a tensor counts as a stage of the sync.

    Args:
        weights: weights by name. A tensor is computed when it is read.
        stage: the stage.
    """

    def __init__(self, weights: Mapping[str, Tensor], stage: Stage) -> None:
        self._weights = weights
        self._stage = stage

    def __getitem__(self, name: str) -> Tensor:
        with stage(self._stage):
            tensor = self._weights[name]
        count_bytes(self._stage, tensor.nbytes)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)
