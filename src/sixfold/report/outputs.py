"""All loggers of a recipe behind one interface."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..files.folder import RunFolder
from ..recipe.schema import LogConfig
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

    Args:
        first_step: first step of this process.
        warn: receives a line about what another program did to metrics.jsonl.
    """

    def __init__(
        self,
        log: LogConfig,
        name: str,
        run: RunFolder,
        settings: Mapping[str, object],
        first_step: int,
        warn: Callable[[str], None],
    ) -> None:
        # First: other loggers read what it has written.
        self._lines = JsonlLogger(run.metrics, warn)
        self._loggers: list[Logger] = [self._lines]
        table = run.path / "metrics.csv"
        if "csv" in log.to:
            self._loggers.append(CsvLogger(table, run.metrics))
        else:
            # A resume may switch it off, and a stale table would contradict metrics.jsonl.
            table.unlink(missing_ok=True)
        if "tensorboard" in log.to:
            self._loggers.append(
                TensorBoardLogger(run.path / "tensorboard", run.metrics, first_step)
            )
        if not {"trackio", "wandb"} & set(log.to):
            return
        tracked = TrackedRun(
            tracking_id(run.path / "tracking.json"),
            log.project,
            name,
            log.entity,
        )
        if "trackio" in log.to:
            self._loggers.append(TrackioLogger(tracked, settings))
        if "wandb" in log.to:
            self._loggers.append(WandbLogger(tracked, settings, run.path))

    def log(self, step: int, metrics: Mapping[str, Value]) -> None:
        for logger in self._loggers:
            logger.log(step, metrics)

    def complete(self) -> None:
        """Write metrics.jsonl again if another program has deleted it."""
        self._lines.complete()

    def close(self) -> None:
        for logger in self._loggers:
            logger.close()
