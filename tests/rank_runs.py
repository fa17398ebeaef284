"""Runs on several ranks for tests, as torchrun would start them."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
import torch.distributed as dist

from .forkserver import CONTEXT
from .rank_processes import LIMIT_S


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
