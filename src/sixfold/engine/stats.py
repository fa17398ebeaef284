"""Counters and occupancy of the engine. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class EngineStats:
    """Engine counters since it was created, and peaks since the last `restart_peaks`.

    Attributes:
        prefill_tokens: prompt tokens that were computed.
        reused_tokens: prompt tokens that were not computed, because samples share a prompt or the
            prefix cache held them.
        recomputed_tokens: tokens of preempted sequences that were computed again.
        decoded_tokens: sampled tokens.
        decode_rows: rows of decode steps that advanced a sequence by one token.
        decode_slots: all rows of decode steps, including finished sequences in a static batch.
        preemptions: times a running sequence was stopped for lack of blocks, to continue later.
        taken_out_bytes: KV cache bytes of preempted sequences copied to host memory.
        brought_back_bytes: KV cache bytes of preempted sequences copied back from host memory.
        aborted: sequences that the caller aborted, whether they had started or not.
        peak_blocks: largest number of KV cache blocks held by requests.
        peak_waiting: largest number of requests and preempted sequences in the queue.
        graph_replays: decode forward passes that replayed a CUDA graph.
        eager_decodes: decode forward passes without a replay while CUDA graphs are on.
        proposed_tokens: speculative tokens that were proposed and verified.
        accepted_tokens: speculative tokens that became part of a completion.
        target_passes: verifications, counted per sequence.
        pass_tokens: tokens added to completions by verifications.
    """

    prefill_tokens: int = 0
    reused_tokens: int = 0
    recomputed_tokens: int = 0
    decoded_tokens: int = 0
    steps: int = 0
    decode_rows: int = 0
    decode_slots: int = 0
    preemptions: int = 0
    taken_out_bytes: int = 0
    brought_back_bytes: int = 0
    aborted: int = 0
    peak_blocks: int = 0
    peak_waiting: int = 0
    graph_captures: int = 0
    graph_replays: int = 0
    eager_decodes: int = 0
    proposed_tokens: int = 0
    accepted_tokens: int = 0
    target_passes: int = 0
    pass_tokens: int = 0

    def restart_peaks(self) -> None:
        """Reset the peaks to 0."""
        self.peak_blocks = self.peak_waiting = 0

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens, over all samples, that were not computed."""
        return self.reused_tokens / max(1, self.prefill_tokens + self.reused_tokens)

    @property
    def acceptance_rate(self) -> float:
        """Share of speculative tokens that were accepted."""
        return self.accepted_tokens / max(1, self.proposed_tokens)

    @property
    def tokens_per_pass(self) -> float:
        """Tokens added to a sequence per forward pass of the model. 1 without speculation."""
        return self.pass_tokens / self.target_passes if self.target_passes else 1.0


@dataclass(frozen=True)
class Usage:
    """Occupancy of the engine at one moment.

    Attributes:
        waiting: requests and preempted sequences in the queue.
        used: blocks held by requests.
        idle: blocks held only by the prefix cache. They are freed when room is needed.
        free: remaining blocks.
        wasted_slots: token slots of used blocks that are still empty.
        fragmentation: wasted slots divided by all slots of used blocks. The waste is less than one
            block per sequence.
    """

    waiting: int
    running: int
    used: int
    idle: int
    free: int
    wasted_slots: int
    fragmentation: float
