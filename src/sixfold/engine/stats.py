"""What the engine has done and how full it is, as plain numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class EngineStats:
    """Counters since the engine was made, and peaks since `restart_peaks`.

    prefill_tokens: prompt tokens computed. reused_tokens: prompt tokens that were not, because samples share a prompt or the prefix cache had them.
    decode_rows, decode_slots: rows of decode steps that went one token further, and all of them, those of ended sequences in a static batch included.
    recomputed_tokens: tokens of preempted sequences computed once more. decoded_tokens: sampled. preemptions: sequences stopped for lack of blocks,
    to go on later. taken_out_bytes, brought_back_bytes: of theirs, to host memory and from it. aborted: sequences given up by the caller, begun or
    not. peak_blocks: cache blocks that requests held at the fullest moment.
    peak_waiting: requests and preempted sequences in the queue at its longest. graph_captures, graph_replays: CUDA graphs made, and
    decode forwards that were a replay of one; eager_decodes: those that were not, where graphs are on.

    Of speculation: proposed_tokens, guessed and checked; accepted_tokens, those that a completion took over; target_passes, how often a sequence was
    checked; pass_tokens, what completions grew by in them.
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
        """The peaks are of what comes from here on."""
        self.peak_blocks = self.peak_waiting = 0

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens, over all samples, that were not computed."""
        return self.reused_tokens / max(1, self.prefill_tokens + self.reused_tokens)

    @property
    def padding_waste(self) -> float:
        """Share of the rows of decode steps that no sequence needed."""
        return 1 - self.decode_rows / max(1, self.decode_slots)

    @property
    def acceptance_rate(self) -> float:
        """Share of guessed tokens that completions took over."""
        return self.accepted_tokens / max(1, self.proposed_tokens)

    @property
    def tokens_per_pass(self) -> float:
        """Tokens that a sequence goes further by one pass through the model; 1 without speculation."""
        return self.pass_tokens / self.target_passes if self.target_passes else 1.0


@dataclass(frozen=True)
class Usage:
    """The engine at one moment.

    waiting: requests and preempted sequences in the queue. running: sequences. used: blocks that requests hold. idle: blocks that the prefix cache
    alone holds; they are given up when room is needed. free: the rest. wasted_slots: token slots of used blocks that hold nothing yet.
    fragmentation: wasted slots as a share of all slots in used blocks; less than one block a sequence.
    """

    waiting: int
    running: int
    used: int
    idle: int
    free: int
    wasted_slots: int
    fragmentation: float
