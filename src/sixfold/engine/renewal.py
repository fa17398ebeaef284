"""Recompute the keys and values of sequences in flight after an update of the weights.

They are computed in the blocks that the sequences hold, so this needs no room in the KV cache.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import takewhile

from .scheduler import ScheduledStep, Scheduler
from .sequence import Chunk, Ticket


@dataclass
class Renewal:
    """Tickets whose blocks hold keys and values of older weights.

    Attributes:
        enabled: False: keys and values of older weights are kept.
    """

    scheduler: Scheduler
    enabled: bool
    _outdated: list[Ticket] = field(default_factory=list)
    _prompts: set[int] = field(default_factory=set)
    """Blocks of prompts that have been computed again."""

    def begin(self) -> None:
        """The weights have changed, and `Scheduler.outdate` was called."""
        if not self.enabled:
            return
        self._prompts = set()
        self._outdated = []
        for ticket in self.scheduler.waiting:
            if self.scheduler.preempt:  # no reservation counts its blocks
                self.scheduler.drop(ticket)
            elif ticket.blocks:  # a computed prompt, for samples that have not started
                ticket.computed = 0
                self._outdated.append(ticket)
        running = self.scheduler.running
        self._outdated += [Ticket(s.request, s.tokens[:-1], s, s.blocks) for s in running]

    def schedule(self) -> ScheduledStep | None:
        """A step that computes outdated tokens and samples nothing. None: there are none.

        Blocks of a prompt are computed once for all that share them. Blocks of sampled tokens are
        not: a step computes them after all prompts, too late for a prompt that begins with them.
        """
        if not self._outdated:
            return None
        scheduler, size = self.scheduler, self.scheduler.blocks.block_size
        work = ScheduledStep(scheduler.prefill_tokens, host_slots=scheduler.host.count)
        while self._outdated and work.budget:
            ticket = self._outdated[0]
            if (ticket.sequence or ticket).blocks:  # else aborted meanwhile
                shared = sum(1 for _ in takewhile(self._prompts.__contains__, ticket.blocks))
                known = max(ticket.computed, shared * size)
                # The ticket of a request needs the logits of its last token.
                start = min(known, len(ticket.tokens) - (ticket.sequence is None))
                ticket.computed = stop = min(len(ticket.tokens), start + work.budget)
                if stop > start:
                    work.chunks.append(Chunk(ticket, ticket.blocks, start, stop, known))
                    work.budget -= stop - start
                whole = min(stop, len(ticket.request.prompt)) // size
                self._prompts |= set(ticket.blocks[:whole])
                if not ticket.ready:
                    break
            del self._outdated[0]
        scheduler.stats.recomputed_tokens += scheduler.prefill_tokens - work.budget
        if not self._outdated:
            requests = [s.request for s in scheduler.running]
            for request in [*requests, *(t.request for t in scheduler.waiting)]:
                request.stale = False
        return work
