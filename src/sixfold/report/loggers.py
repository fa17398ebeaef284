"""Loggers of step metrics: `metrics.jsonl` always, TensorBoard, trackio and wandb on request.

Importing this module opens no socket, and only `WandbLogger` sends data to another machine.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from ..errors import UserError
from ..files.appended import AppendedFile
from ..files.durable import disk_errors, fsync_path, write_bytes_atomic, write_json_atomic
from .metric import Value
from .schema import check, find


class Logger(Protocol):
    """Receives the metrics of each step, in step order, until closed.

    Keys are in `schema.METRICS`.
    """

    def log(self, step: int, metrics: Mapping[str, Value]) -> None: ...

    def close(self) -> None: ...


class JsonlLogger:
    """Writes one JSON line per step, on disk before `log` returns.

    Opening the file removes a line that a crash left incomplete.

    Args:
        warn: receives a line about what another program did to the file (`AppendedFile`).
    """

    def __init__(self, path: Path, warn: Callable[[str], None] = lambda text: None) -> None:
        truncate_after(path)
        self._file = AppendedFile(path, warn)
        fsync_path(path.parent)

    def log(self, step: int, metrics: Mapping[str, Value]) -> None:
        """Append a line.

        Raises:
            ValueError: for a key outside the schema, or a value that is not a number or a list of
                numbers.
            UserError: if the disk is full.
        """
        check(metrics)
        if metrics.get("step", step) != step:
            raise ValueError(f"metrics of step {metrics['step']} logged as step {step}")
        record = {"step": step} | {
            key: _finite(metrics[key]) for key in sorted(metrics) if key != "step"
        }
        self._file.append(json.dumps(record, allow_nan=False).encode() + b"\n", to_disk=True)

    def complete(self) -> None:
        """Write the file again if another program has deleted it.

        Raises:
            UserError: if the disk is full or not writable.
        """
        self._file.append(b"")

    def close(self) -> None:
        self._file.close()


def truncate_after(path: Path, step: int | None = None) -> None:
    """Drop the lines after `step` (None: keep all) and an incomplete last line, atomically.

    A missing file counts as empty. A resumed run calls this with the step of its checkpoint, so
    that repeated steps appear once.

    Raises:
        UserError: if a line is not a record, or the disk cannot be written.
    """
    if not path.exists():
        return
    raw = path.read_bytes()
    kept = b"".join(
        line
        for line, record in _complete_lines(path, raw)
        if step is None or record["step"] <= step
    )
    if kept != raw:
        write_bytes_atomic(path, kept)


def read_metrics(path: Path) -> list[dict[str, Value]]:
    """Records of a metrics.jsonl in file order, without an incomplete last line.

    A missing file has no records.

    Raises:
        UserError: names a line that is not a record.
    """
    if not path.exists():
        return []
    return [record for _, record in _complete_lines(path, path.read_bytes())]


def _complete_lines(path: Path, raw: bytes) -> list[tuple[bytes, dict[str, Any]]]:
    *lines, _half_written = raw.split(b"\n")
    pairs = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(
                f"{path}, line {number} is not JSON ({str(error)[:80]}); delete the"
                " line or restore the file"
            ) from error
        if not isinstance(record, dict) or type(record.get("step")) is not int:
            raise UserError(
                f"{path}, line {number} is not a step: expected an object with an integer 'step'"
            )
        pairs.append((line + b"\n", record))
    return pairs


def _finite(value: Value) -> Value:
    # NaN and Infinity are not JSON: other readers (jq, a browser) would refuse the whole line.
    if value is None or isinstance(value, float | int):
        return value if value is not None and math.isfinite(value) else None
    return [item if item is not None and math.isfinite(item) else None for item in value]


class TensorBoardLogger:
    """Writes TensorBoard events with tensorboard's own writer; torch is not needed.

    Each step is on disk before `log` returns. If another program deletes the file of events, a new
    one is written from the records.

    Args:
        folder: created if it does not exist.
        first_step: first step of this process. A resumed run passes the step at which it resumes;
            TensorBoard then drops earlier events from that step on.
        records: metrics.jsonl, to which each step must be written before it is logged here.

    Raises:
        UserError: if tensorboard is not installed.
    """

    def __init__(self, folder: Path, records: Path, first_step: int = 1) -> None:
        self._module = _extra("tensorboard.summary.writer.event_file_writer", "tensorboard")
        _extra("tensorboard.compat.proto.event_pb2", "tensorboard")
        self._folder = folder
        self._records = records
        self._open(first_step)

    def log(self, step: int, metrics: Mapping[str, Value]) -> None:
        """Write the events of a step.

        Raises:
            UserError: if the disk is full.
        """
        with disk_errors(f"cannot write {self._folder}"):
            if self._file.is_file():
                self._add(step, metrics)
            else:
                self._open(1)
                for record in read_metrics(self._records):
                    number = record["step"]
                    assert isinstance(number, int)  # `read_metrics` has checked it
                    self._add(number, record)
            self._writer.flush()

    def close(self) -> None:
        self._writer.close()

    def _open(self, first_step: int) -> None:
        before = {*self._folder.glob("*")}
        self._writer = self._module.EventFileWriter(str(self._folder))
        self._file = ({*self._folder.glob("*")} - before).pop()
        proto = importlib.import_module("tensorboard.compat.proto.event_pb2")
        self._event: Any = proto.Event
        start = proto.SessionLog(status=proto.SessionLog.START)
        self._writer.add_event(
            proto.Event(wall_time=time.time(), step=first_step, session_log=start)
        )
        self._writer.flush()

    def _add(self, step: int, metrics: Mapping[str, Value]) -> None:
        summary = importlib.import_module("tensorboard.compat.proto.summary_pb2")
        values = []
        for key, value in metrics.items():
            if isinstance(value, float | int):
                values.append(summary.Summary.Value(tag=key, simple_value=value))
            elif value is not None:
                values.append(summary.Summary.Value(tag=key, histo=_histogram(summary, key, value)))
        self._writer.add_event(
            self._event(wall_time=time.time(), step=step, summary=summary.Summary(value=values))
        )


def _histogram(summary: ModuleType, key: str, values: Sequence[float | None]) -> Any:
    """Counts of a list metric as a TensorBoard histogram. The open outer bins get width 1."""
    counts = [count or 0 for count in values]
    metric = find(key)
    edges = list(metric.edges) if metric else []
    edges = edges or [age + 0.5 for age in range(max(1, len(counts) - 1))]
    counts += [0] * (len(edges) + 1 - len(counts))
    limits, low = [*edges, edges[-1] + 1.0], edges[0] - 1.0
    middles = [(a + b) / 2 for a, b in zip([low, *edges], limits, strict=True)]
    first = sum(n * x for n, x in zip(counts, middles, strict=True))
    second = sum(n * x * x for n, x in zip(counts, middles, strict=True))
    return summary.HistogramProto(
        min=low,
        max=limits[-1],
        num=sum(counts),
        sum=first,
        sum_squares=second,
        bucket_limit=limits,
        bucket=counts,
    )


@dataclass(frozen=True)
class TrackedRun:
    """Identity of a run in a tracker.

    Attributes:
        id: unique to the run folder. A resumed run keeps it.
        entity: user or team. Empty: the tracker's default.
    """

    id: str
    project: str
    name: str
    entity: str = ""


def tracking_id(file: Path) -> str:
    """The id that a run folder stores in `file`. Created if missing."""
    if not file.exists():
        write_json_atomic(file, {"id": uuid.uuid4().hex[:12]})
    return str(json.loads(file.read_text(encoding="utf-8"))["id"])


class TrackioLogger:
    """Logs to trackio's local database only.

    Raises:
        UserError: if trackio is not installed, or if the environment would send metrics elsewhere.
    """

    def __init__(self, run: TrackedRun, config: Mapping[str, Any]) -> None:
        elsewhere = [
            variable
            for variable in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL")
            if os.environ.get(variable)
        ]
        if elsewhere:
            raise UserError(
                f"log.to: trackio stays on this machine, but {elsewhere[0]} is set: unset it, or"
                " use wandb to log to a server"
            )
        trackio = _extra("trackio", "trackio")
        # trackio identifies a run by name only: without the id, a second run with this name would
        # continue the history of the first.
        name = f"{run.name}-{run.id}"
        self._run = trackio.init(
            project=run.project,
            name=name,
            config=dict(config),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
        )

    def log(self, step: int, metrics: Mapping[str, Value]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


class WandbLogger:
    """Logs to Weights & Biases. Only this logger sends metrics and the recipe to another machine.

    Raises:
        UserError: if wandb is not installed.
    """

    def __init__(self, run: TrackedRun, config: Mapping[str, Any], folder: Path) -> None:
        wandb = _extra("wandb", "wandb")
        who = {"project": run.project, "entity": run.entity or None, "name": run.name, "id": run.id}
        self._run = wandb.init(**who, resume="allow", config=dict(config), dir=str(folder))

    def log(self, step: int, metrics: Mapping[str, Value]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


def _extra(module: str, extra: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != extra:
            raise
        raise UserError(
            f"log.to: '{extra}' needs the package {extra}: pip install 'sixfold[{extra}]'"
        ) from error
