"""The engine as a whole: decode against the memory's bandwidth, prefill against the matmul rate.
Sampling and scheduling are in the times.
"""

from __future__ import annotations

import random
import statistics
from typing import Any

from shapes import SHAPES, decode_bytes
from timing import Clock, Limits
from tiny_qwen import forward_flops
from transformers import PreTrainedModel

from sixfold.engine.engine import Engine
from sixfold.model.causal_lm import CausalLM
from sixfold.types import SamplingParams

MODES: dict[str, dict[str, Any]] = {
    "eager": {"cuda_graphs": False},
    "graphs": {"cuda_graphs": True},
}
"""Name -> what the engine is made with. A way of running a step is one more row."""
WARM_STEPS = 4


def prompts(count: int, tokens: int, vocabulary: int) -> list[list[int]]:
    """Random prompts that share nothing."""
    rng = random.Random(0)
    return [rng.choices(range(vocabulary), k=tokens) for _ in range(count)]


def make_engine(model: PreTrainedModel, mode: str, batch: int, longest: int) -> Engine:
    """An engine with room for `batch` sequences of `longest` tokens; every prompt is new to it."""
    return Engine(
        CausalLM(model),
        kv_tokens=batch * (longest + 16),
        max_running=batch,
        prefix_cache="none",
        **MODES[mode],
    )


def decode_row(
    name: str,
    model: PreTrainedModel,
    mode: str,
    batch: int,
    context: int,
    steps: int,
    clock: Clock,
    limits: Limits,
) -> dict[str, Any]:
    """Median time of a step that decodes `batch` sequences of about `context` tokens, the bandwidth
    that its needed bytes make of it, and the share of the steps whose forward was the replay of a
    CUDA graph."""
    shape, item = SHAPES[name], next(model.parameters()).element_size()
    engine = make_engine(model, mode, batch, context + WARM_STEPS + steps + 1)
    for i, prompt in enumerate(prompts(batch, context, shape.vocabulary)):
        engine.add(str(i), prompt, SamplingParams(WARM_STEPS + steps + 1), [0])
    while engine.scheduler.waiting:
        engine.step()
    for _ in range(WARM_STEPS):
        engine.step()
    replays = engine.stats.graph_replays
    seconds = []
    for _ in range(steps):
        start = clock.synchronize()
        engine.step()
        seconds.append(clock.synchronize() - start)
    length = context + 1 + WARM_STEPS + steps // 2
    median = statistics.median(seconds)
    rate = decode_bytes(shape, [length] * batch, item) / median
    return {
        "shape": name,
        "mode": mode,
        "batch": batch,
        "context": context,
        "step_ms": median * 1e3,
        "tok_s": batch / median,
        "gb_s": rate / 1e9,
        "bandwidth_share": rate / limits.bandwidth,
        "replayed_share": (engine.stats.graph_replays - replays) / steps,
    }


def prefill_row(
    name: str,
    model: PreTrainedModel,
    mode: str,
    batch: int,
    context: int,
    clock: Clock,
    limits: Limits,
) -> dict[str, Any]:
    """Time to compute `batch` prompts of `context` tokens, the second time round, and the FLOP rate
    that it makes.
    """
    shape = SHAPES[name]
    engine = make_engine(model, mode, batch, context + 1)
    seconds = 0.0
    for _ in range(2):
        for i, prompt in enumerate(prompts(batch, context, shape.vocabulary)):
            engine.add(str(i), prompt, SamplingParams(1), [0])
        start = clock.synchronize()
        engine.run()
        seconds = clock.synchronize() - start
    rate = batch * forward_flops(shape, 0, context, predictions=1) / seconds
    return {
        "shape": name,
        "mode": mode,
        "batch": batch,
        "context": context,
        "tok_s": batch * context / seconds,
        "tflop_s": rate / 1e12,
        "matmul_share": rate / limits.matmul,
    }
