"""What is asked of the engine and where each completion stands, as a few integers.

Inequality chain of a running sequence: 0 < prompt_length <= cached < length <= limit, where `cached` tokens have their keys and values in the
cache: all but the newest, which the next decode step computes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from ..types import FinishReason, SamplingParams


@dataclass(eq=False)
class Request:
    """One prompt and the samples wanted of it. The prompt is computed once; its blocks are shared by the samples until all have started.

    key: names the task in the sampling noise. samples: sample indices still to start. blocks: the prompt's, once computed. logits: [V], predicts the
    first token, once computed. unfinished: samples that have not ended.
    """

    key: str
    prompt: list[int]
    params: SamplingParams
    samples: list[int]
    blocks: list[int] = field(default_factory=list)
    logits: Tensor | None = None
    unfinished: int = 0

    def __post_init__(self) -> None:
        self.unfinished = len(self.samples)

    @property
    def limit(self) -> int:
        """Longest a sequence of this request gets, prompt included."""
        return len(self.prompt) + self.params.max_tokens


@dataclass(eq=False)
class Sequence:
    """One completion being sampled. tokens holds prompt and completion; logp and version speak of the completion only."""

    request: Request
    sample: int
    noise: np.ndarray
    tokens: list[int]
    blocks: list[int]
    started: float
    logp: list[float] = field(default_factory=list)
    version: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    seconds: float = 0.0

    @property
    def length(self) -> int:
        """Tokens so far, prompt included."""
        return len(self.tokens)
