"""Settings of the embedded inference engine."""

from __future__ import annotations

from typing import Literal

from .base import Section, knob
from .preemption import NoPreemption, Preemption
from .speculation import NoSpeculation, Speculation


class EngineConfig(Section):
    """The embedded inference engine."""

    block_size: int = knob(16, "tokens in one block of the paged KV cache", ge=1)
    max_running: int = knob(256, "sequences decoded together", ge=1)
    kv_tokens: int = knob(
        0,
        "tokens that the KV cache holds (0: enough for max_running full-length sequences, on a GPU"
        " at most what is free beside training)",
        ge=0,
    )
    cuda_graphs: Literal["auto", "on", "off"] = knob(
        "auto",
        "launch a decode step as one captured CUDA graph: auto (on a GPU; off after a capture that"
        " fails), on (a failure is an error), off",
    )
    prefill_tokens_per_step: int = knob(4096, "prompt tokens computed in one engine step", ge=1)
    chunked_prefill: bool = knob(
        False,
        "compute long prompts in chunks of prefill_tokens_per_step, so that running sequences"
        " decode in between",
    )
    continuous: bool = knob(
        True,
        "continuous batching: start waiting sequences as others finish; false: start a batch only"
        " when the previous one has finished, to measure what continuous batching gains",
    )
    kv_dtype: Literal["auto", "int8"] = knob(
        "auto",
        "dtype of the KV cache: auto (that of the forward pass), or int8, which takes less memory"
        " and changes log-probs; set algorithm.correction with it",
    )
    prefix_cache: Literal["radix", "hash", "none"] = knob(
        "radix", "how beginnings that prompts have in common are found, to be computed once"
    )
    release_kv: bool = knob(
        False,
        "give the cache's memory back while the trainer works (a GPU shared by both may need it)",
    )
    preemption: Preemption = knob(
        NoPreemption(),
        "what happens when KV cache blocks run out: nothing has to (none), or the last sequences"
        " stop and are computed again later (recompute) or moved to host memory (swap)",
        discriminator="kind",
    )
    speculation: Speculation = knob(
        NoSpeculation(),
        "speculative decoding: who proposes tokens that one forward pass checks; ngram gives the"
        " same tokens as none, draft the same distribution",
        discriminator="kind",
    )
