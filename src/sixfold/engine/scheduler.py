"""Scheduler: choose what the engine computes in each step.

Scheduling uses continuous batching: a waiting sample starts as soon as there is room. Requests of
one priority are served in order of arrival.

A step either computes waiting prompts or decodes the running sequences. With `chunked`, a step may
do both. A prompt longer than the step's token budget is then computed in pieces, so running
sequences never wait for more than one budget of prompt tokens.

Without `continuous`, the scheduler fills a batch and runs it until its last sequence ends. Rows of
ended sequences are computed as padding. A loop over padded batches does the same, so this mode
serves as a baseline for measurements.

Admission reserves blocks for the worst case (`admission.py`). With `preempt`, admission only asks
for room for the prompt. If blocks run out later, the running sequence that is last in rank is
preempted: it gives up its blocks and returns to the queue, before new requests of its priority.
Later its KV cache is computed again from its tokens, or copied back from host memory
(`offload.py`).
"""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Container
from dataclasses import KW_ONLY, dataclass, field

from .admission import Reservation
from .block_manager import BlockManager
from .noise import uniforms
from .offload import HostBlocks
from .prefix_cache import NoCache, Prefix, PrefixCache
from .sequence import Chunk, Request, Sequence, Ticket
from .stats import EngineStats
from .weight_stages import stage

EVICT_AT_LEAST = 32
"""An eviction frees at least this many idle blocks, or an eighth of the cache if that is less: to
find the least recently used ones costs more than to free them.
"""


@dataclass
class ScheduledStep:
    """Everything that one engine step does.

    The runner works in this order: copy `taken_out` to host memory, copy `tails`, copy
    `brought_back` from host memory, compute `chunks`, make `copies`. Then starting sequences sample
    from the logits of their tickets, and decoding sequences advance by one token.

    Attributes:
        budget: prompt tokens that the step may still compute.
        chunks: pieces of prompts and of preempted sequences to compute.
        host_slots: total number of slots in host memory.
        taken_out: blocks to copy to host memory, as slot -> block.
        brought_back: blocks to copy from host memory, as (slot, block).
        tails: (from, to) blocks to copy before the chunks are computed.
        copies: (from, to) blocks to copy after the chunks are computed.
        starting: sequences that sample their first token in this step.
        tickets: ticket of each starting sequence.
        resuming: preempted sequences that decode again from the next step on.
        revision: the scheduler's revision, see `Scheduler`.
    """

    budget: int
    chunks: list[Chunk] = field(default_factory=list)
    host_slots: int = 0
    taken_out: dict[int, int] = field(default_factory=dict)
    brought_back: list[tuple[int, int]] = field(default_factory=list)
    tails: list[tuple[int, int]] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    starting: list[Sequence] = field(default_factory=list)
    tickets: list[Ticket] = field(default_factory=list)
    resuming: list[Sequence] = field(default_factory=list)
    decoding: list[Sequence] = field(default_factory=list)
    revision: int = 0
    slots: int = 0
    """Rows of the decoding batch, including rows of sequences that have ended."""
    fresh: set[int] = field(default_factory=set)
    """Blocks that this step writes. They may be shared, but not copied as a tail: tails are copied
    before the chunks are computed."""

    @property
    def admits(self) -> bool:
        """True if this step computes or starts something from the queue."""
        return bool(self.chunks or self.starting or self.resuming)


@dataclass(eq=False)
class Scheduler:
    """Queue and running sequences. Assigns blocks through the block manager and the prefix cache.

    Args:
        max_running: maximum number of running sequences.
        prefill_tokens: prompt tokens per step.
        continuous: start samples as soon as there is room; otherwise only between batches.
        chunked: compute long prompts in pieces, in the same step as decoding.
        preempt: admit without reserving the worst case, and preempt when blocks run out.
        host: blocks of preempted sequences in host memory. Zero slots disable swapping.

    `revision` changes whenever a block table changes, or a sequence grows by more than one token.
    """

    blocks: BlockManager
    max_running: int
    prefill_tokens: int
    _: KW_ONLY
    cache: PrefixCache = field(default_factory=NoCache)
    continuous: bool = True
    chunked: bool = False
    preempt: bool = False
    host: HostBlocks = field(default_factory=lambda: HostBlocks(0, 1))
    stats: EngineStats = field(default_factory=EngineStats)
    waiting: list[Ticket] = field(default_factory=list, init=False)
    running: list[Sequence] = field(default_factory=list, init=False)
    holds: bool = field(default=False, init=False)
    """True once a request names the weights of its tokens."""
    revision: int = field(default=0, init=False)
    _arrivals: int = field(default=0, init=False)
    _slots: int = field(default=0, init=False)
    _grown_at: int = field(default=-1, init=False)
    _steps_to_grow: int = field(default=0, init=False)
    """Number of one-token steps that need no new block. Valid while `_grown_at` equals
    `revision`."""

    def __post_init__(self) -> None:
        self.reservation = Reservation(self.blocks)

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            ValueError: if a single sample of the request cannot fit in the KV cache.
        """
        worst = self.reservation.worst(request)
        if worst > self.blocks.count:
            raise ValueError(
                f"engine.kv_tokens: a sequence of {request.limit} tokens needs {worst} blocks,"
                f" but the KV cache has {self.blocks.count}. Raise engine.kv_tokens"
            )
        self.holds |= bool(request.due)
        request.arrival, self._arrivals = self._arrivals, self._arrivals + 1
        self._queue(Ticket(request, request.prompt))

    def schedule(self, version: int = 0) -> ScheduledStep:
        """Plan one step. A prompt is computed once for all of its samples.

        Args:
            version: version of the weights. A sequence whose next token needs a later one is held.
        """
        work = ScheduledStep(self.prefill_tokens, host_slots=self.host.count)
        if not self.running:
            self._slots = 0  # the padded batch, if there was one, has ended
        if self._grow(work) and not self._slots:
            self._admit(work)
            if self.waiting and not work.admits and not self.running:
                # The head has no room because other tickets in the queue hold blocks.
                for ticket in self.waiting[1:]:
                    self.drop(ticket)
                self._admit(work)
                if not work.admits:
                    raise RuntimeError(
                        "the engine's queue is stuck: its first request does not fit into an"
                        " empty KV cache"
                    )
        if self.chunked or not work.admits:
            work.decoding = self.running.copy()
            if self.holds:
                work.decoding = [s for s in self.running if s.needs <= version]
                self.revision += 1  # the rows change although no block table does
            self._slots = 0 if self.continuous else max(self._slots, len(self.running))
        work.slots = max(len(work.decoding), self._slots)
        work.revision = self.revision
        joining = work.starting + work.resuming
        self.running += joining
        self.revision += len(joining)
        return work

    def retire(self, finished: list[Sequence]) -> None:
        """Remove finished sequences. The prefix cache keeps their blocks while there is room."""
        for sequence in finished:
            sequence.request.unfinished -= 1
            if not self.preempt:
                self.reservation.retire(sequence)
            self._leave(sequence)
            if sequence.request.unfinished == 0:
                self.host.drop(sequence.request)
        if finished:
            self.running = [s for s in self.running if s.finish_reason is None]
            self.revision += 1

    def floor(self, request: Request) -> int:
        """Tokens that each unfinished sample of a request has, at least."""
        if request.samples:
            return 0
        preempted = [t.sequence for t in self.waiting if t.sequence is not None]
        lengths = [len(s.logp) for s in [*self.running, *preempted] if s.request is request]
        return min(lengths, default=0)

    def abort(self, request: Request, samples: Container[int] | None = None) -> list[Sequence]:
        """Abort samples of a request and free their blocks immediately.

        Args:
            samples: sample indices; None for all.

        Returns:
            The aborted sequences that had started but not ended.
        """

        def chosen(sample: int) -> bool:
            return samples is None or sample in samples

        begun = [s for s in self.running if s.request is request and chosen(s.sample)]
        for ticket in [t for t in self.waiting if t.request is request]:
            if ticket.sequence is None:
                left = [sample for sample in request.samples if not chosen(sample)]
                dropped, request.samples = len(request.samples) - len(left), left
                self.stats.aborted += dropped
                request.unfinished -= dropped
                if left:
                    continue
            elif chosen(ticket.sequence.sample):
                begun.append(ticket.sequence)
                request.unfinished -= 1
            else:
                continue
            self.waiting.remove(ticket)
            self.drop(ticket)
        for sequence in begun:
            sequence.finish_reason = "aborted"
        self.retire([s for s in begun if s.blocks])
        self.stats.aborted += len(begun)
        for sequence in begun:
            self.host.drop(sequence)
        if request.unfinished == 0:
            self.host.drop(request)
        return begun

    @stage("invalidate")
    def outdate(self) -> None:
        """Mark all cached keys and values as computed with old weights.

        Running sequences keep their keys and values. So do the prompts of running sequences,
        because the reservation has no room to compute them again. None of these enter the prefix
        cache any more, unless they are computed again (`renewal.py`). The rest of the queue is
        computed again. The prefix cache and the host memory are cleared.
        """
        self.cache.clear()
        self.host.clear()
        begun = {sequence.request for sequence in self.running}
        for request in begun:
            request.stale = True
        for ticket in self.waiting:
            if ticket.request not in begun:
                self.drop(ticket)

    def _queue(self, ticket: Ticket) -> None:
        insort(self.waiting, ticket, key=lambda t: t.rank)
        self.stats.peak_waiting = max(self.stats.peak_waiting, len(self.waiting))

    def _grow(self, work: ScheduledStep) -> bool:
        """Give every running sequence a block for its newest token, if it has none yet.

        Returns:
            False if a sequence had to be preempted.
        """
        if self._grown_at == self.revision and self._steps_to_grow > 0:
            self._steps_to_grow -= 1
            return True
        size = self.blocks.block_size
        short = [s for s in self.running if len(s.tokens) > len(s.blocks) * size]
        before = self.stats.preemptions
        for sequence in sorted(short, key=lambda s: s.rank) if self.preempt else short:
            while sequence.blocks and not self.room(1):
                self._make_room(work)
            if sequence.blocks:
                sequence.blocks += self.blocks.allocate(1)
        self.revision += len(short)
        self._grown_at = self.revision
        self._steps_to_grow = min(
            (len(s.blocks) * size - len(s.tokens) for s in self.running), default=0
        )
        return self.stats.preemptions == before

    def _make_room(self, work: ScheduledStep) -> None:
        """Free blocks when none are left.

        Waiting tickets give up their blocks first, from the end of the queue. If none holds blocks,
        the running sequence that is last in rank is preempted.
        """
        if not self.preempt:
            raise RuntimeError("KV cache: a running sequence exceeded its reservation")
        held = next((t for t in reversed(self.waiting) if t.blocks), None)
        if held is not None:
            self.drop(held)
            return
        victim = max(self.running, key=lambda s: s.rank)
        self.running.remove(victim)
        work.taken_out |= self.host.put(victim)
        self._leave(victim)
        self._queue(Ticket(victim.request, victim.tokens[:-1], victim))
        self.stats.preemptions += 1
        self.revision += 1

    def _leave(self, sequence: Sequence) -> None:
        """Release the blocks of a sequence that stops running, and offer them to the prefix cache.

        The newest token is left out: its keys and values were never computed.
        """
        cached = sequence.length - 1
        if not sequence.request.stale:
            self.cache.insert(
                sequence.tokens[:cached],
                sequence.blocks[: self.blocks.blocks_for(cached)],
                sequence.request.space,
            )
        self.blocks.release(sequence.blocks)
        sequence.blocks = []

    def drop(self, ticket: Ticket) -> None:
        """Release a waiting ticket's blocks and discard its computed tokens."""
        self.blocks.release(ticket.blocks)
        ticket.blocks, ticket.computed, ticket.reused, ticket.logits = [], 0, 0, None
        if not self.preempt:
            self.reservation.drop(ticket.request)

    def room(self, count: int) -> bool:
        """True if `count` blocks are free. Evicts idle blocks if necessary."""
        short = count - self.blocks.free
        if short > 0:
            self.cache.evict(max(short, min(EVICT_AT_LEAST, self.blocks.count // 8)))
        return count <= self.blocks.free

    def _admit(self, work: ScheduledStep) -> None:
        """Schedule tickets from the head of the queue until one does not fit."""
        while self.waiting and self._running_with(work) < self.max_running:
            ticket = self.waiting[0]
            if not ticket.ready and not self._advance(ticket, work):
                return
            if ticket.sequence is not None:
                self._resume(ticket.sequence, ticket, work)
            elif not self._start(ticket, work):
                return
            self.waiting.pop(0)

    def _running_with(self, work: ScheduledStep) -> int:
        return len(self.running) + len(work.starting) + len(work.resuming)

    def _advance(self, ticket: Ticket, work: ScheduledStep) -> bool:
        """Reuse cached tokens of a ticket and schedule the rest, or a piece of it.

        Returns:
            False if tokens are left for a later step.
        """
        if not self.preempt and not self.reservation.fits(ticket.request):
            return False
        shared, tail, known = self._reusable(ticket, work)
        written = known // self.blocks.block_size  # this step writes the blocks from this index on
        slots = [] if ticket.sequence is None else self.host.find(ticket.sequence, written)
        if slots:
            known = min((written + len(slots)) * self.blocks.block_size, len(ticket.tokens))
        # A fully cached prompt must compute its last token again: sampling needs its logits.
        start = min(known, len(ticket.tokens) - (ticket.sequence is None))
        stop = min(len(ticket.tokens), start + work.budget) if self.chunked else len(ticket.tokens)
        if stop == start < len(ticket.tokens) or (
            not self.chunked and work.chunks and stop - start > work.budget
        ):
            return False
        if not self._take(ticket, shared, stop, tail, work):
            return False
        work.brought_back += zip(slots, ticket.blocks[written:], strict=False)
        self._count(ticket, start, stop)
        if stop > start:
            work.chunks.append(Chunk(ticket, ticket.blocks, start, stop, known))
            work.budget -= stop - start
        ticket.computed = stop
        work.fresh |= set(ticket.blocks[written:])
        if not self.preempt:
            self.reservation.claim(ticket.request)
        if not ticket.request.stale:  # stale blocks may hold keys and values of older weights
            # Only prompt blocks: sampled tokens are computed after all prompts of the step, too
            # late for another prompt to read them.
            whole = min(stop, len(ticket.request.prompt)) // self.blocks.block_size
            self.cache.insert(
                ticket.tokens[: whole * self.blocks.block_size],
                ticket.blocks[:whole],
                ticket.request.space,
            )
        return ticket.ready

    def _reusable(self, ticket: Ticket, work: ScheduledStep) -> tuple[list[int], int | None, int]:
        """Find the ticket's tokens that are already cached.

        Returns:
            Full blocks to share, a block to copy the next tokens from (or None), and the number of
            tokens in all of these.
        """
        prefix: Prefix = self.cache.match(ticket.tokens, ticket.request.space, work.fresh)
        full = prefix.length // self.blocks.block_size
        tail = prefix.blocks[full] if full < len(prefix.blocks) else None
        length = prefix.length if tail is not None else full * self.blocks.block_size
        return (
            (prefix.blocks[:full], tail, length)
            if length > ticket.computed
            else (ticket.blocks, None, ticket.computed)
        )

    def _take(
        self, ticket: Ticket, shared: list[int], stop: int, tail: int | None, work: ScheduledStep
    ) -> bool:
        """Set the ticket's block table to `shared` plus new blocks.

        Args:
            shared: cached blocks to share.
            stop: number of tokens that the table must hold.
            tail: block to copy into the first new block, or None.
            work: the step's work, which receives the copy.

        Returns:
            False, with nothing changed, if there is no room.
        """
        needed = self.blocks.blocks_for(stop) - len(shared)
        # One spare block per running sequence: without it they would run out of blocks, and be
        # preempted, right after the admission.
        spare = self._running_with(work) if self.preempt else 0
        self.blocks.share(shared)
        if not self.room(max(0, needed) + spare):
            self.blocks.release(shared)
            return False
        own = self.blocks.allocate(max(0, needed))
        self.blocks.release(ticket.blocks)
        ticket.blocks = shared + own
        if tail is not None and own:
            work.tails.append((tail, own[0]))
        return True

    def _count(self, ticket: Ticket, start: int, stop: int) -> None:
        if ticket.sequence is None:
            ticket.reused += start - ticket.computed
            self.stats.reused_tokens += start - ticket.computed
            self.stats.prefill_tokens += stop - start
        else:
            self.stats.recomputed_tokens += stop - start

    def _resume(self, sequence: Sequence, ticket: Ticket, work: ScheduledStep) -> None:
        self.host.drop(sequence)
        sequence.blocks = ticket.blocks
        work.resuming.append(sequence)

    def _start(self, ticket: Ticket, work: ScheduledStep) -> bool:
        """Start samples on a computed prompt.

        The samples share the prompt's full blocks. Each sample copies the partly filled block,
        except the last sample, which takes it over.

        Returns:
            False if some samples must wait.
        """
        request = ticket.request
        full = len(request.prompt) // self.blocks.block_size
        noise: list[list[float]] = []
        while request.samples:
            last = len(request.samples) == 1
            own = 0 if last else len(ticket.blocks) - full
            spare = self._running_with(work) if self.preempt and own else 0
            if (
                self._running_with(work) >= self.max_running
                or not (self.preempt or self.reservation.fits(request))
                or not self.room(own + spare)
            ):
                return False
            if not self.preempt:
                self.reservation.start(request)
            noise = (
                noise
                or uniforms(
                    request.params.seed,
                    request.key,
                    request.samples,
                    request.params.max_tokens,
                    first=request.first_noise,
                ).tolist()
            )
            sample = request.samples.pop(0)
            table = ticket.blocks if last else ticket.blocks[:full] + self.blocks.allocate(own)
            if not last:
                self.blocks.share(table[:full])
                work.copies += zip(ticket.blocks[full:], table[full:], strict=True)
                self.stats.reused_tokens += len(request.prompt)
            work.starting.append(
                Sequence(
                    request,
                    sample,
                    noise.pop(0),
                    list(request.prompt),
                    table,
                    started=time.perf_counter(),
                    reused=ticket.reused if last else len(request.prompt),
                )
            )
            work.tickets.append(ticket)
        return True
