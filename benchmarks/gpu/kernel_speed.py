"""Each kernel of a decode step alone, and attention of a prefill, against its roofline: the time
that its needed bytes or FLOPs take at best.

Attention is measured inside the engine's own steps: a model that is nothing but one attention layer
is handed the layouts that a real one would be.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from engine_speed import prompts
from shapes import SHAPES
from timing import Clock, Limits
from tiny_qwen import Shape
from torch import Tensor, nn
from transformers import PreTrainedModel

from sixfold.engine.engine import Engine
from sixfold.engine.sampler import sample
from sixfold.kernels.attention import AttentionLayer
from sixfold.model.base import Body, Layout
from sixfold.types import SamplingParams


@dataclass(frozen=True)
class Case:
    """One kernel. bytes_moved, flops: what it needs, each number once."""

    name: str
    work: Callable[[], object]
    bytes_moved: float
    flops: float


class AttentionProbe:
    """A `LanguageModel` of one attention layer over random queries, keys and values, which times
    every call of the layout's attention.
    """

    def __init__(self, shape: Shape, clock: Clock, dtype: torch.dtype) -> None:
        self.module = nn.Linear(1, shape.vocabulary, bias=False, device=clock.device, dtype=dtype)
        self.shape, self.clock, self.dtype = shape, clock, dtype
        self.seconds: list[float] = []

    def hidden(
        self, tokens: Tensor, positions: Tensor, layout: Layout, additions: object = None
    ) -> Tensor:
        """tokens, positions [N] -> zeros [N, 1]."""
        s = self.shape
        q, k, v = (
            torch.randn(1, heads, len(tokens), s.head_dim, device=tokens.device, dtype=self.dtype)
            for heads in (s.heads, s.kv_heads, s.kv_heads)
        )
        # Again and again: writing the same keys to the same slots changes nothing.
        self.seconds.append(self.clock.median(lambda: layout.attend(q, k, v, AttentionLayer(0))))
        return torch.zeros(len(tokens), 1, device=tokens.device, dtype=self.dtype)

    def body(self, build: object) -> Body:
        """Itself."""
        return self

    steady = False

    def ready(self) -> Body:
        """Itself."""
        return self

    def lowered(self, dtype: torch.dtype, build: object) -> Body:
        """Itself."""
        return self

    def refresh(self) -> None:
        """Nothing to do: there are no copies of weights."""

    def release(self) -> None:
        """Nothing to do: there are no copies of weights."""

    def graph_fingerprint(self) -> None:
        """None: the clock is read between launches, which no graph can hold."""

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, 1] -> float32 [N, V]."""
        return self.module(hidden).float()


def attention_rows(
    shape: Shape, batch: int, context: int, clock: Clock, dtype: torch.dtype
) -> list[tuple[str, float, float, float]]:
    """(name, seconds, bytes needed, FLOPs needed) of one layer's attention: of `batch` sequences
    that decode behind `context` tokens, and of one prompt of that length."""
    item = torch.empty(0, dtype=dtype).element_size()
    probe = AttentionProbe(shape, clock, dtype)
    engine = Engine(
        probe,
        kv_tokens=batch * (context + 32),
        max_running=batch,
        prefill_tokens=context,
        prefix_cache="none",
    )
    for i, prompt in enumerate(prompts(batch, context, shape.vocabulary)):
        engine.add(str(i), prompt, SamplingParams(2), [0])
    engine.run()
    width = shape.heads * shape.head_dim
    kept = 2 * shape.kv_heads * shape.head_dim
    pairs = context * (context + 1) // 2
    decode, prefill = probe.seconds[-1], probe.seconds[0]
    return [
        (
            "attention, decode",
            decode,
            item * batch * (kept * (context + 1) + 2 * width),
            4 * width * batch * (context + 1),
        ),
        ("attention, prefill", prefill, item * context * (kept + 2 * width), 4 * width * pairs),
    ]


def step_cases(model: PreTrainedModel, shape: Shape, batch: int) -> list[Case]:
    """The kernels of a decode step of `batch` sequences, but for attention."""
    body: Any = model.base_model
    layer, parameter = body.layers[0], next(model.parameters())
    item = parameter.element_size()
    x = torch.randn(batch, shape.hidden, device=parameter.device, dtype=parameter.dtype)
    logits = torch.randn(batch, shape.vocabulary, device=parameter.device)
    params, noise, history = [SamplingParams(1)] * batch, [0.5] * batch, [[0]] * batch
    qkv = shape.hidden * shape.head_dim * (shape.heads + 2 * shape.kv_heads)
    mlp = 3 * shape.hidden * shape.intermediate
    head = shape.hidden * shape.vocabulary
    attend, row = layer.self_attn, batch * shape.hidden
    return [
        Case("norm", lambda: layer.input_layernorm(x), item * (2 * row + shape.hidden), 4 * row),
        Case(
            "q, k and v",
            lambda: (attend.q_proj(x), attend.k_proj(x), attend.v_proj(x)),
            item * (qkv + row),
            2 * batch * qkv,
        ),
        Case("MLP", lambda: layer.mlp(x), item * (mlp + 2 * row), 2 * batch * mlp),
        Case(
            "head",
            lambda: model.get_output_embeddings()(x),
            item * (head + row + batch * shape.vocabulary),
            2 * batch * head,
        ),
        Case(
            "sampling",
            lambda: sample(logits, params, noise, history),
            logits.nbytes,
            3 * logits.numel(),
        ),
    ]


@torch.inference_mode()
def kernel_rows(
    name: str, model: PreTrainedModel, batch: int, context: int, clock: Clock, limits: Limits
) -> list[dict[str, Any]]:
    """A row a kernel: its time, what bounds it, and the share of the roofline that it reaches."""
    shape, dtype = SHAPES[name], next(model.parameters()).dtype
    measured = [
        (case.name, clock.median(case.work), case.bytes_moved, case.flops)
        for case in step_cases(model, shape, batch)
    ]
    rows = []
    for kernel, seconds, moved, flops in measured + attention_rows(
        shape, batch, context, clock, dtype
    ):
        rows.append(
            {
                "shape": name,
                "batch": batch,
                "context": context,
                "kernel": kernel,
                "us": seconds * 1e6,
                "bound_us": limits.seconds(moved, flops) * 1e6,
                "bound": (
                    "bandwidth" if moved / limits.bandwidth > flops / limits.matmul else "matmul"
                ),
                "roofline_share": limits.seconds(moved, flops) / seconds,
            }
        )
    return rows
