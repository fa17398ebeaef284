"""Who runs next. Waiting samples start as soon as there is room (continuous batching); a step is a prefill or a decode, never both.

Admission reserves the worst case: a sequence starts only if its longest possible self fits into the cache beside those already running. So
nothing that started ever has to stop for lack of blocks.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

from .block_manager import BlockManager
from .noise import uniforms
from .sequence import Request, Sequence


@dataclass
class Work:
    """One engine step. prompts: requests to prefill, empty in a decode step. sequences: those that sample a token in it."""

    prompts: list[Request]
    sequences: list[Sequence]


class Scheduler:
    """Holds waiting requests and running sequences; hands out blocks through the block manager.

    copies: (from, to) blocks that the runner must copy before the starting sequences use them. revision: changes whenever a block table does.
    members: changes whenever who runs does.
    """

    def __init__(self, blocks: BlockManager, max_running: int, prefill_tokens: int) -> None:
        self.blocks = blocks
        self.max_running = max_running
        self.prefill_tokens = prefill_tokens
        self.waiting: deque[Request] = deque()
        self.running: list[Sequence] = []
        self.copies: list[tuple[int, int]] = []
        self.revision = 0
        self.members = 0
        self._reserved = 0

    def add(self, request: Request) -> None:
        """Queue a request. Raises ValueError if even one of its samples could never fit the cache."""
        worst = self._needed(request)
        if worst > self.blocks.count:
            raise ValueError(
                f"a sequence of {request.limit} tokens needs {worst} blocks, the KV cache has {self.blocks.count}: raise engine.kv_tokens"
            )
        self.waiting.append(request)

    def schedule(self) -> Work:
        """Start what fits, else decode what runs. Prompts are computed once, whatever the number of samples."""
        prompts: list[Request] = []
        starting: list[Sequence] = []
        budget = self.prefill_tokens
        while self.waiting and len(self.running) + len(starting) < self.max_running:
            request = self.waiting[0]
            fresh = not request.blocks
            if fresh and prompts and len(request.prompt) > budget:
                break
            if self._reserved + self._needed(request) > self.blocks.count:
                break
            if fresh:
                request.blocks = self.blocks.allocate(self.blocks.blocks_for(len(request.prompt)))
                self._reserved += len(request.blocks)
                prompts.append(request)
                budget -= len(request.prompt)
            starting.append(self._start(request))
            if not request.samples:
                self.waiting.popleft()
        self.running += starting
        self.revision += len(starting)
        self.members += len(starting)
        return Work(prompts, starting or self.running)

    def grow(self, sequence: Sequence) -> None:
        """Give the sequence a block for its newest token if it has none yet."""
        if self.blocks.blocks_for(sequence.length) > len(sequence.blocks):
            sequence.blocks += self.blocks.allocate(1)
            self.revision += 1

    def retire(self, finished: list[Sequence]) -> None:
        """Take finished sequences out and free what they alone own."""
        for sequence in finished:
            self.blocks.release(sequence.blocks)
            self._reserved -= self._own_blocks(sequence.request)
            sequence.blocks = []
            sequence.request.unfinished -= 1
            if sequence.request.unfinished == 0:  # the prompt's full blocks were shared by all samples: reserved once, given back once
                self._reserved -= self._full_blocks(sequence.request)
        if finished:
            self.running = [s for s in self.running if s.finish_reason is None]
            self.revision += 1
            self.members += 1

    def release_prompts(self, work: Work) -> None:
        """Drop the requests' own hold on prompts whose samples have all started."""
        for request in {id(s.request): s.request for s in work.sequences}.values():
            if not request.samples and request.blocks:
                self.blocks.release(request.blocks)
                request.blocks, request.logits = [], None

    def _full_blocks(self, request: Request) -> int:
        """Blocks that the prompt fills: every sample shares them. A partly filled one is copied by all samples but the last, which takes it over."""
        return len(request.prompt) // self.blocks.block_size

    def _own_blocks(self, request: Request) -> int:
        """Most blocks a sample can come to own beside the prompt's full ones."""
        return self.blocks.blocks_for(request.limit) - self._full_blocks(request)

    def _needed(self, request: Request) -> int:
        """Blocks to reserve before the request's next sample can start: its own, and the prompt's unless they are reserved already."""
        prompt = self.blocks.blocks_for(len(request.prompt))
        partial = prompt - self._full_blocks(request) if len(request.samples) == 1 else 0
        return self._own_blocks(request) - partial + (0 if request.blocks else prompt)

    def _start(self, request: Request) -> Sequence:
        """A new sequence on the request's prompt: shares its full blocks; copies the partly filled one, or takes it over as the last sample."""
        self._reserved += self._needed(request)
        sample = request.samples.pop(0)
        shared = request.blocks[: self._full_blocks(request)] if request.samples else request.blocks
        own = self.blocks.allocate(len(request.blocks) - len(shared))
        self.blocks.share(shared)
        self.copies += zip(request.blocks[len(shared) :], own, strict=True)
        noise = uniforms(request.params.seed, request.key, sample, request.params.max_tokens)
        return Sequence(request, sample, noise, list(request.prompt), shared + own, started=time.perf_counter())
