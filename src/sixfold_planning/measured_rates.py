"""Time of Sixfold's own engine and trainer on a machine that was measured.

The roofline of `decode_time` and `train_time` does not hold for small models: calls and work on
single numbers take as long as matrix products, and a larger micro-batch may leave the processor's
caches. So `sixfold plan --measure` times real calls of small models, and costs are fitted to them
(`calibration`). A call with n tokens takes

    call(n) + layers * layer(n) + FLOPs * flop(n) + numbers * number(n)

Nothing here belongs to a model, and nothing is fitted to a run.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from .architectures import Architecture
from .train_time import FORWARD, Pass, training_pass
from .workload import Workload

PREFILL_TOKENS = 4096
"""Prompt tokens that the engine computes in one call: the default of
`engine.prefill_tokens_per_step`."""

DECODE_STEP = Pass(1, 0, False)
"""One token per sequence. Attention is counted by the bytes of its cache."""


@dataclass(frozen=True)
class CallSize:
    """Work of one call.

    Attributes:
        tokens: tokens in the forward pass.
        predicted: tokens whose logits are computed.
        attended: mean number of positions to which a token attends.
    """

    tokens: float
    predicted: float
    attended: float


def call_counts(arch: Architecture, size: CallSize, work: Pass) -> tuple[float, ...]:
    """What the costs of a call are multiplied with: 1, layers, FLOPs, numbers.

    "Numbers" are the values that norms, activations, rotary embeddings and the softmax over the
    vocabulary compute. In a training pass they count once per pass over the products, as layers do.
    """
    head = arch.vocab * arch.hidden
    products = (arch.matmul_params - head) * size.tokens + head * size.predicted
    # attention_flops takes the length of a causal sequence, which is twice the mean attended.
    attention = size.tokens * arch.attention_flops(2 * size.attended)
    heads = (arch.heads + 2 * arch.kv_heads) * arch.head_size
    width = arch.layers * (4 * arch.hidden + 2 * heads + 3 * arch.mlp_width)
    return (
        1.0,
        arch.layers * work.products,
        2 * products * work.products + attention * work.attention,
        (width * size.tokens + arch.vocab * size.predicted) * work.products,
    )


@dataclass(frozen=True)
class CostTable:
    """Costs of a call for some numbers of tokens. Seconds between them are interpolated linearly.

    Attributes:
        tokens: numbers of tokens that were measured, ascending.
        number_s: seconds per number, see `call_counts`.
    """

    tokens: tuple[int, ...]
    call_s: tuple[float, ...]
    layer_s: tuple[float, ...]
    flop_s: tuple[float, ...]
    number_s: tuple[float, ...]

    def seconds(self, tokens: float, counts: Callable[[float], tuple[float, ...]]) -> float:
        """Seconds of a call.

        Args:
            tokens: tokens of the call. Below the smallest measured number a call takes what the
                smallest takes. Above the largest its time is proportional to the tokens.
            counts: tokens -> `call_counts` of a call of this kind with so many tokens.
        """

        def at(index: int) -> float:
            costs = (self.call_s, self.layer_s, self.flop_s, self.number_s)
            pairs = zip(costs, counts(self.tokens[index]), strict=True)
            return sum(cost[index] * count for cost, count in pairs)

        if tokens >= self.tokens[-1]:
            return at(len(self.tokens) - 1) * tokens / self.tokens[-1]
        if tokens <= self.tokens[0]:
            return at(0)
        above = next(i for i, number in enumerate(self.tokens) if number > tokens)
        low, high = self.tokens[above - 1], self.tokens[above]
        share = (tokens - low) / (high - low)
        return (1 - share) * at(above - 1) + share * at(above)

    def pass_seconds(self, arch: Architecture, size: CallSize, calls: float, work: Pass) -> float:
        """Seconds of a pass over `size`, spread evenly over `calls` calls.

        Args:
            size: tokens of all calls together.
            calls: number of calls, above 0.
        """
        share = size.predicted / size.tokens

        def counts(tokens: float) -> tuple[float, ...]:
            return call_counts(arch, CallSize(tokens, share * tokens, size.attended), work)

        return calls * self.seconds(size.tokens / calls, counts)


@dataclass(frozen=True)
class MeasuredRates:
    """Costs of engine, trainer and weight sync on one device.

    Attributes:
        dtype: of matrix products and KV cache: fp32 or bf16.
        decode: decode steps of the engine, by number of sequences.
        score: forward passes of the reference.
        train: forward and backward passes of the trainer.
        kv_byte_s: seconds per byte of keys and values that a decode step reads.
        shared_read: time in which a decode step reads a prompt for one more of its samples, as a
            share of that for the first: it may still be in the processor's caches.
        episode_s: seconds per episode outside the engine: its tasks in the event loop, decoding of
            its text, and a fast reward function in a worker process.
        update_s: seconds of the optimizer per trained parameter.
        sync_byte_s: seconds per byte of weights that the engine copies.
        file_byte_s: seconds per byte of weights that pass through a file with checksums.
        crowded: time of a call while the other cores compute, divided by that while they rest.
        threads: CPU threads that were measured. 0: a GPU was.
        cores: cores of the machine.
    """

    dtype: str
    decode: CostTable
    prefill: CostTable
    score: CostTable
    train: CostTable
    kv_byte_s: float
    shared_read: float
    episode_s: float
    update_s: float
    sync_byte_s: float
    file_byte_s: float
    crowded: float
    threads: int
    cores: int

    @property
    def width(self) -> int:
        """Bytes per number in `dtype`."""
        return 4 if self.dtype == "fp32" else 2

    def decode_seconds(self, arch: Architecture, sequences: float, context: float) -> float:
        """Seconds of a decode step of `sequences` with `context` cached tokens each."""
        step = self.decode.pass_seconds(arch, CallSize(sequences, sequences, 0), 1, DECODE_STEP)
        # `kv_bytes` is in bf16.
        read = sequences * context * arch.kv_bytes() * self.width / 2
        return step + read * self.kv_byte_s

    def prompt_seconds(self, arch: Architecture, prompt: float) -> float:
        """Seconds of one prompt, computed together with others in calls of `PREFILL_TOKENS`."""
        size, calls = CallSize(prompt, 1, prompt / 2), prompt / PREFILL_TOKENS
        return self.prefill.pass_seconds(arch, size, calls, FORWARD)

    def learning_seconds(
        self, arch: Architecture, work: Workload, devices: int
    ) -> tuple[float, float]:
        """Seconds to score all trajectories of a step once, and to train on them once.

        Args:
            work: work of a step. Adapters are updated in no time.
            devices: devices that share the work.
        """
        prompts = work.sequences / (work.samples if work.shared_prompt else 1)
        prompted, sampled = prompts * work.prompt_tokens, work.sequences * work.mean_tokens
        attended = prompted * work.prompt_tokens / 2
        attended += sampled * (work.prompt_tokens + work.mean_tokens / 2)
        tokens = prompted + sampled
        calls = max(1, math.ceil(tokens / devices / work.packed))
        size = CallSize(tokens / devices, sampled / devices, attended / tokens)
        train = training_pass(work.recompute, adapters=work.adapters)
        update = 0.0 if work.adapters else arch.params_b * 1e9 * self.update_s / devices
        return (
            self.score.pass_seconds(arch, size, calls, FORWARD),
            self.train.pass_seconds(arch, size, calls, train) + update,
        )

    def sync_seconds(self, arch: Architecture) -> float:
        """Seconds to copy all float32 weights into the engine."""
        return 4e9 * arch.params_b * self.sync_byte_s

    def slowed(self, busy: int) -> float:
        """Time of a call while `busy` threads compute, divided by that while its own do."""
        idle = self.cores - self.threads
        share = min(1.0, (busy - self.threads) / idle) if idle > 0 else 0.0
        return (1 + (self.crowded - 1) * share) * max(1.0, busy / self.cores)
