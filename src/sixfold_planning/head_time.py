"""Roofline of the output head: log-probs and their gradients, from whole logits or in chunks.

Whole logits go to memory several times; the log-probs of all tokens are kept for the backward pass.
In chunks of tokens, no table outlives its chunk: the backward pass computes the logits again, which
adds a third to the FLOPs of the head, and reads the weights once per chunk (Liger Kernel,
arXiv:2410.10989; `trainer/fused_head.py` is Sixfold's).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .roofline import knee

WIDE = 4
"""Bytes of a float32: log-probs and the gradient of the head's weight."""


@dataclass(frozen=True)
class HeadKernel:
    """One part of the work of the output head.

    Attributes:
        name: "logits", "log-softmax", "logits again", "gradient of logits" or "backward products".
        moved: bytes between device memory and chip, each operand once.
    """

    name: str
    flops: float
    moved: float

    def memory_bound(self, *, flops_per_second: float, bytes_per_second: float) -> bool:
        """Memory bandwidth limits this part, on a device with this peak and this bandwidth."""
        limit = knee(flops_per_second=flops_per_second, bytes_per_second=bytes_per_second)
        return self.flops < limit * self.moved


def head_kernels(
    *, tokens: int, vocabulary: int, hidden: int, width: int, chunk: int, trained: bool
) -> tuple[HeadKernel, ...]:
    """FLOPs and bytes of forward and backward of one micro-batch.

    With T tokens, V vocabulary entries, H hidden numbers and w bytes per number:

    - logits: 2 T V H FLOPs; hidden states, weights and logits are moved once;
    - log-softmax: 4 FLOPs per logit. Whole: reads logits, writes float32 log-probs. In chunks:
      reads logits, and writes one number per token, which is not counted;
    - logits again: in chunks only, for all chunks but the last, whose table is kept;
    - gradient of logits: 2 FLOPs per logit. Whole: reads log-probs, writes the gradient. In
      chunks: replaces the logits;
    - backward products: 2 T V H FLOPs for the hidden states, and as many for the weight. Its
      float32 gradient is written once per chunk, and read again for every chunk but the first.

    Args:
        tokens: tokens of the micro-batch.
        vocabulary: number of tokens in the vocabulary.
        hidden: size of a hidden state.
        width: bytes per number of hidden states, weights and logits: 2 for bfloat16.
        chunk: tokens per chunk. 0: whole.
        trained: the weight of the head gets a gradient. False for adapters.
    """
    chunks = -(-tokens // chunk) if chunk else 1
    last = tokens - (chunks - 1) * chunk
    weight, products = vocabulary * hidden, 2 * tokens * vocabulary * hidden
    table, states = tokens * vocabulary, tokens * hidden
    again = tokens - last
    found = [
        HeadKernel("logits", products, width * (chunks * weight + states + table)),
        HeadKernel("log-softmax", 4 * table, table * (width if chunk else width + WIDE)),
        HeadKernel(
            "logits again",
            2 * again * weight,
            width * ((chunks - 1) * weight + again * (hidden + vocabulary)),
        ),
        HeadKernel("gradient of logits", 2 * table, table * (width + (width if chunk else WIDE))),
    ]
    moved = width * (table + chunks * weight + states)
    if trained:
        moved += width * (table + states) + WIDE * weight * (2 * chunks - 1)
    found.append(HeadKernel("backward products", products * (2 if trained else 1), moved))
    return tuple(kernel for kernel in found if kernel.flops)


@dataclass(frozen=True)
class HeadTime:
    """Time of the output head by the roofline.

    Attributes:
        moved: bytes between device memory and chip.
        seconds: sum over the kernels, each limited by compute or by memory.
        memory_seconds: part of `seconds` in kernels that memory bandwidth limits.
    """

    flops: float
    moved: float
    seconds: float
    memory_seconds: float


def head_time(
    kernels: Sequence[HeadKernel], *, flops_per_second: float, bytes_per_second: float
) -> HeadTime:
    """Time of the kernels of `head_kernels`, which run one after another."""
    rates = {"flops_per_second": flops_per_second, "bytes_per_second": bytes_per_second}
    bound = [kernel.moved / bytes_per_second for kernel in kernels if kernel.memory_bound(**rates)]
    busy = [
        kernel.flops / flops_per_second for kernel in kernels if not kernel.memory_bound(**rates)
    ]
    return HeadTime(
        flops=sum(kernel.flops for kernel in kernels),
        moved=sum(kernel.moved for kernel in kernels),
        seconds=sum(bound) + sum(busy),
        memory_seconds=sum(bound),
    )
