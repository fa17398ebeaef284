"""Settings of the embedded inference engine."""

from __future__ import annotations

from typing import Literal

from .base import Section, knob


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
    prefix_cache: Literal["radix", "hash", "none"] = knob(
        "radix", "how beginnings that prompts have in common are found, to be computed once"
    )
    preemption: Literal["none", "recompute", "swap"] = knob(
        "none",
        "not none: admit by the room for the prompt, and where blocks run out stop sequences, to be"
        " computed again or swapped to host memory",
    )
    speculation: Literal["none", "ngram"] = knob(
        "none",
        "guess tokens from what the text repeats and check several in one forward; same tokens",
    )
    release_kv: bool = knob(
        False,
        "give the cache's memory back while the trainer works (a GPU shared by both may need it)",
    )
