"""Real ranks for tests: processes joined by gloo on the loopback interface.

They are forked from one server process that has imported everything, so a group starts in a
fraction of a second.
"""

from __future__ import annotations

import pickle
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from sixfold.ranks import ProcessRanks

from .forkserver import CONTEXT

LIMIT_S = 120.0
"""Longest time of a group of ranks, on a busy machine."""


class RankEnded(RuntimeError):
    """A rank raised an exception or ended without a result. The text is its traceback."""


def on_ranks(
    size: int, work: Callable[..., Any], *arguments: Any, timeout_s: float = 60.0
) -> list[Any]:
    """Call `work(ranks, *arguments)` on `size` ranks, and return the results in rank order.

    Raises:
        RankEnded: if a rank raised or ended. The other ranks are killed.
    """
    with tempfile.TemporaryDirectory() as folder:
        results, processes = [], []
        for rank in range(size):
            ours, theirs = CONTEXT.Pipe(duplex=False)
            place = (str(Path(folder, "store")), rank, size, timeout_s)
            processes.append(
                CONTEXT.Process(target=_rank, args=(theirs, place, work, arguments), daemon=True)
            )
            processes[-1].start()
            theirs.close()
            results.append(ours)
        try:
            return [_result(connection, rank) for rank, connection in enumerate(results)]
        finally:
            for process in processes:
                process.join(5.0)
                process.kill()
                process.join()


def _result(connection: Connection, rank: int) -> Any:
    if not wait([connection], LIMIT_S):
        raise RankEnded(f"rank {rank} did not answer in {LIMIT_S} s")
    try:
        fine, value = pickle.loads(connection.recv_bytes())
    except EOFError as error:
        raise RankEnded(f"rank {rank} ended without a result") from error
    if not fine:
        raise RankEnded(f"rank {rank}: {value}")
    return value


def _rank(
    answer: Connection,
    place: tuple[str, int, int, float],
    work: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    path, rank, size, timeout_s = place
    found: tuple[bool, Any]
    try:
        ranks = ProcessRanks(dist.FileStore(path, size), rank, size, timeout_s)
        found = (True, work(ranks, *arguments))
    except BaseException:  # noqa: BLE001  the parent raises it
        found = (False, traceback.format_exc())
    # Not `send`: it would share the memory of tensors, and this process ends.
    answer.send_bytes(pickle.dumps(found))
