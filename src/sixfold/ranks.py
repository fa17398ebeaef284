"""Ranks: the processes that train one model together, started by torchrun.

Every rank runs the same program on its share of the work. The roles talk to other ranks through
`Ranks` alone: sum a tensor, exchange objects, wait. A run in one process has `ALONE`.

Every call is made by all ranks, in the same order. If a rank fails, ends or hangs, the others would
wait for it. So each rank publishes its position in the run, and its failure, in the key-value store
of torchrun. A rank whose call fails reads the store and names the ranks that did not answer. Only
the first rank that fails prints its error.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from .errors import RankFailed, RunFailed, UserError, one_line

T = TypeVar("T")

GRACE_S = 5.0
"""Seconds that a rank waits for the reports of other ranks before it calls them silent."""


LEAD_S = 0.5
"""Head start of rank 0, in seconds, if several ranks want to report an error."""


class Ranks(Protocol):
    """The processes of a run. Every rank calls the same methods in the same order."""

    @property
    def rank(self) -> int:
        """Number of this process. Rank 0 writes the files and the messages."""
        ...

    @property
    def size(self) -> int:
        """Number of processes."""
        ...

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum of a tensor over all ranks, equal on all. The argument is not changed."""
        ...

    def gather(self, value: T) -> list[T]:
        """Objects of all ranks, in rank order. They are pickled, but never written to a file."""
        ...

    def barrier(self, name: str) -> None:
        """Wait until every rank has called this.

        Args:
            name: position in the run, for the message about a rank that does not come.
        """
        ...

    def ending_together(self) -> AbstractContextManager[None]:
        """Context of a run. If an error ends it on one rank, it ends on all ranks."""
        ...

    def data_ranks(self, tensor: int) -> Ranks:
        """The ranks that have different work: those with this rank's place in a tensor group.

        Args:
            tensor: ranks of a tensor group, which have the same work. It divides the ranks.
        """
        ...


class Alone:
    """`Ranks` of a run in one process."""

    rank = 0
    size = 1

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the tensor itself."""
        return tensor

    def gather(self, value: T) -> list[T]:
        """Return a list of this one object."""
        return [value]

    def barrier(self, name: str) -> None:
        """Do nothing: there is no other rank."""

    def ending_together(self) -> AbstractContextManager[None]:
        """Empty context: there is no other rank."""
        return nullcontext()

    def data_ranks(self, tensor: int) -> Ranks:
        """This process."""
        return self


ALONE = Alone()
"""The ranks of a run in one process."""


class RankLost(RankFailed):
    """Another rank has failed or did not answer in time."""


class ProcessRanks:
    """`Ranks` by torch.distributed.

    Args:
        store: key-value store that all ranks reach.
        rank: number of this process.
        size: number of processes.
        timeout_s: longest wait for another rank, in seconds.
        backend: backend of torch.distributed. It must support CPU tensors, which carry objects.

    Raises:
        RankLost: if another rank does not connect in time.
    """

    def __init__(
        self, store: dist.Store, rank: int, size: int, timeout_s: float, backend: str = "gloo"
    ) -> None:
        self.rank = rank
        self.size = size
        self.timeout_s = timeout_s
        self._backend = backend
        self._store = dist.PrefixStore("sixfold", store)
        self._place = "the start"
        wait = timedelta(seconds=timeout_s)
        self._mark("the start")
        with self.answered():
            dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=wait)

    def sum(self, tensor: Tensor) -> Tensor:
        """As `Ranks.sum`."""
        total = tensor.detach().clone()
        with self.answered():
            dist.all_reduce(total)
        return total

    def gather(self, value: T) -> list[T]:
        """As `Ranks.gather`."""
        found: list[Any] = [None] * self.size
        with self.answered():
            dist.all_gather_object(found, value)
        return found

    def barrier(self, name: str) -> None:
        """As `Ranks.barrier`."""
        self._mark(name)
        self.gather(None)

    @contextmanager
    def ending_together(self) -> Iterator[None]:
        """Context of a run. If an error ends it on one rank, it ends on all ranks.

        Raises:
            SystemExit: with code 1, instead of the error, if another rank has failed before.
            RankLost: if a rank did not answer, and this rank is the first that fails.
        """
        try:
            yield
        except Exception as error:
            lost = error if isinstance(error, RankLost) else None
            if lost is None and lost_connection(error):
                lost = self._lost(error)
            if not self._first_to_fail(one_line(error)):
                raise SystemExit(1) from error
            if lost is not None:
                raise lost from error
            if self.rank and isinstance(error, UserError | RunFailed):
                raise RankFailed(f"rank {self.rank} of {self.size}: {error}") from error
            raise
        dist.destroy_process_group()

    def data_ranks(self, tensor: int) -> Ranks:
        """As `Ranks.data_ranks`."""
        if tensor == 1:
            return self
        if tensor == self.size:
            return ALONE
        wait, groups = timedelta(seconds=self.timeout_s), []
        with self.answered():
            for place in range(tensor):  # every rank takes part in making every group
                members = list(range(place, self.size, tensor))
                groups.append(dist.new_group(members, timeout=wait, backend=self._backend))
        return DataRanks(self, groups[self.rank % tensor], self.rank // tensor, tensor)

    @contextmanager
    def answered(self) -> Iterator[None]:
        """Context of a collective call, which turns its error into RankLost."""
        try:
            yield
        except (RuntimeError, TimeoutError) as error:
            raise self._lost(error) from error

    def _lost(self, error: BaseException) -> RankLost:
        """Make the error that names the ranks which failed or did not answer."""
        others = [r for r in range(self.size) if r != self.rank]
        try:
            self._store.set(f"stuck/{self.rank}", self._place)
            if self._store.check(["failed"]):
                return RankLost(f"another rank failed: {self._store.get('failed').decode()}")
            until = time.monotonic() + min(GRACE_S, self.timeout_s)
            while others and time.monotonic() < until:
                others = [r for r in others if not self._store.check([f"stuck/{r}"])]
                time.sleep(0.05)
            silent = [f"rank {r} (last seen at {self._seen(r)})" for r in others]
        except (RuntimeError, dist.DistError):
            return RankLost("the store of torchrun has gone: torchrun or its machine has ended")
        who = " and ".join(silent) or "a connection"
        verb = "did not answer" if silent else "was lost"
        return RankLost(
            f"{who} {verb}, while rank {self.rank} of {self.size} was at {self._place}"
            f" (parallel.timeout_s = {self.timeout_s:g}). Look for what ended or stopped that"
            " process, for example the system's out-of-memory killer, then resume the run"
            f" [{one_line(error)[:160]}]"
        )

    def _first_to_fail(self, message: str) -> bool:
        """Report a failure to the other ranks. Returns True if this rank is the first to fail.

        Args:
            message: the error, which the other ranks can read if this rank is the first.
        """
        if self.rank:  # if all ranks fail alike, rank 0 reports it
            time.sleep(LEAD_S)
        try:
            first = self._store.add("failures", 1) == 1
            if first:
                self._store.set("failed", message)
        except (RuntimeError, dist.DistError):
            return self.rank == 0
        return first

    def _mark(self, place: str) -> None:
        """Publish the position of this rank in the run, for the messages of other ranks."""
        self._place = place
        with self.answered():
            self._store.set(f"at/{self.rank}", place)

    def _seen(self, rank: int) -> str:
        key = f"at/{rank}"
        return self._store.get(key).decode() if self._store.check([key]) else "no point yet"


class DataRanks:
    """One rank of each tensor group.

    Args:
        every: all ranks.
        group: these ranks, in torch.distributed.
        rank: number of this process among them.
        tensor: ranks of a tensor group.
    """

    def __init__(
        self, every: ProcessRanks, group: dist.ProcessGroup, rank: int, tensor: int
    ) -> None:
        self.rank = rank
        self.size = every.size // tensor
        self._every = every
        self._group = group

    def sum(self, tensor: Tensor) -> Tensor:
        """As `Ranks.sum`."""
        total = tensor.detach().clone()
        with self._every.answered():
            dist.all_reduce(total, group=self._group)
        return total

    def gather(self, value: T) -> list[T]:
        """As `Ranks.gather`."""
        found: list[Any] = [None] * self.size
        with self._every.answered():
            dist.all_gather_object(found, value, group=self._group)
        return found

    def barrier(self, name: str) -> None:
        """Wait for all ranks, also the others of the tensor groups."""
        self._every.barrier(name)

    def ending_together(self) -> AbstractContextManager[None]:
        """As `Ranks.ending_together`, of all ranks."""
        return self._every.ending_together()

    def data_ranks(self, tensor: int) -> Ranks:
        """These ranks: they have different work already."""
        return self


def lost_connection(error: BaseException) -> bool:
    """True for the error of a collective call. FSDP makes such calls by itself."""
    text = str(error)
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and ("gloo" in text or "Connection closed" in text)
    )


def torchrun_ranks(device: str, timeout_s: float) -> Alone | ProcessRanks:
    """Connect to the ranks that torchrun has started. Returns `ALONE` without torchrun.

    On GPUs, a process takes the GPU whose number is the process's number on its machine.

    Args:
        device: "cpu", or "cuda" without a number.
        timeout_s: longest wait for another rank, in seconds.

    Raises:
        UserError: if there are more processes than GPUs, or if the environment is incomplete.
        RankLost: if a rank does not start in time.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return ALONE
    missing = [n for n in ("RANK", "MASTER_ADDR", "MASTER_PORT") if n not in os.environ]
    if missing:
        raise UserError(
            f"WORLD_SIZE = {size}, but {missing[0]} is not set. Start several ranks with torchrun"
            " --nproc-per-node N -m sixfold train RECIPE, or unset WORLD_SIZE"
        )
    backend = "gloo"
    if device != "cpu":
        local, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if device != "cuda" or local >= count:
            raise UserError(
                f"run.device = '{device}' with {size} ranks: process {local} of this machine has no"
                f" GPU of its own ({count} found). Set run.device = 'auto', and start at most one"
                " process per GPU"
            )
        torch.cuda.set_device(local)
        backend = "cpu:gloo,cuda:nccl"
    wait = timedelta(seconds=timeout_s)
    store, rank, size = next(iter(dist.rendezvous("env://", timeout=wait)))
    return ProcessRanks(store, rank, size, timeout_s, backend)
