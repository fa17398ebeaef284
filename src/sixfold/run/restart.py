"""Start a run again from its newest checkpoint after a part of it has not answered (R-308)."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ..errors import NoAnswer, one_line
from ..files.folder import RunFolder

COUNT = "SIXFOLD_RESTARTS"
"""Environment variable with the number of restarts so far."""

AGAIN = 75
"""Exit code of a rank that Ray has started, if all ranks shall start again."""


@contextmanager
def restarting(
    folder: Path, limit: int, resumed: bool = False, settings: Sequence[str] = ()
) -> Iterator[None]:
    """Context of a run in one process. If a part of it is silent or has ended, the run resumes.

    This process is replaced by a new one, so nothing that hangs is left. A rank that Ray has
    started ends with the exit code AGAIN: all ranks start again (`run/ray_ranks.py`). Those of
    torchrun are restarted by it (`--max-restarts`).

    Args:
        folder: folder of the run.
        limit: number of restarts.
        resumed: the run is in the folder already. Otherwise it resumes only once it is there: an
            earlier run of the same name stays there until then.
        settings: flags of the command, which a resumed run gets again.

    Raises:
        Exception: the error of the run, if it does not start again.
    """
    run, place = RunFolder(folder.absolute()), Path.cwd()
    earlier = identity(run.recipe)
    try:
        yield
    except Exception as error:
        from ..ranks import RankLost
        from ..reference.worker_reference import ReferenceEnded
        from ..rollout.generator import EngineLost

        done, several = int(os.environ.get(COUNT, "0")), os.environ.get("WORLD_SIZE", "1") != "1"
        by_torchrun = several and COUNT not in os.environ
        silent = NoAnswer | ReferenceEnded | EngineLost | RankLost
        part = isinstance(error, silent) or isinstance(error.__cause__, silent)
        begun = resumed or identity(run.recipe) not in (None, earlier)
        if not part or by_torchrun or done >= limit or not begun:
            raise
        print(f"WARNING: {one_line(error)}", file=sys.stderr, flush=True)
        if several:
            raise SystemExit(AGAIN) from error
        again = f"The run starts again: restart {done + 1} of {limit}"
        print(again, file=sys.stderr, flush=True)
        os.environ[COUNT] = str(done + 1)
        os.chdir(place)  # user code may have changed it
        resume = [sys.executable, "-m", "sixfold", "train", "--resume", str(run.path)]
        os.execv(sys.executable, resume + [*settings] * resumed)


def identity(file: Path) -> tuple[int, int] | None:
    """Inode of a file and when it was written. None: there is no file."""
    found = file.stat() if file.is_file() else None
    return found and (found.st_ino, found.st_mtime_ns)
