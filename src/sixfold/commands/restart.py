"""Start a run again from its newest checkpoint after a part of it has not answered (R-308)."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import NoAnswer, one_line
from ..files.folder import RunFolder

COUNT = "SIXFOLD_RESTARTS"
"""Environment variable with the number of restarts so far."""


@contextmanager
def restarting(run: RunFolder, limit: int) -> Iterator[None]:
    """Context of a run in one process. If a part of it is silent or has ended, the run resumes.

    This process is replaced by a new one, so nothing that hangs is left. With several ranks
    torchrun restarts all of them (`--max-restarts`).

    Args:
        run: folder of the run.
        limit: number of restarts.

    Raises:
        Exception: the error of the run, if it does not start again.
    """
    try:
        yield
    except Exception as error:
        from ..reference.worker_reference import ReferenceEnded
        from ..rollout.generator import EngineLost

        done, several = int(os.environ.get(COUNT, "0")), os.environ.get("WORLD_SIZE", "1") != "1"
        part = isinstance(error, NoAnswer | ReferenceEnded | EngineLost)
        if not part or several or done >= limit or not run.recipe.is_file():
            raise
        print(
            f"WARNING: {one_line(error)}\nThe run starts again: restart {done + 1} of {limit}",
            file=sys.stderr,
            flush=True,
        )
        os.environ[COUNT] = str(done + 1)
        resume = [sys.executable, "-m", "sixfold", "train", "--resume", str(run.path)]
        os.execv(sys.executable, resume)
