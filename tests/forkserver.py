"""The server that tests fork processes from.

It has imported everything, so a process starts in milliseconds. A new interpreter needs seconds to
import torch.
"""

from __future__ import annotations

import multiprocessing
from multiprocessing import forkserver
from typing import Any

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        "sixfold.cli",
        "sixfold.run.start",
        "sixfold.stages.driver",
        "sixfold.reference.worker",
        "sixfold.run.sampler_worker",
        "sixfold.checks.worker",
        "tests.rank_processes",
        "tests.rank_runs",
        "tests.run.processes",
        "tests.forked_programs",
        "tests.warmed",
        "sixfold.environment.arithmetic",
        "sixfold_planning.planner",
        "sixfold_planning.predict",
        "numpy.ctypeslib",
        "peft",
        "rich._emoji_codes",
        "torchao.optim.subclass_8bit",
    ]
)


def running_server() -> dict[str, Any]:
    """What a process needs to fork from the running server. Starts the server if needed."""
    forkserver.ensure_running()
    known = vars(forkserver._forkserver)
    # Python 3.14 and later also need a key.
    return {k: known[k] for k in ("_forkserver_address", "_forkserver_authkey") if k in known}


def share_server(server: dict[str, Any]) -> None:
    """Fork from this server. Otherwise a process that was forked from it starts one of its own."""
    vars(forkserver._forkserver).update(server, ensure_running=lambda: None)
