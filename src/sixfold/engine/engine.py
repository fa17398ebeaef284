"""The engine: requests in, completions out. `step()` is schedule, run, commit.

A sequence's tokens are a function of (weights, prompt, parameters, seed, task, sample) alone: not of who runs beside it, of the order of
arrival or of the batch size.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..types import SamplingParams
from .block_manager import BlockManager
from .kv_cache import KVCache
from .model_runner import ModelRunner
from .sampler import sample
from .scheduler import Scheduler, Work
from .sequence import Request, Sequence


@dataclass
class EngineStats:
    """Counters since the engine was made.

    prefill_tokens: prompt tokens computed. reused_tokens: prompt tokens that samples shared instead. decoded_tokens: sampled.
    peak_blocks: cache blocks in use at the fullest moment.
    """

    prefill_tokens: int = 0
    reused_tokens: int = 0
    decoded_tokens: int = 0
    steps: int = 0
    peak_blocks: int = 0


class Engine:
    """Continuous batching over a paged KV cache, on a Hugging Face causal LM whose attention is ours.

    kv_tokens: tokens of running sequences that the cache holds. max_running: sequences decoded together. prefill_tokens: prompt tokens in one step.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        kv_tokens: int,
        block_size: int = 16,
        max_running: int = 256,
        prefill_tokens: int = 4096,
        autocast: torch.dtype | None = None,
    ) -> None:
        # One block more: the partly filled one of the prompt whose samples are still starting, which they copy.
        manager = BlockManager(-(-kv_tokens // block_size) + 1, block_size)
        self.scheduler = Scheduler(manager, max_running, prefill_tokens)
        self.runner = ModelRunner(model, KVCache(manager.count, block_size), autocast)
        self.version = 0
        self.stats = EngineStats()

    def add(self, key: str, prompt: list[int], params: SamplingParams, samples: list[int]) -> Request:
        """Queue one prompt. key: names the task in the noise. samples: which sample indices to draw.

        Raises ValueError for an empty prompt, no room to generate, or a sequence that cannot fit the cache.
        """
        if not prompt:
            raise ValueError("empty prompt: the model needs at least one token to continue")
        if params.max_tokens < 1 or not samples:
            raise ValueError(f"nothing to generate: max_tokens={params.max_tokens}, samples={samples}")
        request = Request(key, prompt, params, list(samples))
        self.scheduler.add(request)
        return request

    def run(self) -> list[Sequence]:
        """Step until nothing waits or runs; the finished sequences in the order they ended."""
        finished: list[Sequence] = []
        while self.busy:
            finished += self.step()
        return finished

    @property
    def busy(self) -> bool:
        """True while a sequence waits or runs."""
        return bool(self.scheduler.waiting or self.scheduler.running)

    @torch.inference_mode()
    def step(self) -> list[Sequence]:
        """One token for each scheduled sequence; gives back those that ended with it."""
        work = self.scheduler.schedule()
        logits = self._forward(work)
        return self._commit(work, logits)

    def set_version(self, version: int) -> None:
        """The weights just changed: tokens from here on carry `version`. Raises RuntimeError if it does not grow or sequences are in flight."""
        if self.busy:
            raise RuntimeError("weights changed while sequences are in flight")
        if version <= self.version:
            raise RuntimeError(f"weight version must grow: {self.version} -> {version}")
        self.version = version

    def release_memory(self) -> None:
        """Drop the cache's buffers; the next step makes them anew. Raises RuntimeError while sequences are in flight: they live there."""
        if self.busy:
            raise RuntimeError("KV memory released while sequences are in flight")
        self.runner.cache.pools.clear()
        self.runner.window.clear()

    def _forward(self, work: Work) -> Tensor:
        if work.prompts:
            for request, row in zip(work.prompts, self.runner.prefill(work.prompts), strict=True):
                request.logits = row
                self.stats.prefill_tokens += len(request.prompt)
        if work.sequences is self.scheduler.running:
            for sequence in work.sequences:
                self.scheduler.grow(sequence)
            return self.runner.decode(work.sequences, self.scheduler.revision, self.scheduler.members)
        self.runner.cache.copy_blocks(self.scheduler.copies)
        self.scheduler.copies.clear()
        self.stats.reused_tokens += sum(s.length for s in work.sequences) - sum(len(r.prompt) for r in work.prompts)
        return torch.stack([s.request.logits for s in work.sequences])  # type: ignore[misc]

    def _commit(self, work: Work, logits: Tensor) -> list[Sequence]:
        sequences = list(work.sequences)
        noise = [s.noise[len(s.logp)] for s in sequences]
        tokens, logps = sample(logits, [s.request.params for s in sequences], noise, [s.tokens for s in sequences])
        finished: list[Sequence] = []
        for sequence, token, logp in zip(sequences, tokens.tolist(), logps.tolist(), strict=True):
            sequence.tokens.append(token)
            sequence.logp.append(logp)
            sequence.version.append(self.version)
            if token in sequence.request.params.stop_token_ids:
                sequence.finish_reason = "stop"
            elif sequence.length >= sequence.request.limit:
                sequence.finish_reason = "length"
            if sequence.finish_reason:
                sequence.seconds = time.perf_counter() - sequence.started
                finished.append(sequence)
        self.stats.steps += 1
        self.stats.decoded_tokens += len(sequences)
        self.stats.peak_blocks = max(self.stats.peak_blocks, self.scheduler.blocks.count - self.scheduler.blocks.free)
        self.scheduler.release_prompts(work)
        self.scheduler.retire(finished)
        return finished
