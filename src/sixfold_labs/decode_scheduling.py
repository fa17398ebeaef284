"""Decode throughput of one GPU under four scheduling techniques."""

from __future__ import annotations

from dataclasses import dataclass

from sixfold.pages.lab import Bars, Breaking, Control, Lab, Outcome, Table

WEIGHTS_GB = 14.0
BANDWIDTH_GB_S = 3350.0
FLOPS = 800e12
FLOPS_PER_TOKEN = 28e9
KV_MB_PER_TOKEN = 0.13
STATIC_OCCUPANCY = 0.6
"""Share of a static batch that is not padding."""
NO_PREFIX_KV, CHUNKED_STEP = 1.4, 0.95


@dataclass(frozen=True)
class Techniques:
    """Which scheduling techniques are on."""

    continuous: bool
    prefix: bool
    chunked: bool
    speculative: bool


@dataclass(frozen=True)
class DecodeStep:
    """Times of one decode step of the whole batch, in milliseconds, and its throughput."""

    weights_ms: float
    kv_ms: float
    compute_ms: float
    streams: float
    tokens_per_second: float

    @property
    def bottleneck(self) -> str:
        if self.compute_ms > self.weights_ms + self.kv_ms:
            return "compute"
        return "kv cache" if self.kv_ms > self.weights_ms else "weights"


def speculative_gain(temperature: float) -> float:
    """Tokens per step with speculative decoding: 1 + 1.5 (1 - 0.7 T)."""
    return 1 + 1.5 * (1 - 0.7 * temperature)


def decode_step(batch: int, length: int, temperature: float, on: Techniques) -> DecodeStep:
    """Time one decode step: max(weight reads + KV reads, arithmetic).

    Args:
        length: tokens of context per sequence.
    """
    streams = batch * (1.0 if on.continuous else STATIC_OCCUPANCY)
    kv_gb = streams * length * KV_MB_PER_TOKEN / 1024
    weights_ms = 1000 * WEIGHTS_GB / BANDWIDTH_GB_S
    kv_ms = 1000 * kv_gb / BANDWIDTH_GB_S * (1.0 if on.prefix else NO_PREFIX_KV)
    compute_ms = 1000 * streams * FLOPS_PER_TOKEN / FLOPS
    step_ms = max(weights_ms + kv_ms, compute_ms) * (CHUNKED_STEP if on.chunked else 1.0)
    gain = speculative_gain(temperature) if on.speculative else 1.0
    return DecodeStep(weights_ms, kv_ms, compute_ms, streams, gain * 1000 * streams / step_ms)


def decode_scheduling(
    *,
    batch: int,
    length: int,
    temperature: float,
    continuous: bool,
    prefix: bool,
    chunked: bool,
    speculative: bool,
) -> Outcome:
    """Throughput of decoding a 7B model on one GPU."""
    on = Techniques(continuous, prefix, chunked, speculative)
    step = decode_step(batch, length, temperature, on)
    off = decode_step(batch, length, temperature, Techniques(False, False, False, False))
    labels = ("weight reads", "KV cache reads", "arithmetic")
    times = (step.weights_ms, step.kv_ms, step.compute_ms)
    return Outcome(
        values={
            "tokens_per_second": step.tokens_per_second,
            "tokens_per_second_per_stream": step.tokens_per_second / batch,
            "tokens_per_second_all_off": off.tokens_per_second,
            "speedup": step.tokens_per_second / off.tokens_per_second,
            "bottleneck": step.bottleneck,
        },
        tables=(
            Table(
                "One decode step",
                ("term", "milliseconds"),
                [[label, ms] for label, ms in zip(labels, times, strict=True)],
            ),
        ),
        figures=(Bars("One decode step", "milliseconds", labels, times),),
    )


DECODE_SCHEDULING = Lab(
    name="decode-scheduling",
    title="Continuous batching, prefix caching, chunked prefill and speculation in tokens/s",
    about=(
        "A decode step of a 7B model reads 14 GB of weights and the KV cache (0.13 MB per token)"
        " at 3350 GB/s, and computes 28 GFLOP per token at 800 TFLOP/s; the slower of reads and"
        " arithmetic counts. Without continuous batching 60 % of the batch is useful; without"
        " prefix caching KV reads take 1.4 times as long; chunked prefill takes 5 % off the step;"
        " speculative decoding multiplies tokens by 1 + 1.5 (1 - 0.7 T) at temperature T. These"
        " factors are illustrative: reported gains of chunked prefill are 10 to 20 %."
    ),
    controls=(
        Control("batch", 32, "sequences in the batch", low=1, high=256, step=5),
        Control(
            "length",
            2048,
            "tokens of context per sequence",
            unit="tokens",
            low=128,
            high=32768,
            sweep=(128, 512, 1024, 2048, 4096, 8192, 16384, 32768),
        ),
        Control("temperature", 0.7, "sampling temperature", low=0.0, high=1.0, step=0.1),
        Control("continuous", True, "continuous batching"),
        Control("prefix", True, "prefix caching"),
        Control("chunked", False, "chunked prefill"),
        Control("speculative", False, "speculative decoding"),
    ),
    run=decode_scheduling,
    breaking=Breaking(
        breaks={"batch": 256, "length": 32768, "chunked": True},
        safe={"batch": 256, "length": 512, "chunked": True},
        why="Reading 256 long KV caches takes far longer than the weights that batching amortises.",
        failed=lambda outcome: outcome.number("tokens_per_second_per_stream") < 10,
    ),
)

LABS = (DECODE_SCHEDULING,)
