"""Settings of the embedded inference engine."""

from __future__ import annotations

from typing import Literal

from .base import Section, knob
from .preemption import NoPreemption, Preemption
from .speculation import NoSpeculation, Speculation


class EngineConfig(Section):
    """The embedded inference engine."""

    block_size: int = knob(16, "tokens per block of the paged KV cache", ge=1)
    max_running: int = knob(256, "maximum number of sequences that are decoded together", ge=1)
    kv_tokens: int = knob(
        0,
        "tokens in the KV cache (0: enough for max_running sequences of full length; on a"
        " GPU at most what training leaves free)",
        ge=0,
    )
    cuda_graphs: Literal["auto", "on", "off"] = knob(
        "auto",
        "decode with CUDA graphs: auto (on a GPU, until a capture fails), on (a failed"
        " capture is an error), off",
    )
    prefill_tokens_per_step: int = knob(4096, "prompt tokens computed per engine step", ge=1)
    chunked_prefill: bool = knob(
        False,
        "compute long prompts in chunks of prefill_tokens_per_step, so that running sequences"
        " decode in between",
    )
    kv_dtype: Literal["auto", "int8"] = knob(
        "auto",
        "dtype of the KV cache: auto (that of the forward pass), or int8, which takes less"
        " memory and changes log-probs; int8 needs algorithm.correction",
    )
    update_kv: Literal["kept", "recomputed"] = knob(
        "kept",
        "with rollout.staleness > 0: keys and values of running sequences when new weights arrive."
        " kept: later tokens attend to those of the old weights; recomputed: they are computed"
        " again with the new weights, as vLLM always does",
    )
    prefix_cache: Literal["radix", "hash", "none"] = knob(
        "radix",
        "method for finding cached prefixes, so that prompts with a common prefix compute it once",
    )
    release_kv: bool = knob(
        False,
        "free the KV cache while the trainer works, if both use the same GPU",
    )
    preemption: Preemption = knob(
        NoPreemption(),
        "what happens when KV cache blocks run out. none: blocks are reserved, so this cannot"
        " happen; recompute: the last sequences stop and are computed again later; swap: they"
        " are moved to host memory",
        discriminator="kind",
    )
    speculation: Speculation = knob(
        NoSpeculation(),
        "speculative decoding: source of proposed tokens, which one forward pass checks. ngram"
        " gives the same tokens as none, draft the same distribution",
        discriminator="kind",
    )
