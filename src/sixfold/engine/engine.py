"""The engine: requests in, completions out. `step()` is schedule, run, commit.

A sequence's tokens are a function of (weights, prompt, parameters, seed, task, sample) alone: not of who runs beside it, of the order of
arrival, of the batch size or of what is cached.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from ..model.base import Adapter, LanguageModel
from ..types import FinishReason, SamplingParams, Usage
from .adapters import Adapters
from .block_manager import BlockManager
from .columns import Columns
from .constraints import Constraints
from .kv_cache import KVCache
from .look_ahead import give_back
from .model_runner import ModelRunner, fill, on_device
from .offload import HostBlocks
from .prefix_cache import make_prefix_cache
from .quantised_cache import Int8KVCache
from .sampler import likeliest, sample
from .scheduler import Scheduler, Work
from .scoring import PromptScore, PromptScorer
from .sequence import Constraint, Request, Sequence
from .speculative import Run, Speculation, Speculator, make_speculator
from .weights import NamedTensors, Weights

Forward = tuple[Columns, Tensor, list[int]]
"""Sequences, their logits [B, V], and the versions of the weights that gave those."""


class Engine:
    """Continuous batching over a paged KV cache, on a causal LM that brings its attention to us.

    kv_tokens: tokens of running sequences that the cache holds. max_running: sequences decoded together. prefill_tokens: prompt tokens in one step.
    prefix_cache: none, radix or hash (`prefix_cache.py`). continuous, chunked_prefill: see `scheduler.py`. preemption: none reserves each sequence's
    worst case; the others stop sequences when blocks run out, and compute them again or swap them to host memory, which holds at most host_tokens
    tokens (None: as many as the cache). With any of these the same tokens come out. kv_dtype: int8 rounds the cache (`quantised_cache.py`).
    speculation: see `speculative.py`; None: one token a step. cuda_graphs: decode by graphs (`cuda_graphs.py`), on CUDA; None:
    wherever the model is on CUDA, and without them from the first capture that fails.
    """

    def __init__(
        self,
        model: LanguageModel,
        *,
        kv_tokens: int,
        block_size: int = 16,
        max_running: int = 256,
        prefill_tokens: int = 4096,
        prefix_cache: str = "radix",
        continuous: bool = True,
        chunked_prefill: bool = False,
        preemption: Literal["none", "recompute", "swap"] = "none",
        host_tokens: int | None = None,
        kv_dtype: Literal["auto", "int8"] = "auto",
        autocast: torch.dtype | None = None,
        speculation: Speculation | None = None,
        cuda_graphs: bool | None = None,
    ) -> None:
        # One block more: the partly filled one of the prompt whose samples are still starting, which they copy.
        manager = BlockManager(-(-kv_tokens // block_size) + 1, block_size)
        slots = manager.count if host_tokens is None else host_tokens // block_size
        host = HostBlocks(slots if preemption == "swap" else 0, block_size)
        preempt = preemption != "none"
        self.prefixes = make_prefix_cache(prefix_cache, manager)
        self.scheduler = Scheduler(
            manager, max_running, prefill_tokens, cache=self.prefixes, continuous=continuous, chunked=chunked_prefill, preempt=preempt, host=host
        )
        self.stats = self.scheduler.stats
        cache = Int8KVCache if kv_dtype == "int8" else KVCache
        self.runner = ModelRunner(model, cache(manager.count, block_size), autocast)
        if cuda_graphs or (cuda_graphs is None and self.runner.device.type == "cuda"):
            self.runner.use_graphs(self.stats, may_fail=cuda_graphs is None)
        self._device = self.runner.device
        self.weights = Weights(model.module)
        self.speculator = make_speculator(speculation, self.scheduler, self.runner, autocast) if speculation else None
        self.adapters = Adapters(autocast)
        self.version = 0
        self._batch = Columns([])
        self._constraints = Constraints()

    def add(
        self,
        key: str,
        prompt: list[int],
        params: SamplingParams,
        samples: list[int],
        priority: int = 0,
        adapter: str | None = None,
        constraint: Constraint | None = None,
    ) -> Request:
        """Queue one prompt. key: names the task in the noise. samples: which sample indices to draw. priority: a larger one is
        served first. adapter: the name of one that is loaded. constraint: which tokens may be sampled.

        Raises ValueError for an empty prompt, no room to generate, a sequence that cannot fit the cache, or an adapter that is not loaded.
        """
        if not prompt:
            raise ValueError("empty prompt: the model needs at least one token to continue")
        if params.max_tokens < 1 or not samples:
            raise ValueError(f"nothing to generate: max_tokens={params.max_tokens}, samples={samples}")
        if params.counts_tokens or constraint is not None:
            params = replace(params, counted_from=len(prompt), constrained=constraint is not None)
        loaded = None if adapter is None else self.adapters.get(adapter)
        request = Request(key, prompt, params, list(samples), priority, adapter=loaded, constraint=constraint)
        self.scheduler.add(request)
        return request

    def score(self, prompts: list[list[int]], temperature: float, top: int, adapter: str | None = None) -> Iterator[PromptScore | None]:
        """Log-probs of the tokens of each prompt, one score a prompt. None after a piece of a longer one: other steps may come between.

        Raises ValueError for an adapter that is not loaded, RuntimeError for torn weights.
        """
        if self.weights.torn:
            raise RuntimeError("the weights are torn: an update was broken off, and the old weights could not be put back")
        loaded = None if adapter is None else self.adapters.get(adapter)
        yield from PromptScorer(self.runner).scores(prompts, temperature, top, loaded)

    def run(
        self,
        *,
        same_weights: bool = False,
        on_end: Callable[[Sequence], None] = lambda _: None,
        ends: Callable[[Sequence], bool] | None = None,
    ) -> list[Sequence]:
        """Step until nothing waits or runs; the finished sequences in the order they ended.

        Args:
            same_weights: the caller vouches that the weights are still those of the call before, so the prefix cache is kept (the next turn
                of a conversation). They may change without a new version, as in supervised training: otherwise nothing from before this
                call is believed.
            on_end: told of each, between two steps; it may abort others.
            ends: asked after each step of every sequence that runs, whether it ends here (with reason "stop"). It may cut the sequence.
        """
        if not same_weights and not self.scheduler.running:
            self._forget_weights()
        finished: list[Sequence] = []
        while self.busy:
            ended = self.step()
            if ends is not None:
                ended += self._end_where(ends)
            finished += ended
            for sequence in ended:
                on_end(sequence)
        return finished

    def _end_where(self, ends: Callable[[Sequence], bool]) -> list[Sequence]:
        """End what runs and `ends` says so of."""
        ended = [sequence for sequence in self.scheduler.running if ends(sequence)]
        for sequence in ended:
            self.end(sequence, "stop")
        return ended

    @property
    def busy(self) -> bool:
        """True while a sequence waits or runs."""
        return bool(self.scheduler.waiting or self.scheduler.running)

    @torch.inference_mode()
    def step(self) -> list[Sequence]:
        """One token for each scheduled sequence, with speculation one or more; gives back those that ended with it."""
        with on_device(self._device):
            work = self.scheduler.schedule()
            if self.speculator is not None:
                return self._speculate(work, self.speculator)
            forwards = self._forward(work)
            return self._commit(work, forwards)

    def set_version(self, version: int) -> None:
        """The weights just changed: tokens from here on carry `version`. Raises RuntimeError if it does not grow or sequences are in flight."""
        if self.busy:
            raise RuntimeError("weights changed while sequences are in flight")
        if version <= self.version:
            raise RuntimeError(f"weight version must grow: {self.version} -> {version}")
        self._forget_weights()
        self.version = version

    def load_weights(self, tensors: NamedTensors, version: int, *, undo: bool = True) -> None:
        """Overwrite the model's weights in place and stamp what is sampled from here on with `version`. To be called between two steps, by the thread
        that steps, and not for a module that others use.

        Sequences in flight go on with the keys and values that they have: their later tokens are of the new weights over a past of the old ones. The
        prefix cache forgets everything, and prompts of which no sample runs are computed anew.

        undo: keep the old weights in host memory meanwhile, to put them back if writing fails. Without it such an error leaves an engine that
        computes nothing.

        Raises ValueError for tensors that do not fit (see `Weights.load`), RuntimeError for a version that does not grow (the present one will do
        while nothing is in flight: weights from before the first step all have number 0). After any error weights and version are the old ones.
        """
        if version < self.version or (version == self.version and self.busy):
            raise RuntimeError(f"weight version must grow: {self.version} -> {version}")
        self.weights.load(tensors, undo=undo)
        self.scheduler.outdate()
        self.version = version

    def load_adapter(self, name: str, adapter: Adapter) -> None:
        """Requests may ask for it from here on. Raises ValueError for a name that is empty or taken."""
        self.adapters.load(name, adapter)

    def unload_adapter(self, name: str) -> None:
        """No new request may ask for it; those in flight go on with it. Raises ValueError for a name that is not there."""
        self.adapters.unload(name)

    def end(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a running sequence between two steps: its blocks are free at once. Raises ValueError if it has ended."""
        if sequence.finish_reason is not None:
            raise ValueError(f"the sequence has ended already: {sequence.finish_reason}")
        sequence.finish_reason = reason
        sequence.seconds = time.perf_counter() - sequence.started
        self.scheduler.retire([sequence])

    def share(self, sequence: Sequence) -> None:
        """Let new requests that begin with a running sequence's tokens have the blocks that it has filled, for one reference more on each: branches
        of a search, several ways to go on from a turn. What ends is shared without being told."""
        if not sequence.request.stale:
            size = self.scheduler.blocks.block_size
            filled = sequence.blocks[: (sequence.length - 1) // size]  # none where it waits, or has ended
            self.prefixes.insert(sequence.tokens[: len(filled) * size], filled, sequence.request.space)

    def abort(self, request: Request) -> list[Sequence]:
        """Give up a request: its blocks are free at once. Gives back its sequences that had begun, as far as they came, with reason "aborted"."""
        begun = self.scheduler.abort(request)
        for sequence in begun:
            sequence.seconds = time.perf_counter() - sequence.started
        return begun

    def usage(self) -> Usage:
        """How full the engine is now."""
        blocks, running = self.scheduler.blocks, self.scheduler.running
        wasted = sum(len(s.blocks) * blocks.block_size - (s.length - 1) for s in running)
        wasted += sum(len(t.blocks) * blocks.block_size - t.computed for t in self.scheduler.waiting)
        share = wasted / max(1, blocks.used * blocks.block_size)
        return Usage(len(self.scheduler.waiting), len(running), blocks.used, blocks.idle, blocks.free, wasted, share)

    def release_memory(self) -> None:
        """Drop the cache's buffers and copies of weights; the next step makes them anew. Raises RuntimeError while sequences are in flight: they live
        there."""
        if self.busy:
            raise RuntimeError("KV memory released while sequences are in flight")
        self.prefixes.clear()
        self.runner.release_memory()
        if self.speculator is not None:
            self.speculator.proposer.release_memory()

    def _forget_weights(self) -> None:
        self.prefixes.clear()
        self.runner.refresh()

    def _forward(self, work: Work) -> list[Forward]:
        """Of the starting sequences and of those that go on, as far as there are any."""
        if self.weights.torn:
            raise RuntimeError("the weights are torn: an update was broken off, and the old weights could not be put back")
        for chunk, row in fill(self.runner, work):
            chunk.ticket.logits, chunk.ticket.version = row, self.version
        self.stats.taken_out_bytes = self.runner.host.taken_out
        self.stats.brought_back_bytes = self.runner.host.brought_back
        forwards = []
        if work.starting:  # a prompt's logits may have waited for room while the weights changed
            rows = [ticket.logits for ticket in work.tickets if ticket.logits is not None]
            forwards.append((Columns(work.starting), torch.stack(rows), [ticket.version for ticket in work.tickets]))
        if work.decoding:
            if work.decoding != self._batch.sequences:
                self._batch = Columns(work.decoding)
            logits = self.runner.decode(self._batch, work.revision, work.slots)
            forwards.append((self._batch, logits, [self.version] * len(logits)))
        return forwards

    def _commit(self, work: Work, forwards: list[Forward]) -> list[Sequence]:
        self.stats.steps += 1
        self.stats.decode_rows += len(work.decoding)
        self.stats.decode_slots += work.slots
        self.stats.peak_blocks = max(self.stats.peak_blocks, self.scheduler.blocks.used)
        finished: list[Sequence] = []
        for batch, logits, versions in forwards:
            logits = self._constraints.apply(logits, batch.constrained())
            tokens, logps, cut = sample(logits, batch.params, batch.noise(), batch.tokens)
            for row, top in likeliest(logits, batch.params, batch.tokens, tokens, logps).items():
                batch.sequences[row].top.append(top)
            for row, ids, mass in () if cut is None else cut.sets():
                batch.sequences[row].kept.add(ids, mass)
            finished += batch.advance(tokens.tolist(), logps.tolist(), versions)
            self.stats.decoded_tokens += len(batch)
        self.scheduler.retire(finished)
        return finished

    def _speculate(self, work: Work, speculator: Speculator) -> list[Sequence]:
        """A step in which what runs goes further by as many guessed tokens as stand, and one."""
        running, work.decoding = work.decoding, []
        forwards = self._forward(work)
        speculator.proposer.follow(work)
        finished = self._commit(work, forwards)
        runs = speculator.decode(running)
        self.stats.peak_blocks = max(self.stats.peak_blocks, self.scheduler.blocks.used)
        for run in runs:
            grown = self._extend(run)
            self.stats.decoded_tokens += grown
            self.stats.pass_tokens += grown
            self.stats.accepted_tokens += min(grown, len(run.tokens) - 1)
        self.stats.target_passes += len(runs)
        self.stats.decode_rows += len(runs)
        give_back(self.scheduler, running)
        self.scheduler.revision += 1
        ended = [s for s in running if s.finish_reason]
        self.scheduler.retire(ended)
        return finished + ended

    def _extend(self, run: Run) -> int:
        """Some tokens further, up to a stop token -> how many. They do not pass the limit."""
        sequence, tokens = run.sequence, run.tokens
        stop = next((i for i, token in enumerate(tokens) if token in sequence.stops), None)
        grown = len(tokens) if stop is None else stop + 1
        sequence.tokens += tokens[:grown]
        sequence.logp += run.logps[:grown]
        sequence.version += [self.version] * grown
        for ids, mass in run.kept[:grown]:
            sequence.kept.add(ids, mass)
        sequence.top += run.top[:grown]
        if stop is not None or sequence.length >= sequence.limit:
            sequence.finish_reason = "length" if stop is None else "stop"
            sequence.seconds = time.perf_counter() - sequence.started
        return grown
