"""Create the embedded engine from the settings of [engine]."""

from __future__ import annotations

import torch

from ..engine.engine import Engine
from ..engine.speculative import Speculation
from ..model.base import LanguageModel
from ..recipe.schema import EngineConfig


def embedded_engine(
    model: LanguageModel,
    config: EngineConfig,
    kv_tokens: int,
    autocast: torch.dtype | None,
    speculation: Speculation | None = None,
) -> Engine:
    """Create an engine.

    Args:
        model: the model that it runs.
        config: settings of the engine.
        kv_tokens: tokens of running sequences that the KV cache holds.
        autocast: dtype of the forward passes. None: the dtype of the weights.
        speculation: speculative decoding. None: one token per step.
    """
    preemption = config.preemption
    return Engine(
        model,
        kv_tokens=kv_tokens,
        block_size=config.block_size,
        max_running=config.max_running,
        prefill_tokens=config.prefill_tokens_per_step,
        prefix_cache=config.prefix_cache,
        chunked_prefill=config.chunked_prefill,
        preemption=preemption.kind,
        # None: as many as the KV cache
        host_tokens=(preemption.host_tokens or None) if preemption.kind == "swap" else None,
        update_kv=config.update_kv,
        kv_dtype=config.kv_dtype,
        autocast=autocast,
        speculation=speculation,
        cuda_graphs={"auto": None, "on": True, "off": False}[config.cuda_graphs],
    )
