"""Real ranks for tests: processes joined by gloo on the loopback interface.

They are forked from one server process that has imported everything, so a group starts in a
fraction of a second.
"""

from __future__ import annotations

import os
import pickle
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
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


@dataclass
class RankRun:
    """Processes of one run, started as by torchrun.

    Attributes:
        processes: the ranks.
        log: what all of them have printed.
        store: where they meet.
    """

    processes: list[BaseProcess]
    log: Path
    store: dist.Store

    def pids(self) -> list[int]:
        return [process.pid or 0 for process in self.processes]

    def ended(self) -> bool:
        return any(process.exitcode is not None for process in self.processes)

    def code(self, rank: int) -> int | None:
        """Exit code of a rank, once it has ended. None: it is killed, because it did not end."""
        process = self.processes[rank]
        process.join(LIMIT_S)
        code = process.exitcode
        process.kill()
        process.join()
        return code

    def codes(self) -> list[int | None]:
        return [self.code(rank) for rank in range(len(self.processes))]

    def errors(self) -> str:
        return self.log.read_text()


def train_on_ranks(
    size: int, argv: list[str], log: Path, before: Callable[[int], None] | None = None
) -> RankRun:
    """Start `sixfold ARGV` on ranks. As under torchrun, no rank hosts the store.

    Args:
        size: number of ranks.
        argv: the command line.
        log: what all of them print.
        before: called first on each rank, with its number.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    log.write_text("")
    processes: list[BaseProcess] = []
    for rank in range(size):
        place = {
            "RANK": str(rank),
            "WORLD_SIZE": str(size),
            "LOCAL_RANK": str(rank),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        processes.append(
            CONTEXT.Process(target=_command, args=(argv, place, str(log), before), daemon=True)
        )
        processes[-1].start()
    return RankRun(processes, log, store)


def _command(
    argv: list[str], place: dict[str, str], log: str, before: Callable[[int], None] | None
) -> None:
    os.environ.update(place)
    os.chdir(Path(log).parent)
    os.fsync = lambda descriptor: None  # type: ignore[assignment]
    with open(log, "a") as sink:
        os.dup2(sink.fileno(), 1)
        os.dup2(sink.fileno(), 2)
        torch.set_num_threads(1)
        from sixfold.cli import main

        if before:
            before(int(place["RANK"]))
        try:
            code = main(argv)
        except SystemExit as end:
            code = int(end.code or 0)
        except BaseException:  # noqa: BLE001  as the interpreter does
            traceback.print_exc()
            code = 1
        sys.stderr.flush()
    os._exit(code)
