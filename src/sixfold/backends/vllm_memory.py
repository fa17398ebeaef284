"""Fraction of a GPU's memory for vLLM, from byte counts. Needs no torch.

vLLM refuses to start if less than `gpu_memory_utilization` of the *whole* GPU is free. The default
is 0.9, even if the size of its KV cache is given. With a trainer on the same GPU, that much is
never free.
"""

from __future__ import annotations

import math

from ..errors import UserError

CONTEXT = 2_000_000_000
"""Bytes of vLLM's CUDA context, workspaces and CUDA graphs."""


def memory_share(free: int, total: int, weights: int, kv: int, training: int) -> float:
    """`gpu_memory_utilization` for a vLLM process, a multiple of 0.01.

    Args:
        free: free bytes of the GPU.
        total: bytes of the GPU.
        weights: bytes of vLLM's copy of the weights on this GPU.
        kv: bytes of its KV cache on this GPU.
        training: bytes that the trainer will still allocate on this GPU (gradients, optimizer
            states, activations); 0 if the trainer is on another GPU.

    Raises:
        UserError: vLLM and the trainer do not fit in the free memory.
    """
    need = weights + kv + CONTEXT
    share = math.ceil(100 * need / total) / 100
    if need + training > free or share * total > free:
        later = f", and training needs {training / 1e9:.1f} GB more" if training else ""
        raise UserError(
            f"rollout.backend.kind = 'vllm' does not fit: vLLM needs {need / 1e9:.1f} GB"
            f" ({weights / 1e9:.1f} weights, {kv / 1e9:.1f} KV cache){later}; {free / 1e9:.1f} of"
            f" {total / 1e9:.1f} GB are free. Give it another GPU with rollout.backend.devices, set"
            " rollout.backend.sleep = true, or lower engine.max_running or rollout.max_new_tokens"
        )
    return share
