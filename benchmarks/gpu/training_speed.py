"""The trainer's attention over packed rows: one call for all spans, against the matmul rate and
against padded calls with masks.
"""

from __future__ import annotations

from typing import Any

import torch
from shapes import SHAPES
from timing import Clock, Limits
from torch import Tensor

from sixfold.kernels.attention import AttentionLayer
from sixfold.trainer.segments import AttentionPlan, Segment, SpanPlan, plan_calls, plan_spans

COMPLETIONS = 8
REPEATS = 3


def attention_rows(
    name: str, context: int, clock: Clock, limits: Limits, dtypes: tuple[torch.dtype, ...]
) -> list[dict[str, Any]]:
    """Forward and backward of one layer over a prompt of `context` tokens and COMPLETIONS
    completions of as many.

    spans: what a GPU runs (`plan_spans`). calls: what a CPU runs (`plan_calls`), with masks.
    peak_mb: memory beyond the inputs.
    """
    shape, segments = SHAPES[name], [Segment(0, context)]
    segments += [
        Segment(at, at + context, 0, context)
        for at in range(context, (COMPLETIONS + 1) * context, context)
    ]
    scores = sum(s.length * (s.prefix + (s.length + 1) / 2) for s in segments)
    flops = 3.5 * 4 * scores * shape.heads * shape.head_dim  # two products forward, five backward
    rows = []
    for dtype in dtypes:
        for way, plan in (
            ("spans", plan_spans(segments, clock.device)),
            ("calls", plan_calls(segments, clock.device)),
        ):
            inputs = [
                torch.randn(
                    1,
                    heads,
                    segments[-1].stop,
                    shape.head_dim,
                    device=clock.device,
                    dtype=dtype,
                    requires_grad=True,
                )
                for heads in (shape.heads, shape.kv_heads, shape.kv_heads)
            ]
            peak = _peak(clock, plan, inputs)
            seconds = clock.median(
                lambda plan=plan, inputs=inputs: _both_ways(plan, inputs), REPEATS
            )  # type: ignore[misc]
            rows.append(
                {
                    "shape": name,
                    "tokens": segments[-1].stop,
                    "dtype": str(dtype).removeprefix("torch."),
                    "way": way,
                    "ms": seconds * 1e3,
                    "peak_mb": peak / 1e6,
                    "matmul_share": flops / seconds / limits.matmul,
                }
            )
    return rows


def _both_ways(plan: SpanPlan | AttentionPlan, inputs: list[Tensor]) -> None:
    plan.attend(*inputs, AttentionLayer(0)).sum().backward()  # type: ignore[call-arg, misc]


def _peak(clock: Clock, plan: SpanPlan | AttentionPlan, inputs: list[Tensor]) -> float:
    """Bytes; 0 on a CPU, which does not count them."""
    if not clock.on_gpu:
        return 0.0
    before = torch.cuda.memory_allocated(clock.device)
    torch.cuda.reset_peak_memory_stats(clock.device)
    _both_ways(plan, inputs)
    return float(torch.cuda.max_memory_allocated(clock.device) - before)
