"""The process of a reference ends with the run."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from sixfold.recipe.toml import parse_recipe
from sixfold.run.start import train_run

from .processes import metrics, tiny_recipe
from .test_failed_steps import at_call


@pytest.mark.nightly
@pytest.mark.slow
def test_the_worker_ends_with_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that trained goes on. `tests/reference/test_placements.py` has the same for a run
    that is killed.
    """
    flags = tiny_recipe(
        tmp_path,
        run__steps=100_000,
        algorithm__beta=0.1,
        reference__placement="worker",
        sft__steps=0,
        data__heldout=2,
        log__rollouts_every=0,
    )
    workers: list[int] = []
    earlier = set(children(os.getpid()))  # of other tests

    def interrupt() -> None:
        workers.extend(pid for pid in {*children(os.getpid())} - earlier if is_worker(pid))
        os.kill(os.getpid(), signal.SIGINT)

    with at_call(monkeypatch, "sixfold.controller.loop.collate", 3, interrupt):
        assert train_run(parse_recipe('run.name = "run"', "test", flags)) == 130
    assert len(metrics(tmp_path / "run")) >= 2
    (worker,) = workers
    deadline = time.monotonic() + 10
    while is_worker(worker):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def children(pid: int) -> list[int]:
    return [
        int(child)
        for task in Path(f"/proc/{pid}/task").iterdir()
        for child in (task / "children").read_text().split()
    ]


def is_worker(pid: int) -> bool:
    """By its command line, which is empty once it has ended."""
    try:
        return "sixfold.reference.worker" in Path(f"/proc/{pid}/cmdline").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
