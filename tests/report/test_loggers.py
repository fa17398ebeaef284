"""metrics.jsonl survives a crash at any byte; the other loggers pass on what they are given, and
only where they may.
"""

from __future__ import annotations

import json
import math
import os
import resource
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from sixfold.errors import UserError
from sixfold.files.folder import RunFolder
from sixfold.recipe.schema import LogConfig
from sixfold.recipe.toml import parse_recipe
from sixfold.report.loggers import (
    JsonlLogger,
    TensorBoardLogger,
    TrackedRun,
    TrackioLogger,
    WandbLogger,
    read_metrics,
    truncate_after,
)
from sixfold.report.outputs import Loggers
from sixfold.types import LOG_RATIO_EDGES


def write_steps(path: Path, steps: int) -> bytes:
    logger = JsonlLogger(path)
    for step in range(1, steps + 1):
        logger.log(step, {"train/loss": step / 8, "reward/mean": 0.5})
    logger.close()
    return path.read_bytes()


def test_a_line_is_step_first_then_sorted_keys(tmp_path: Path) -> None:
    logger = JsonlLogger(tmp_path / "metrics.jsonl")
    logger.log(
        7, {"train/loss": 0.25, "step": 7, "reward/part/format": 1, "train/ratio_hist": [0, 2, 0]}
    )
    logger.close()
    assert (
        (tmp_path / "metrics.jsonl").read_text()
        == '{"step": 7, "reward/part/format": 1, "train/loss": 0.25, '
        '"train/ratio_hist": [0, 2, 0]}\n'
    )


def test_floats_come_back_bit_for_bit(tmp_path: Path) -> None:
    values = [0.1, 1 / 3, 1e-300, 2**53 + 1.0, -0.0]
    logger = JsonlLogger(tmp_path / "metrics.jsonl")
    for step, value in enumerate(values, start=1):
        logger.log(step, {"train/loss": value})
    logger.close()
    back = [record["train/loss"] for record in read_metrics(tmp_path / "metrics.jsonl")]
    assert [value.hex() for value in back] == [value.hex() for value in values]  # type: ignore[union-attr]


def test_numbers_that_are_not_finite_become_null(tmp_path: Path) -> None:
    logger = JsonlLogger(tmp_path / "metrics.jsonl")
    logger.log(
        1, {"train/loss": math.nan, "train/kl": math.inf, "train/ratio_hist": [1.0, math.nan]}
    )
    logger.close()
    record = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=pytest.fail)
    assert record == {
        "step": 1,
        "train/kl": None,
        "train/loss": None,
        "train/ratio_hist": [1.0, None],
    }


def test_a_full_disk_is_reported_once_and_the_file_can_be_closed(tmp_path: Path) -> None:
    logger = JsonlLogger(tmp_path / "metrics.jsonl")
    logger.log(1, {"train/loss": 0.5})
    size = (tmp_path / "metrics.jsonl").stat().st_size
    _, hard = limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 5, hard))
    try:
        with pytest.raises(UserError, match=r"metrics\.jsonl: .*ulimit -f"):
            logger.log(2, {"train/loss": 0.25})
        logger.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [1]


def test_a_line_is_on_disk_before_the_next_step(tmp_path: Path) -> None:
    """A process that is killed right after `log` has lost nothing."""
    path = tmp_path / "metrics.jsonl"
    code = (
        "import os, sys; from pathlib import Path; from sixfold.report.loggers import JsonlLogger\n"
    )
    code += (
        "logger = JsonlLogger(Path(sys.argv[1])); logger.log(1, {'train/loss': 0.5});"
        " os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code, str(path)], check=False)
    assert read_metrics(path) == [{"step": 1, "train/loss": 0.5}]


def test_a_line_is_synced_after_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "metrics.jsonl"
    logger = JsonlLogger(path)
    sizes: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda _: sizes.append(path.stat().st_size))
    logger.log(1, {"train/loss": 0.5})
    logger.log(2, {"train/loss": 0.5})
    logger.close()
    line = len('{"step": 1, "train/loss": 0.5}\n')
    assert sizes == [line, 2 * line]


def test_an_unknown_key_or_a_wrong_step_writes_nothing(tmp_path: Path) -> None:
    logger = JsonlLogger(tmp_path / "metrics.jsonl")
    with pytest.raises(ValueError, match="Did you mean 'reward/mean'"):
        logger.log(1, {"reward/men": 1.0})
    with pytest.raises(ValueError, match="metrics of step 2 logged as step 1"):
        logger.log(1, {"step": 2})
    logger.close()
    assert (tmp_path / "metrics.jsonl").read_bytes() == b""


@pytest.mark.parametrize("keep", [0, 3, 5, 9])
def test_truncation_equals_a_run_that_stopped_there(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "metrics.jsonl"
    write_steps(path, 5)
    truncate_after(path, keep)
    assert path.read_bytes() == write_steps(tmp_path / "shorter.jsonl", min(keep, 5))


@pytest.mark.slow
def test_a_crash_at_any_byte_of_the_last_line_loses_that_line_only(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    whole = write_steps(path, 3)
    two = whole[: whole.index(b'{"step": 3')]
    for cut in range(len(two), len(whole)):
        path.write_bytes(whole[:cut])
        assert [record["step"] for record in read_metrics(path)] == [1, 2]
        resumed = JsonlLogger(path)
        resumed.log(3, {"train/loss": 3 / 8, "reward/mean": 0.5})
        resumed.close()
        assert path.read_bytes() == whole
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_truncation_of_the_log_is_atomic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    whole = write_steps(path, 3)

    def no_rename(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", no_rename)
    with pytest.raises(UserError, match="no space left"):
        truncate_after(path, 1)
    assert path.read_bytes() == whole
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize(
    "line", ["{not json}", "[1]", '{"train/loss": 1}', '{"step": true}', "\xff"]
)
def test_a_broken_line_in_the_middle_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n' + line + '\n{"step": 2}\n', encoding="latin-1")
    with pytest.raises(UserError, match="line 2 is not"):
        truncate_after(path, 5)


@pytest.mark.slow
def test_tensorboard_reads_back_what_was_logged(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    counts = [0, 0, 1, 2, 5, 40, 6, 3, 0, 0, 1]
    logger = TensorBoardLogger(tmp_path / "tb", tmp_path / "metrics.jsonl")
    logger.log(1, {"reward/mean": 0.25, "train/ratio_hist": counts, "train/kl": None})
    logger.log(2, {"reward/mean": 0.5})
    logger.close()
    events = EventAccumulator(str(tmp_path / "tb")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward/mean")] == [
        (1, 0.25),
        (2, 0.5),
    ]
    assert events.Tags()["scalars"] == ["reward/mean"]
    histogram = events.Histograms("train/ratio_hist")[0].histogram_value
    assert histogram.bucket == counts
    assert histogram.bucket_limit == [*LOG_RATIO_EDGES, LOG_RATIO_EDGES[-1] + 1.0]
    assert histogram.num == sum(counts)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "counts", "limits"),
    [
        ("reward_model/heldout_delta_hist", [2, 0, 1, 0, 0, 5], [0.5, 1, 2, 4, 8, 9]),
        ("async/age_hist", [7, 2, 1], [0.5, 1.5, 2.5]),
        ("async/age_hist", [7], [0.5, 1.5]),
    ],
)
def test_tensorboard_takes_every_list(
    tmp_path: Path, key: str, counts: list[int], limits: list[float]
) -> None:
    """Each list has bins of its own. Those of the log-ratio had been assumed for all."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = TensorBoardLogger(tmp_path / "tb", tmp_path / "metrics.jsonl")
    logger.log(1, {key: counts})
    logger.close()
    found = EventAccumulator(str(tmp_path / "tb")).Reload().Histograms(key)[0].histogram_value
    assert found.bucket_limit == limits and found.bucket == counts + [0] * (
        len(limits) - len(counts)
    )
    assert found.num == sum(counts)


@pytest.mark.slow
@pytest.mark.parametrize("folder_too", [False, True])
def test_deleted_tensorboard_events_are_written_again(tmp_path: Path, folder_too: bool) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    lines = JsonlLogger(tmp_path / "metrics.jsonl")
    logger = TensorBoardLogger(tmp_path / "tb", tmp_path / "metrics.jsonl")
    for step in range(1, 5):
        if step == 3:
            for file in (tmp_path / "tb").iterdir():
                file.unlink()
            if folder_too:
                (tmp_path / "tb").rmdir()
        for one in (lines, logger):
            one.log(step, {"reward/mean": step / 8})
    logger.close()
    events = EventAccumulator(str(tmp_path / "tb")).Reload().Scalars("reward/mean")
    assert [(event.step, event.value) for event in events] == [
        (step, step / 8) for step in range(1, 5)
    ]


def test_a_resumed_run_replaces_its_tensorboard_steps(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for first_step, value in ((1, 0.1), (3, 0.9)):
        logger = TensorBoardLogger(tmp_path, tmp_path / "none", first_step)
        for step in range(first_step, 5):
            logger.log(step, {"reward/mean": value})
        logger.close()
        for file in (
            tmp_path.iterdir()
        ):  # files are read in the order of their names, which hold the second they were made in
            (
                file.rename(tmp_path / f"events.out.tfevents.{first_step}")
                if file.name.count(".") > 3
                else None
            )
    points = [
        (event.step, round(event.value, 3))
        for event in EventAccumulator(str(tmp_path)).Reload().Scalars("reward/mean")
    ]
    assert points == [(1, 0.1), (2, 0.1), (3, 0.9), (4, 0.9)]


class FakeTracker(ModuleType):
    """Stands for trackio or wandb: records what it is given."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.started: dict[str, Any] = {}
        self.logged: list[tuple[int, dict[str, Any]]] = []
        self.finished = False

    def init(self, **settings: Any) -> FakeTracker:
        self.started = settings
        return self

    def log(self, metrics: dict[str, Any], step: int) -> None:
        self.logged.append((step, metrics))

    def finish(self) -> None:
        self.finished = True


def test_trackio_gets_the_metrics_and_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeTracker("trackio")
    monkeypatch.setitem(sys.modules, "trackio", fake)
    logger = TrackioLogger(TrackedRun("1a2b", "sixfold", "demo"), {"steps": 3})
    logger.log(2, {"train/loss": 0.5})
    logger.close()
    assert (
        not {"space_id", "server_url", "dataset_id", "bucket_id", "webhook_url"}
        & fake.started.keys()
    )
    assert (fake.started["project"], fake.started["name"], fake.started["config"]) == (
        "sixfold",
        "demo-1a2b",
        {"steps": 3},
    )
    assert fake.logged == [(2, {"train/loss": 0.5})] and fake.finished


@pytest.mark.parametrize("variable", ["TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"])
def test_trackio_never_leaves_the_machine(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    fake = FakeTracker("trackio")
    monkeypatch.setitem(sys.modules, "trackio", fake)
    monkeypatch.setenv(variable, "elsewhere")
    with pytest.raises(UserError, match=variable):
        TrackioLogger(TrackedRun("1a2b", "sixfold", "demo"), {})
    assert fake.started == {}


def test_wandb_knows_a_run_by_its_own_id(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = FakeTracker("wandb")
    monkeypatch.setitem(sys.modules, "wandb", fake)
    logger = WandbLogger(TrackedRun("1a2b", "maths", "demo", "team"), {}, tmp_path)
    logger.log(1, {"train/loss": 0.5})
    logger.close()
    expected = {
        "id": "1a2b",
        "name": "demo",
        "project": "maths",
        "entity": "team",
        "resume": "allow",
        "config": {},
        "dir": str(tmp_path),
    }
    assert fake.started == expected
    assert fake.logged == [(1, {"train/loss": 0.5})] and fake.finished
    WandbLogger(TrackedRun("1a2b", "maths", "demo"), {}, tmp_path)
    assert fake.started["entity"] is None


@pytest.mark.parametrize("tracker", ["wandb", "trackio"])
def test_only_a_resumed_run_goes_on_with_a_history(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tracker: str
) -> None:
    """Two runs of one name, as --overwrite or another run.dir makes them, are two; a resume of the
    first is the first.
    """
    fake = FakeTracker(tracker)
    monkeypatch.setitem(sys.modules, tracker, fake)
    recipe = parse_recipe(
        f'run.name = "demo"\nlog = {{ to = ["{tracker}"], project = "maths", entity = "team" }}',
        "test",
    )
    seen = []
    for folder in ("first", "second", "first"):
        (tmp_path / folder).mkdir(exist_ok=True)
        Loggers(recipe.log, recipe.run.name, RunFolder(tmp_path / folder), {}, 1, print).close()
        seen.append((fake.started["name"], fake.started.get("id")))
        assert fake.started["project"] == "maths"
    assert seen[0] == seen[2] != seen[1]


def test_no_id_is_made_where_nobody_tracks(tmp_path: Path) -> None:
    Loggers(LogConfig(), "r", RunFolder(tmp_path), {}, 1, print).close()
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_missing_extra_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("tensorboard", "tensorboard.summary.writer.event_file_writer", "trackio", "wandb"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match=r"pip install 'sixfold\[tensorboard\]'"):
        TensorBoardLogger(tmp_path, tmp_path / "metrics.jsonl")
    with pytest.raises(UserError, match=r"pip install 'sixfold\[trackio\]'"):
        TrackioLogger(TrackedRun("i", "p", "n"), {})
    with pytest.raises(UserError, match=r"pip install 'sixfold\[wandb\]'"):
        WandbLogger(TrackedRun("i", "p", "n"), {}, tmp_path)


@pytest.mark.slow
def test_logging_opens_no_socket(tmp_path: Path) -> None:
    code = """
import socket, sys
def refuse(*_): raise SystemExit("a socket was opened")
socket.socket.__init__ = refuse
socket.getaddrinfo = refuse
from pathlib import Path
from sixfold.report.loggers import JsonlLogger
logger = JsonlLogger(Path(sys.argv[1]) / "metrics.jsonl")
logger.log(1, {"train/loss": 0.5})
logger.close()
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
