"""Peak memory of a sharded trainer, from byte counts alone: nothing here is fitted.

State: bytes per parameter of mixed-precision Adam (Rajbhandari et al., arXiv:1910.02054) with fp32
weights. Activations: tensors that autograd keeps for a layer with a gated MLP and FlashAttention,
counted as in Korthikanti et al. (arXiv:2205.05198).
"""

from __future__ import annotations

from .architectures import Architecture
from .train_time import Layout

STATE_BYTES = 16
"""fp32 weights, gradients and two Adam moments."""

FROZEN_BYTES = 4
"""fp32 weights without gradients: the base model under adapters."""

LOGIT_BYTES = 16
"""Per logit at the peak: bf16 and fp32 logits, fp32 log-softmax and gradient, bf16 gradient."""

KEPT = {"none": 1.0, "selective": 0.5, "full": 0.0}
"""Share of a layer's activations that is kept for the backward pass."""


def layer_bytes(arch: Architecture) -> float:
    """Bytes per token that autograd keeps for one layer in bf16.

    Queries, keys, values and the attention's output; inputs of two norms and the residual; gate,
    up, activation and product of the MLP. Experts add a token's input, output and its gradient for
    each expert that the token uses.
    """
    attention = (2 * arch.heads + 2 * arch.kv_heads) * arch.head_size
    routed = 3 * arch.experts_per_token * arch.hidden
    return 2 * (attention + 3 * arch.hidden + 4 * arch.mlp_width + routed)


def training_gib(
    arch: Architecture,
    layout: Layout,
    tokens: float,
    in_flight: float,
    recompute: str,
    *,
    adapters: bool,
    offloaded: bool,
    chunked_head: bool,
) -> float:
    """GiB per device at the peak of a training step.

    Args:
        arch: the model.
        layout: how the model is split.
        tokens: tokens per micro-batch.
        in_flight: micro-batches whose activations the first pipeline stage holds.
        recompute: none, selective or full.
        adapters: train adapters only.
        offloaded: the kept inputs of layers go to host memory.
        chunked_head: logits are never held for all tokens at once.
    """
    params = arch.params_b * 1e9
    state = params * (FROZEN_BYTES if adapters else STATE_BYTES) / layout.devices
    # Two gathered layers in bf16: the current one and the next.
    gathered = 4 * params / arch.layers / layout.tensor if layout.devices > 1 else 0.0
    local = tokens / (layout.tensor * layout.context)
    layers = arch.layers / layout.pipeline
    inputs = 0.0 if offloaded else 2 * arch.hidden * layers
    kept = layer_bytes(arch) * layers * KEPT[recompute]
    # The layer in the backward pass holds its activations and as many gradients.
    working = 2 * layer_bytes(arch)
    logits = 0.0 if chunked_head else LOGIT_BYTES * arch.vocab
    return (state + gathered + local * (in_flight * (inputs + kept) + max(working, logits))) / 2**30
