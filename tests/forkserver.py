"""The server that tests fork processes from.

It has imported everything, so a process starts in milliseconds. A new interpreter needs seconds to
import torch.
"""

from __future__ import annotations

import multiprocessing

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        "sixfold.cli",
        "sixfold.run.start",
        "sixfold.reference.worker",
        "tests.rank_processes",
        "tests.run.processes",
        "tests.forked_programs",
    ]
)
