"""Where a step's metrics go. `metrics.jsonl` always; TensorBoard, trackio and wandb when the recipe asks.

Nothing here opens a socket or reads the network on import, and only `WandbLogger` ever talks to another machine.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from ..errors import UserError
from ..run.durable import disk_errors, fsync_path, write_bytes_atomic, write_json_atomic
from .schema import LOG_RATIO_EDGES, Value, check


class Logger(Protocol):
    """Takes the metrics of each step, in step order, until closed. Keys are those of `schema.METRICS`."""

    def log(self, step: int, metrics: Mapping[str, Value]) -> None: ...

    def close(self) -> None: ...


class JsonlLogger:
    """One JSON line a step, on disk before `log` returns. A line that a crash left half-written is cut when the file is opened."""

    def __init__(self, path: Path) -> None:
        truncate_after(path)
        self._path = path
        self._file = path.open("ab")
        fsync_path(path.parent)

    def log(self, step: int, metrics: Mapping[str, Value]) -> None:
        """Append a line. ValueError: a key outside the schema, a value that is not a number or a list of them. UserError: disk full."""
        check(metrics)
        if metrics.get("step", step) != step:
            raise ValueError(f"metrics of step {metrics['step']} logged as step {step}")
        record = {"step": step} | {key: _finite(metrics[key]) for key in sorted(metrics) if key != "step"}
        line = json.dumps(record, allow_nan=False).encode() + b"\n"
        with disk_errors(f"cannot write {self._path}"):
            self._file.write(line)
            self._file.flush()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def truncate_after(path: Path, step: int | None = None) -> None:
    """Drop the lines after `step` (None: keep all) and a half-written last line, atomically. No file is an empty file.

    A resumed run calls it with the step of its checkpoint, so that the steps done again appear once. UserError: a line that is not a
    record, or a disk that refuses.
    """
    if not path.exists():
        return
    raw = path.read_bytes()
    kept = b"".join(line for line, record in _complete_lines(path, raw) if step is None or record["step"] <= step)
    if kept != raw:
        write_bytes_atomic(path, kept)


def read_metrics(path: Path) -> list[dict[str, Value]]:
    """The records of a metrics.jsonl in file order, without a half-written last line. No file holds none.

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
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise UserError(f"{path}, line {number} is not JSON ({error}); delete the line or restore the file") from error
        if not isinstance(record, dict) or type(record.get("step")) is not int:
            raise UserError(f"{path}, line {number} is not a step: expected an object with an integer 'step'")
        pairs.append((line + b"\n", record))
    return pairs


def _finite(value: Value) -> Value:
    # NaN and Infinity are not JSON: one such literal and every other reader (jq, a browser) refuses the whole line.
    if value is None or isinstance(value, float | int):
        return value if value is not None and math.isfinite(value) else None
    return [item if item is not None and math.isfinite(item) else None for item in value]


class TensorBoardLogger:
    """TensorBoard events by tensorboard's own writer and protobufs; torch is not needed.

    folder: made if absent. first_step: of this process; a resumed run passes the step it resumes at, and TensorBoard then drops
    what the earlier process logged from that step on. UserError when tensorboard is not installed.
    """

    def __init__(self, folder: Path, first_step: int = 1) -> None:
        module = _extra("tensorboard.summary.writer.event_file_writer", "tensorboard")
        _extra("tensorboard.compat.proto.event_pb2", "tensorboard")
        self._writer = module.EventFileWriter(str(folder))
        proto = importlib.import_module("tensorboard.compat.proto.event_pb2")
        self._event: Any = proto.Event
        start = proto.SessionLog(status=proto.SessionLog.START)
        self._writer.add_event(proto.Event(wall_time=time.time(), step=first_step, session_log=start))

    def log(self, step: int, metrics: Mapping[str, Value]) -> None:
        summary = importlib.import_module("tensorboard.compat.proto.summary_pb2")
        values = []
        for key, value in metrics.items():
            if isinstance(value, float | int):
                values.append(summary.Summary.Value(tag=key, simple_value=value))
            elif value is not None:
                values.append(summary.Summary.Value(tag=key, histo=_histogram(summary, value)))
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=summary.Summary(value=values)))

    def close(self) -> None:
        self._writer.close()


def _histogram(summary: ModuleType, values: Sequence[float | None]) -> Any:
    """The counts of `train/ratio_hist` as a TensorBoard histogram; its open outer bins are drawn one unit wide."""
    counts = [count or 0 for count in values]
    limits = [*LOG_RATIO_EDGES, LOG_RATIO_EDGES[-1] + 1.0]
    low = LOG_RATIO_EDGES[0] - 1.0
    middles = [(a + b) / 2 for a, b in zip([low, *LOG_RATIO_EDGES], limits, strict=True)]
    first = sum(n * x for n, x in zip(counts, middles, strict=True))
    second = sum(n * x * x for n, x in zip(counts, middles, strict=True))
    return summary.HistogramProto(min=low, max=limits[-1], num=sum(counts), sum=first, sum_squares=second, bucket_limit=limits, bucket=counts)


@dataclass(frozen=True)
class TrackedRun:
    """How a tracker knows a run.

    Attributes:
        id: unique to the run folder; a resumed run has the same one.
        project: under which runs are grouped.
        name: as it is shown.
        entity: user or team; empty for the tracker's default.
    """

    id: str
    project: str
    name: str
    entity: str = ""


def tracking_id(file: Path) -> str:
    """The id that a run folder keeps in `file`; a new one where there is none yet."""
    if not file.exists():
        write_json_atomic(file, {"id": uuid.uuid4().hex[:12]})
    return str(json.loads(file.read_text(encoding="utf-8"))["id"])


class TrackioLogger:
    """trackio, in its local database only. UserError when it is not installed, or when the environment would send metrics elsewhere."""

    def __init__(self, run: TrackedRun, config: Mapping[str, Any]) -> None:
        elsewhere = [variable for variable in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL") if os.environ.get(variable)]
        if elsewhere:
            raise UserError(f"log.to: trackio stays on this machine, but {elsewhere[0]} is set: unset it, or use wandb to log to a server")
        trackio = _extra("trackio", "trackio")
        # trackio knows a run by its name alone: without the id a second run of this name would go on with the history of the first.
        name = f"{run.name}-{run.id}"
        self._run = trackio.init(project=run.project, name=name, config=dict(config), resume="allow", embed=False, auto_log_gpu=False)

    def log(self, step: int, metrics: Mapping[str, Value]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


class WandbLogger:
    """Weights & Biases: the one logger that sends metrics and the recipe to another machine. UserError when it is not installed."""

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
        raise UserError(f"log.to: '{extra}' needs the package {extra}: pip install 'sixfold[{extra}]'") from error
