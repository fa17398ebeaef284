"""The inference engine: takes requests, returns completions. A `step()` is schedule, run, commit.

The tokens of a sequence depend only on (weights, prompt, parameters, seed, task, sample, origin).
They do not depend on the other sequences, the order of arrival, the batch size or the cache.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterator, Mapping
from collections.abc import Sequence as Many
from contextlib import contextmanager
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from ..model.base import Adapter, LanguageModel
from ..types import FinishReason, SamplingParams
from .adapters import Adapters
from .batch_state import BatchState
from .block_hash_cache import BlockHashCache
from .block_manager import BlockManager
from .constraints import Constraints
from .kv_cache import KVCache
from .look_ahead import give_back
from .model_runner import ModelRunner, fill, on_device
from .offload import HostBlocks, HostPools
from .prefix_cache import NoCache, PrefixCache
from .quantised_cache import Int8KVCache
from .radix_cache import RadixCache
from .renewal import Renewal
from .routes import with_routes
from .sampler import likeliest, sample
from .scheduler import ScheduledStep, Scheduler
from .scoring import PromptScore, PromptScorer
from .sequence import Constraint, Request, Sequence
from .speculative import Run, Speculation, Speculator, make_speculator
from .stats import Usage
from .weights import NamedTensors, Staged, Weights

Forward = tuple[BatchState, Tensor, list[int]]
"""Sequences, their logits [B, V], and the weight version [B] that produced each row of logits."""


class Engine:
    """Continuous batching over a paged KV cache, for a causal LM that calls the engine's attention.

    The prefix cache, the scheduling options and the preemption mode do not change the sampled
    tokens.

    Args:
        kv_tokens: tokens of running sequences that the KV cache holds.
        block_size: tokens per block.
        max_running: maximum number of sequences decoded together.
        prefill_tokens: prompt tokens per step.
        prefix_cache: "none", "radix" or "hash" (`prefix_cache.py`).
        continuous: continuous batching, see `scheduler.py`.
        chunked_prefill: compute long prompts in pieces, see `scheduler.py`.
        preemption: "none" reserves the worst case for each sequence. The other modes preempt
            sequences when blocks run out: "recompute" computes them again, "swap" copies them to
            host memory.
        host_tokens: maximum number of tokens in host memory, for "swap". None: as many as the KV
            cache holds.
        update_kv: "recomputed": after `load_weights`, compute the keys and values of sequences in
            flight again. "kept": go on with those that exist.
        kv_dtype: "int8" quantises the KV cache (`quantised_cache.py`).
        autocast: dtype of the forward pass. None: the dtype of the weights.
        speculation: speculative decoding, see `speculative.py`. None: one token per step.
        cuda_graphs: decode with CUDA graphs (`cuda_graphs.py`). True needs a model on CUDA, and
            raises if a capture fails. None uses graphs if the model is on CUDA, until a capture
            fails.
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
        update_kv: Literal["kept", "recomputed"] = "kept",
        kv_dtype: Literal["auto", "int8"] = "auto",
        autocast: torch.dtype | None = None,
        speculation: Speculation | None = None,
        cuda_graphs: bool | None = None,
    ) -> None:
        # One extra block: samples that start on a prompt copy its partly filled block, so that
        # block stays allocated beside their copies until the last sample has started.
        manager = BlockManager(-(-kv_tokens // block_size) + 1, block_size)
        slots = manager.count if host_tokens is None else host_tokens // block_size
        host = HostBlocks(slots if preemption == "swap" else 0, block_size)
        preempt = preemption != "none"
        self.prefixes = make_prefix_cache(prefix_cache, manager)
        self.scheduler = Scheduler(
            manager,
            max_running,
            prefill_tokens,
            cache=self.prefixes,
            continuous=continuous,
            chunked=chunked_prefill,
            preempt=preempt,
            host=host,
        )
        self.renewal = Renewal(self.scheduler, update_kv == "recomputed")
        self.stats = self.scheduler.stats
        cache = Int8KVCache if kv_dtype == "int8" else KVCache
        self.runner = ModelRunner(model, cache(manager.count, block_size), autocast)
        if cuda_graphs or (cuda_graphs is None and self.runner.device.type == "cuda"):
            self.runner.use_graphs(self.stats, may_fail=cuda_graphs is None)
        self._device = self.runner.device
        self.weights = Weights(model.module)
        self.speculator = (
            make_speculator(speculation, self.scheduler, self.runner, autocast)
            if speculation
            else None
        )
        self.adapters = Adapters(autocast)
        self.version = 0
        self._batch = BatchState([])
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
        origin: int | None = None,
        due: Mapping[int, Many[int]] | None = None,
    ) -> Request:
        """Queue one prompt.

        Args:
            key: task name, which enters the sampling noise.
            prompt: token ids, at least one.
            samples: sample indices to draw.
            priority: larger values are served first.
            adapter: name of a loaded adapter. None: the default adapter, if there is one.
            constraint: which tokens may be sampled; None for all.
            origin: position whose token has the first noise: the prompt's length in the first turn
                of an episode. Later turns keep it, and so draw fresh noise. None: this prompt's
                length.
            due: by sample, the weight version that must sample each token. A sequence waits for
                weights that are not loaded yet. None: tokens use the current weights.

        Raises:
            ValueError: for an empty prompt, `max_tokens` below 1, no samples, an origin beyond the
                prompt, a sequence that cannot fit in the KV cache, or an adapter that is not
                loaded.
        """
        if not prompt:
            raise ValueError(
                "the prompt is empty. Give at least one token for the model to continue"
            )
        if params.max_tokens < 1 or not samples:
            raise ValueError(
                f"nothing to generate: max_tokens={params.max_tokens}, samples={samples}"
            )
        if origin is not None and not 0 <= origin <= len(prompt):
            raise ValueError(
                f"origin = {origin}: the prompt has {len(prompt)} tokens. Give the length of the"
                " episode's first prompt"
            )
        if params.counts_tokens or constraint is not None:
            params = replace(params, counted_from=len(prompt), constrained=constraint is not None)
        loaded = self.adapters.of(adapter)
        request = Request(
            key,
            prompt,
            params,
            list(samples),
            priority,
            adapter=loaded,
            constraint=constraint,
            origin=origin,
            due=due or {},
        )
        self.scheduler.add(request)
        return request

    def score(
        self, prompts: list[list[int]], temperature: float, top: int, adapter: str | None = None
    ) -> Iterator[PromptScore | None]:
        """Log-probs of the tokens of each prompt.

        Args:
            prompts: token ids of each prompt.
            temperature: log-probs are those of logits / temperature; 0 counts as 1.
            top: number of most likely tokens to return at each position.
            adapter: name of a loaded adapter. None: the default adapter, if there is one.

        Yields:
            One score per prompt, and None after each piece of a longer prompt. The caller may step
            the engine in between.

        Raises:
            ValueError: if the adapter is not loaded.
            RuntimeError: if the weights are torn.
        """
        if self.weights.torn:
            raise RuntimeError(
                "the weights are torn: an update failed, and the old weights could not be restored."
                " Load all weights again"
            )
        loaded = self.adapters.of(adapter)
        yield from PromptScorer(self.runner).scores(prompts, temperature, top, loaded)

    def run(self) -> list[Sequence]:
        """Step until no sequence waits or runs.

        If no sequence is running, the prefix cache is cleared first: weights may have changed
        without a new version, as in supervised training. A caller that steps the engine itself
        keeps the cache.

        Returns:
            The finished sequences, in the order in which they ended.
        """
        self.restart()
        finished: list[Sequence] = []
        while self.busy:
            finished += self.step()
        return finished

    @property
    def busy(self) -> bool:
        """True while any request waits or any sequence runs."""
        return bool(self.scheduler.waiting or self.scheduler.running)

    @torch.inference_mode()
    def step(self) -> list[Sequence]:
        """Sample one token for each scheduled sequence, or one or more with speculation.

        Returns:
            The sequences that ended in this step.
        """
        with on_device(self._device):
            work = self.renewal.schedule() or self.scheduler.schedule(self.version)
            if self.speculator is not None:
                return self._speculate(work, self.speculator)
            forwards = self._forward(work)
            return self._commit(work, forwards)

    def set_version(self, version: int) -> None:
        """Declare that the weights have changed. Later tokens are stamped with `version`.

        Raises:
            RuntimeError: if `version` does not increase, or sequences are in flight.
        """
        if self.busy:
            raise RuntimeError("weights were changed while sequences are in flight")
        if version <= self.version:
            raise RuntimeError(f"the weight version must increase: {self.version} -> {version}")
        self._forget_weights()
        self.version = version

    def load_weights(self, tensors: NamedTensors, version: int, *, undo: bool = True) -> None:
        """Overwrite the model's weights in place. Later tokens are stamped with `version`.

        Call this between two steps, from the thread that steps. Do not call it for a module that is
        used elsewhere.

        Sequences in flight keep their keys and values: their later tokens are sampled from the new
        weights, attending to keys and values of the old weights. With update_kv "recomputed", the
        next steps compute these again first. The prefix cache is cleared. Prompts without a running
        sample are computed again.

        Args:
            tensors: the new weights, see `Weights.load`.
            version: the new version. The current version is accepted while nothing is in flight,
                because all weights before the first step have version 0.
            undo: keep the old weights in host memory, and restore them if writing fails. Without
                it, a failed write leaves an engine that refuses to compute.

        Raises:
            ValueError: if the tensors do not fit (see `Weights.load`).
            RuntimeError: if `version` does not increase.

        After any error the old weights and version are in place, except after a failed write
        without `undo`.
        """
        with self._renewed(version):
            self.weights.load(tensors, undo=undo)

    def swap_weights(self, staged: Staged, version: int) -> None:
        """As `load_weights`, of weights that `Weights.stage` has checked.

        Raises:
            RuntimeError: if `version` does not increase.
        """
        with self._renewed(version):
            self.weights.swap(staged)

    @contextmanager
    def _renewed(self, version: int) -> Iterator[None]:
        """Context in which weights of a newer version are written."""
        if version < self.version or (version == self.version and self.busy):
            raise RuntimeError(f"the weight version must increase: {self.version} -> {version}")
        yield
        self.scheduler.outdate()
        self.renewal.begin()
        self.version = version

    def load_adapter(self, name: str, adapter: Adapter) -> None:
        """Load an adapter that requests can then select by name.

        Raises:
            ValueError: if the name is empty or taken.
        """
        self.adapters.load(name, adapter)

    def run_adapter(self, adapter: Adapter, version: int) -> None:
        """Replace the default adapter, which serves all requests that name none.

        The model's own weights do not change. The prefix cache is cleared.

        Args:
            adapter: the new adapter. Its matrices are copied.
            version: version with which new tokens are stamped. It may equal the current version,
                because all weights before the first step have version 0.

        Raises:
            RuntimeError: if `version` decreases, or sequences are in flight.
        """
        if self.busy:
            raise RuntimeError("the adapter was changed while sequences are in flight")
        if version < self.version:
            raise RuntimeError(f"the weight version must increase: {self.version} -> {version}")
        self.adapters.run(adapter)
        self.prefixes.clear()
        self.version = version

    def end(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a running sequence between two steps. Its blocks are freed immediately.

        Raises:
            ValueError: if the sequence has already ended.
        """
        if sequence.finish_reason is not None:
            raise ValueError(f"the sequence has already ended: {sequence.finish_reason}")
        sequence.finish_reason = reason
        sequence.seconds = time.perf_counter() - sequence.started
        self.scheduler.retire(with_routes(self.runner.cache, [sequence]))

    def abort(self, request: Request, samples: Container[int] | None = None) -> list[Sequence]:
        """Abort samples as `Scheduler.abort` does.

        Returned sequences have the tokens sampled so far and finish reason "aborted".
        """
        begun = self.scheduler.abort(request, samples)
        for sequence in begun:
            sequence.seconds = time.perf_counter() - sequence.started
        return begun

    def usage(self) -> Usage:
        """Current occupancy of the queue, the batch and the KV cache."""
        blocks, running = self.scheduler.blocks, self.scheduler.running
        wasted = sum(len(s.blocks) * blocks.block_size - (s.length - 1) for s in running)
        wasted += sum(
            len(t.blocks) * blocks.block_size - t.computed for t in self.scheduler.waiting
        )
        share = wasted / max(1, blocks.used * blocks.block_size)
        return Usage(
            len(self.scheduler.waiting),
            len(running),
            blocks.used,
            blocks.idle,
            blocks.free,
            wasted,
            share,
        )

    def restart(self) -> None:
        """Forget what was computed with the weights: they may have changed without a new version.

        Does nothing while a sequence runs.
        """
        if not self.scheduler.running:
            self._forget_weights()

    def release_memory(self) -> None:
        """Free the KV cache and the copies of weights. The next step allocates them again.

        Raises:
            RuntimeError: if sequences are in flight, because their keys and values are in the
                cache.
        """
        if self.busy:
            raise RuntimeError("the KV cache cannot be freed while sequences are in flight")
        self.prefixes.clear()
        self.runner.release_memory()
        if self.speculator is not None:
            self.speculator.proposer.release_memory()

    @contextmanager
    def exact_cache(self) -> Iterator[None]:
        """Use a KV cache in the dtype of the forward pass in this block, even with kv_dtype int8.

        Both caches are freed at each change, so only one takes memory at a time.

        Raises:
            RuntimeError: if sequences are in flight at the start.
        """
        runner = self.runner
        if runner.cache.exact:
            yield
            return
        self.release_memory()
        kept = runner.cache, runner.host
        runner.cache = KVCache(runner.cache.blocks, runner.cache.block_size)
        runner.host = HostPools(runner.cache)
        try:
            yield
        finally:
            if not self.busy:  # an error may leave sequences in flight
                self.release_memory()
            runner.cache, runner.host = kept

    def _forget_weights(self) -> None:
        self.prefixes.clear()
        self.runner.refresh()

    def _forward(self, work: ScheduledStep) -> list[Forward]:
        """Run the model for the starting and the decoding sequences, if there are any."""
        if self.weights.torn:
            raise RuntimeError(
                "the weights are torn: an update failed, and the old weights could not be restored."
                " Load all weights again"
            )
        for chunk, row in fill(self.runner, work):
            chunk.ticket.logits, chunk.ticket.version = row, self.version
        self.stats.taken_out_bytes = self.runner.host.taken_out
        self.stats.brought_back_bytes = self.runner.host.brought_back
        forwards = []
        # Versions are per ticket: a prompt's logits may have waited while the weights changed.
        if work.starting:
            rows = [ticket.logits for ticket in work.tickets if ticket.logits is not None]
            forwards.append(
                (
                    BatchState(work.starting),
                    torch.stack(rows),
                    [ticket.version for ticket in work.tickets],
                )
            )
        if work.decoding:
            if work.decoding != self._batch.sequences:
                self._batch = BatchState(work.decoding)
            logits = self.runner.decode(self._batch, work.revision, work.slots)
            forwards.append((self._batch, logits, [self.version] * len(logits)))
        return forwards

    def _commit(self, work: ScheduledStep, forwards: list[Forward]) -> list[Sequence]:
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
        self.scheduler.retire(with_routes(self.runner.cache, finished))
        return finished

    def _speculate(self, work: ScheduledStep, speculator: Speculator) -> list[Sequence]:
        """Run a step in which each running sequence advances by its accepted tokens plus one."""
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
        self.scheduler.retire(with_routes(self.runner.cache, ended))
        return finished + ended

    def _extend(self, run: Run) -> int:
        """Append the tokens of a run, up to and including a stop token.

        The sequence never exceeds its limit.

        Returns:
            The number of tokens appended.
        """
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


def make_prefix_cache(kind: str, blocks: BlockManager) -> PrefixCache:
    """Create a prefix cache of kind "none", "radix" or "hash".

    Raises:
        ValueError: for any other kind.
    """
    kinds: dict[str, Callable[[BlockManager], PrefixCache]] = {
        "none": lambda _: NoCache(),
        "radix": RadixCache,
        "hash": BlockHashCache,
    }
    if kind not in kinds:
        raise ValueError(f"unknown prefix cache '{kind}'. Use none, radix or hash")
    return kinds[kind](blocks)
