"""Ranks: the processes that train one model together, started by torchrun.

Every rank runs the same program on its share of the work. The roles talk to other ranks through
`Ranks` alone: sum a tensor, exchange objects, wait. A run in one process has `ALONE`.

Every call is made by all ranks, in the same order. If a rank fails, ends or hangs, the others would
wait for it. So each rank publishes its position in the run, and its failure, in the key-value store
of torchrun. A rank whose call fails reads the store and names the ranks that did not answer. Only
the first rank that fails prints its error.

After work that each rank does alone, the ranks exchange their errors (`agree`). If one rank has
failed, all ranks raise an error at this point. So they can still save a checkpoint together.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from .errors import RankFailed, RunFailed, UserError, one_line

T = TypeVar("T")

GRACE_S = 5.0
"""Seconds that a rank waits for the reports of other ranks before it calls them silent. It is also
the head start of rank 0 in reporting a mistake of the user, which all ranks find.
"""

LEAD_S = 0.5
"""Seconds that other ranks wait before they report any other error. Rank 0 may report it too."""


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

    def agree(self, error: Exception | None) -> None:
        """Exchange errors after work that each rank has done alone. If one has failed, all raise.

        All ranks raise the same kind of error: a UserError only if every error is one.

        Args:
            error: the error of this rank, or None.

        Raises:
            Exception: the error of this rank, if it is of that kind.
            UserError: another rank's error, if every error is a UserError.
            OtherRankFailed: another rank's error, otherwise.
        """
        ...

    def agreed_on(self, error: BaseException) -> bool:
        """True if `agree` has raised this error. All ranks have then stopped at the same point."""
        ...

    def ending_together(self, left: Callable[[], str]) -> AbstractContextManager[None]:
        """Context of a run. If an error ends it on one rank, it ends on all ranks.

        Args:
            left: returns a sentence about the remaining checkpoint, for the message about a lost
                rank.
        """
        ...

    def data_ranks(self, group: int) -> Ranks:
        """The ranks that share the rows of a batch: one of each group of neighbouring ranks.

        They are the ranks with the position of this rank in its group. The ranks of one group
        compute the same rows together, by tensor or context parallelism.

        Args:
            group: ranks per group. It must divide the number of ranks.
        """
        ...


class Alone:
    """`Ranks` of a run in one process."""

    rank = 0
    size = 1

    def sum(self, tensor: Tensor) -> Tensor:
        return tensor

    def gather(self, value: T) -> list[T]:
        return [value]

    def barrier(self, name: str) -> None:
        """Do nothing: there is no other rank."""

    def agree(self, error: Exception | None) -> None:
        """Raise the error, if there is one."""
        if error:
            raise error

    def agreed_on(self, error: BaseException) -> bool:
        """Always true: there is no other rank."""
        return True

    def ending_together(self, left: Callable[[], str]) -> AbstractContextManager[None]:
        """Empty context: there is no other rank."""
        return nullcontext()

    def data_ranks(self, group: int) -> Ranks:
        return self


ALONE = Alone()
"""The ranks of a run in one process."""


class RankLost(RankFailed):
    """Another rank has failed or did not answer in time."""


class OtherRankFailed(RankFailed):
    """Another rank has failed, and `Ranks.agree` has told all ranks."""


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
        self._store = dist.PrefixStore("sixfold", store)
        self._place = ""
        self._agreed: BaseException | None = None
        self._ending = False
        wait = timedelta(seconds=timeout_s)
        with self._reported_once(lambda: "Nothing was trained"):
            self._mark("the start")
            with self.answered():
                dist.init_process_group(
                    backend, store=store, rank=rank, world_size=size, timeout=wait
                )

    def sum(self, tensor: Tensor) -> Tensor:
        total = tensor.detach().clone()
        with self.answered():
            dist.all_reduce(total)
        return total

    def gather(self, value: T) -> list[T]:
        found: list[Any] = [None] * self.size
        with self.answered():
            dist.all_gather_object(found, value)
        return found

    def barrier(self, name: str) -> None:
        self._mark(name)
        self.gather(None)

    def agree(self, error: Exception | None) -> None:
        report: tuple[type[Exception], str] | None = None
        if isinstance(error, UserError):
            report = UserError, f"rank {self.rank}: {error}"
        elif error:
            report = OtherRankFailed, f"rank {self.rank} failed: {one_line(error)}"
        failed = [each for each in self.gather(report) if each]
        if not failed:
            return
        # All raise the worst kind: a rank must not tolerate what another rank cannot.
        kind, text = min(failed, key=lambda each: each[0] is UserError)
        if error and report and report[0] is kind:
            self._agreed = error
            raise error
        self._agreed = kind(text)
        raise self._agreed from error

    def agreed_on(self, error: BaseException) -> bool:
        return error is self._agreed

    @contextmanager
    def ending_together(self, left: Callable[[], str]) -> Iterator[None]:
        """As `Ranks.ending_together`. Within another such context it does nothing.

        Raises:
            SystemExit: with code 1, instead of the error, if another rank has failed before.
            RankLost: if a rank did not answer, and this rank is the first that fails.
        """
        if self._ending:  # a stage of a run, which reports for it
            yield
            return
        self._ending = True
        with self._reported_once(left):
            yield
        dist.destroy_process_group()

    @contextmanager
    def _reported_once(self, left: Callable[[], str]) -> Iterator[None]:
        """Raise the error of this context on the first rank that fails, SystemExit on others."""
        try:
            yield
        except Exception as error:
            lost = error if isinstance(error, RankLost) else None
            if lost is None and lost_connection(error):
                lost = self._lost(error)
            if not self._first_to_fail(error):
                raise SystemExit(1) from error
            if lost is not None:
                raise RankLost(f"{lost}. {left()}") from error
            if self.rank and isinstance(error, UserError | RunFailed):
                raise RankFailed(f"rank {self.rank} of {self.size}: {error}") from error
            if not isinstance(error, UserError | RunFailed | RankFailed):
                error.add_note(left())  # shown under the traceback
            raise

    def data_ranks(self, group: int) -> Ranks:
        if group == 1:
            return self
        if group == self.size:
            return ALONE
        size = self.size // group
        with self.answered():
            members = spaced_group(size, group, self.timeout_s)
        return DataRanks(self, members, self.rank // group, size)

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
            silent = [f"rank {r} (last seen at {self._last_place(r)})" for r in others]
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

    def _first_to_fail(self, error: Exception) -> bool:
        """Report a failure to the other ranks. Returns True if this rank is the first to fail.

        Only then can they read the error's message.
        """
        alike = isinstance(error, UserError | RunFailed) and not self.agreed_on(error)
        lead = LEAD_S if self.rank else 0.0
        if isinstance(error, OtherRankFailed) or (self.rank and alike):
            lead = GRACE_S  # the rank that failed reports it, or rank 0 if all fail alike
        until = time.monotonic() + lead
        try:
            while time.monotonic() < until and not self._store.check(["failures"]):
                time.sleep(0.05)
            first = self._store.add("failures", 1) == 1
            if first:
                self._store.set("failed", one_line(error))
        except (RuntimeError, dist.DistError):
            return self.rank == 0
        return first

    def _mark(self, place: str) -> None:
        """Publish the position of this rank in the run, for the messages of other ranks."""
        self._place = place
        with self.answered():
            self._store.set(f"at/{self.rank}", place)

    def _last_place(self, rank: int) -> str:
        key = f"at/{rank}"
        return self._store.get(key).decode() if self._store.check([key]) else "no point yet"


class DataRanks:
    """`Ranks` with one rank of each group of ranks that compute the same rows.

    Args:
        every: all ranks of the run.
        group: process group of these ranks.
        rank: number of this process among them.
        size: number of these ranks.
    """

    def __init__(self, every: ProcessRanks, group: dist.ProcessGroup, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._every = every
        self._group = group

    def sum(self, tensor: Tensor) -> Tensor:
        total = tensor.detach().clone()
        with self._every.answered():
            dist.all_reduce(total, group=self._group)
        return total

    def gather(self, value: T) -> list[T]:
        found: list[Any] = [None] * self.size
        with self._every.answered():
            dist.all_gather_object(found, value, group=self._group)
        return found

    def barrier(self, name: str) -> None:
        """As `Ranks.barrier`, for all ranks of the run."""
        self._every.barrier(name)

    def agree(self, error: Exception | None) -> None:
        """As `Ranks.agree`, for all ranks of the run."""
        self._every.agree(error)

    def agreed_on(self, error: BaseException) -> bool:
        """As `Ranks.agreed_on`, for all ranks of the run."""
        return self._every.agreed_on(error)

    def ending_together(self, left: Callable[[], str]) -> AbstractContextManager[None]:
        """As `Ranks.ending_together`, for all ranks of the run."""
        return self._every.ending_together(left)

    def data_ranks(self, group: int) -> Ranks:
        """Return these ranks, which already share the work."""
        return self


def spaced_group(size: int, distance: int, timeout_s: float) -> dist.ProcessGroup:
    """Divide all ranks into process groups, and return that of this rank. All must call this.

    Args:
        size: ranks per group. `size * distance` must divide the number of ranks.
        distance: difference of the numbers of two neighbours in a group.
        timeout_s: longest wait for another rank, in seconds.
    """
    own, wait, found = dist.get_rank(), timedelta(seconds=timeout_s), None
    for first in range(dist.get_world_size()):
        if first // distance % size:
            continue  # not the first rank of a group
        # Every rank must take part in the creation of every group.
        members = list(range(first, first + size * distance, distance))
        made = dist.new_group(members, timeout=wait)
        found = made if own in members else found
    assert found is not None
    return found


def together(ranks: Ranks, action: Callable[[], T]) -> T:
    """Run an action on every rank. All ranks must call this. If one fails, all raise an error.

    Raises:
        Exception: as `Ranks.agree` does.
    """
    error: Exception | None = None
    found: list[T] = []
    try:
        found.append(action())
    except Exception as raised:  # noqa: BLE001  raised below, once the other ranks know
        error = raised
    ranks.agree(error)
    return found[0]


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
        UserError: if there are more processes than GPUs, or if the environment is incomplete
            or wrong.
        RankLost: if a rank does not start in time.
    """
    size = _number("WORLD_SIZE", 1)
    if size <= 1:
        return ALONE
    missing = [n for n in ("RANK", "MASTER_ADDR", "MASTER_PORT") if n not in os.environ]
    if missing:
        raise UserError(
            f"WORLD_SIZE = {size}, but {missing[0]} is not set. Start several ranks with torchrun"
            " --nproc-per-node N -m sixfold train RECIPE, or unset WORLD_SIZE"
        )
    _ = _number("RANK", 0), _number("MASTER_PORT", 0)
    backend = "gloo"
    if device != "cpu":
        local, count = _number("LOCAL_RANK", 0), torch.cuda.device_count()
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


def _number(name: str, default: int) -> int:
    """A number in torchrun's environment.

    Raises:
        UserError: if it is something else.
    """
    text = os.environ.get(name, str(default))
    if not (text.isascii() and text.isdigit()):
        raise UserError(
            f"{name} = '{text}' is not a number of at least 0, but torchrun sets it to one. Start"
            " several ranks with torchrun --nproc-per-node N -m sixfold train RECIPE, or unset"
            " WORLD_SIZE"
        )
    return int(text)
