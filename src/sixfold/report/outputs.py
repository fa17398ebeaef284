"""All loggers of a recipe behind one interface."""

from __future__ import annotations

from collections.abc import Mapping

from ..files.folder import RunFolder
from ..recipe.schema import Recipe
from .csv_logger import CsvLogger
from .loggers import (
    JsonlLogger,
    Logger,
    TensorBoardLogger,
    TrackedRun,
    TrackioLogger,
    WandbLogger,
    tracking_id,
)
from .metric import Value


class Loggers:
    """All loggers of a run.

    metrics.jsonl is always written. metrics.csv, TensorBoard, trackio and wandb are used if the
    recipe names them.
    """

    def __init__(
        self, recipe: Recipe, run: RunFolder, settings: Mapping[str, object], first_step: int
    ) -> None:
        # First: CsvLogger reads what it has written.
        self._loggers: list[Logger] = [JsonlLogger(run.metrics)]
        table = run.path / "metrics.csv"
        if "csv" in recipe.log.to:
            self._loggers.append(CsvLogger(table, run.metrics))
        else:
            # A resume may switch it off, and a stale table would contradict metrics.jsonl.
            table.unlink(missing_ok=True)
        if "tensorboard" in recipe.log.to:
            self._loggers.append(TensorBoardLogger(run.path / "tensorboard", first_step))
        if not {"trackio", "wandb"} & set(recipe.log.to):
            return
        tracked = TrackedRun(
            tracking_id(run.path / "tracking.json"),
            recipe.log.project,
            recipe.run.name,
            recipe.log.entity,
        )
        if "trackio" in recipe.log.to:
            self._loggers.append(TrackioLogger(tracked, settings))
        if "wandb" in recipe.log.to:
            self._loggers.append(WandbLogger(tracked, settings, run.path))

    def log(self, step: int, metrics: Mapping[str, Value]) -> None:
        """Pass one step's metrics to every logger."""
        for logger in self._loggers:
            logger.log(step, metrics)

    def close(self) -> None:
        """Close every logger."""
        for logger in self._loggers:
            logger.close()
