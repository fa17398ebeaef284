"""Seconds of training and scoring passes: products, attention, communication, pipeline bubble.

Formulas: FLOPs per token as in Narayanan et al. (arXiv:2104.04473) with causal attention counted
once; backward attention is 2.5 forward passes (Dao, arXiv:2307.08691); the bubble of an interleaved
pipeline is (p - 1) / (m v) (arXiv:2104.04473, section 2.2).
"""

from __future__ import annotations

from dataclasses import dataclass

from .architectures import Architecture
from .constants import Constants
from .hardware import Accelerator


@dataclass(frozen=True)
class Layout:
    """How a trainer splits a model over its devices.

    Attributes:
        tensor: tensor-parallel degree.
        context: context-parallel degree.
    """

    devices: float
    tensor: int
    context: int
    pipeline: int

    @property
    def split(self) -> int:
        """Devices that share the work on one sequence."""
        return self.tensor * self.context * self.pipeline

    @property
    def replicas(self) -> float:
        return max(1.0, self.devices / self.split)


@dataclass(frozen=True)
class Pass:
    """Arithmetic of a pass, in forward passes.

    Attributes:
        products: matrix products: forward, recomputed, gradients of inputs and of weights.
        reduces: gradients of all weights are summed over the replicas.
    """

    products: float
    attention: float
    reduces: bool


FORWARD = Pass(1, 1, False)
RECOMPUTED = {"none": (0.0, 0.0), "selective": (0.5, 0.0), "full": (1.0, 1.0)}
"""Recomputation -> (products, attention) that run again. Selective: every second product."""


def training_pass(recompute: str, *, adapters: bool) -> Pass:
    """Forward and backward. Adapters need no gradients of the large weights.

    Args:
        recompute: a key of `RECOMPUTED`.
        adapters: train adapters (LoRA) only.
    """
    products, attention = RECOMPUTED[recompute]
    return Pass((2 if adapters else 3) + products, 3.5 + attention, not adapters)


@dataclass(frozen=True)
class Engine:
    """Properties of a trainer that change its speed.

    Attributes:
        compiled: reaches `Constants.tuned` in matrix products.
        dtype: of matrix products: bf16 or fp8.
        old_attention: attention kernels use mma.sync (FlashAttention 2).
        ring_attention: context parallelism passes keys and values around a ring.
        gathers: shards weights, and gathers them for every micro-batch (FSDP, ZeRO-3).
        hides_tensor_parallel: overlaps tensor-parallel communication with products.
        interleaves: pipeline stages are split into chunks of one layer.
        loops_experts: runs experts one by one if there is no grouped product for the device.
    """

    compiled: bool = False
    dtype: str = "bf16"
    old_attention: bool = False
    ring_attention: bool = False
    gathers: bool = True
    hides_tensor_parallel: bool = False
    interleaves: bool = False
    loops_experts: bool = False


def compute_seconds(
    arch: Architecture,
    device: Accelerator,
    tokens: float,
    context: float,
    work: Pass,
    engine: Engine,
    k: Constants,
) -> float:
    """Seconds of arithmetic on one device.

    Args:
        tokens: tokens that this device works on; a split model counts as a part of a token.
        context: length of the sequences.
    """
    share = k.tuned if engine.compiled else k.eager
    rate = device.peak(engine.dtype) * share * (k.fp8 if engine.dtype == "fp8" else 1.0)
    peak = device.peak("bf16")
    if engine.old_attention and device.mma_sync_tflops:
        peak = min(peak, device.mma_sync_tflops * 1e12)
    attention_rate = peak * k.tuned * (k.ring if engine.ring_attention else 1.0)
    products = 2 * arch.matmul_params * work.products / rate
    return tokens * (products + arch.attention_flops(context) * work.attention / attention_rate)


def _gather_seconds(
    arch: Architecture, device: Accelerator, layout: Layout, work: Pass, k: Constants
) -> float:
    """Seconds to gather bf16 weights for forward and backward, and to reduce fp32 gradients."""
    shards = layout.devices / layout.tensor
    if shards <= 1 or layout.pipeline > 1:  # a pipeline keeps its weights from batch to batch
        return 0.0
    gathers = 1 if work.products <= 1 else 2
    size = arch.params_b * 1e9 / layout.tensor
    size *= 2 * gathers + (4 if work.reduces else 0)
    speed = device.bandwidth_between(layout.devices) * k.bandwidth
    return size * (1 - 1 / shards) / speed


def _tensor_seconds(
    arch: Architecture, device: Accelerator, layout: Layout, tokens: float, work: Pass, k: Constants
) -> float:
    """Seconds of two all-reduces of bf16 activations per layer and pass."""
    if layout.tensor == 1:
        return 0.0
    size = 2 * 2 * arch.hidden * tokens / (layout.context * layout.pipeline)
    ring = 2 * (1 - 1 / layout.tensor)
    speed = device.bandwidth_between(layout.tensor) * k.bandwidth
    # The gradients of weights need none.
    passes = work.products - (1 if work.reduces else 0)
    return arch.layers * size * ring * passes / speed


def pass_seconds(
    arch: Architecture,
    device: Accelerator,
    layout: Layout,
    tokens: float,
    micro_batches: float,
    context: float,
    work: Pass,
    engine: Engine,
    k: Constants,
) -> float:
    """Seconds of a pass over the micro-batches of one replica.

    Args:
        tokens: tokens per micro-batch.
        micro_batches: micro-batches per replica.
        context: length of the sequences.
    """
    busy = compute_seconds(arch, device, tokens / layout.split, context, work, engine, k)
    if engine.gathers:
        busy = max(busy, _gather_seconds(arch, device, layout, work, k))
    tensor = _tensor_seconds(arch, device, layout, tokens, work, k)
    busy = max(busy, tensor) if engine.hides_tensor_parallel else busy + tensor
    if not engine.compiled:
        passes = arch.layers / layout.pipeline * work.products
        if arch.experts and engine.loops_experts and not device.grouped_matmul:
            busy += passes * arch.experts * k.expert_loop_s
        elif arch.experts:
            busy += passes * k.layer_pass_s
        else:
            busy = max(busy, passes * k.layer_pass_s)
    chunks = arch.layers / layout.pipeline if engine.interleaves else 1.0
    return busy * (micro_batches + (layout.pipeline - 1) / chunks)
