"""Memory of a model while it is trained and sampled: state, activations, KV cache, logits."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class TrainingState:
    """Bytes per parameter that the trainer holds.

    Attributes:
        weights: the copy that forward and backward passes read.
        master: a float32 copy that the optimizer updates. 0 if it updates `weights`.
    """

    weights: float
    master: float
    gradients: float
    moments: float

    @property
    def total(self) -> float:
        return self.weights + self.master + self.gradients + self.moments


STATES = {
    "bfloat16": TrainingState(weights=2, master=4, gradients=4, moments=8),
    "bfloat16-gradients": TrainingState(weights=2, master=4, gradients=2, moments=8),
    "float32": TrainingState(weights=4, master=0, gradients=4, moments=8),
    "bfloat16-moments": TrainingState(weights=4, master=0, gradients=4, moments=4),
}
"""Usual states: 18, 16, 16 and 12 bytes per parameter.

18 is Megatron-LM's default (docs/user-guide/features/dist_optimizer.md). The two states of 16 bytes
are bfloat16 gradients with a master copy, and float32 weights that need no master copy. 12 is the
latter with Adam's moments in bfloat16.
"""

INFERENCE_WIDTH = 2
"""Bytes per parameter of a model that is only read, in bfloat16."""


def training_bytes(parameters: float, state: TrainingState) -> float:
    """Bytes of weights, gradients and optimizer state, on all devices together."""
    return parameters * state.total


def inference_bytes(parameters: float, width: float) -> float:
    """Bytes of the weights of a model that is only read: reference, reward model or engine."""
    return parameters * width


def sharded_bytes_per_parameter(state: TrainingState, *, stage: int, ranks: int) -> float:
    """Bytes per parameter on each of several data-parallel ranks, without gathered layers.

    Args:
        state: bytes per parameter without sharding.
        stage: ZeRO stage. 0 shards nothing; 1 the master copy and the moments; 2 also the
            gradients; 3 also the weights, as FSDP does.
        ranks: number of data-parallel ranks.
    """
    parts = [state.master + state.moments, state.gradients, state.weights]
    return sum(part / (ranks if i < stage else 1) for i, part in enumerate(parts))


def devices_needed(total: float, *, device_bytes: float, devices_per_node: int) -> int:
    """Smallest number of devices that hold an evenly sharded state, in whole nodes."""
    return devices_per_node * math.ceil(total / device_bytes / devices_per_node)


def activation_bytes(*, layers: int, hidden: int, length: int, sequences: int, width: int) -> int:
    """Activations of a step without checkpointing: `N L B (12 d + 2 L) b` bytes.

    The first term has the inputs of the matrix products of a block; the second one stands for the
    attention scores. It grows with the square of the length. With a fused attention kernel, which
    does not store scores, this is an upper bound: `layer_activation_bytes` is finer.

    Args:
        layers: number of blocks N.
        hidden: width d of the residual stream.
        length: tokens L per sequence.
        sequences: sequences B in a micro-batch.
        width: bytes b per number.
    """
    return layers * length * sequences * (12 * hidden + 2 * length) * width


def layer_activation_bytes(
    *,
    length: int,
    sequences: int,
    hidden: int,
    heads: int,
    tensor: int,
    sequence_parallel: bool,
    recompute: str,
) -> float:
    """Activations of one block with 16-bit numbers, per rank: Korthikanti et al., Table 2.

    https://arxiv.org/abs/2205.05198. The block has a GELU MLP of four times its width, and dropout.

    Args:
        length: tokens s per sequence.
        sequences: sequences b in a micro-batch.
        hidden: width h of the residual stream.
        tensor: tensor-parallel ranks t.
        sequence_parallel: norms and dropouts are also split over the tensor ranks.
        recompute: "none"; "selective" recomputes attention scores, as a fused attention kernel
            does; "full" keeps only the input of the block.
    """
    stream = length * sequences * hidden
    if recompute == "full":
        return float(2 * stream)
    scores = 0.0 if recompute == "selective" else 5 * heads * length / hidden
    unsplit = 10 / tensor if sequence_parallel else 10.0
    return stream * (unsplit + (24 + scores) / tensor)


def kv_bytes_per_token(*, layers: int, kv_heads: int, head_dim: int, width: int) -> int:
    """Bytes of the keys and values of one token: `2 * layers * kv_heads * head_dim * width`.

    Args:
        kv_heads: key-value heads. Fewer than query heads with grouped-query attention.
        head_dim: numbers per head.
        width: bytes per number: 2 for bfloat16, 1 for FP8 and int8 (without scales).
    """
    return 2 * layers * kv_heads * head_dim * width


def latent_bytes_per_token(*, layers: int, latent: int, rotary: int, width: int) -> int:
    """Bytes of one token with multi-head latent attention: `layers * (latent + rotary) * width`.

    https://arxiv.org/abs/2405.04434, Table 1. Tensor parallelism replicates the latent cache.

    Args:
        layers: number of layers.
        latent: width of the compressed keys and values (`kv_lora_rank`).
        rotary: width of the shared rotary key (`qk_rope_head_dim`).
        width: bytes per number.
    """
    return layers * (latent + rotary) * width


def cache_bytes(per_token: int, *, sequences: int, length: int) -> int:
    """Bytes of the cache if all sequences have the same length."""
    return per_token * sequences * length


def cache_tokens(*, device_bytes: float, used_bytes: float, per_token: float) -> int:
    """Tokens that fit in the memory that weights and activations leave. 0 if nothing is left."""
    return max(0, int((device_bytes - used_bytes) // per_token))


def group_tokens(*, prompt: int, completion: int, samples: int, shared: bool) -> int:
    """Tokens in the cache for one group: `P + K G` with a shared prompt, else `K (P + G)`."""
    return (prompt if shared else samples * prompt) + samples * completion


def logits_bytes(*, tokens: int, vocabulary: int, width: int) -> int:
    """Bytes of the logits of a micro-batch."""
    return tokens * vocabulary * width


def whole_logits_peak(*, tokens: int, vocabulary: int, width: int) -> int:
    """Peak bytes of a log-softmax over whole logits, with its gradient.

    At the peak there are the logits, their float32 copy (the log-probabilities), and the gradient
    of the logits.
    """
    return 2 * logits_bytes(tokens=tokens, vocabulary=vocabulary, width=width) + logits_bytes(
        tokens=tokens, vocabulary=vocabulary, width=4
    )


def chunked_logits_bytes(
    *, tokens: int, vocabulary: int, token_chunk: int, vocabulary_chunk: int, width: int
) -> int:
    """Bytes of the logits that exist at once if they are computed in chunks.

    A chunk of at least all tokens, or of the whole vocabulary, splits nothing.
    """
    return logits_bytes(
        tokens=min(tokens, token_chunk), vocabulary=min(vocabulary, vocabulary_chunk), width=width
    )
