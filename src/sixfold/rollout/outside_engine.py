"""An inference engine in another process, in words: token ids in, sampled token ids out, weights handed over under a number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..types import FinishReason, SamplingParams


def stored(weights: Mapping[str, Tensor], dtype: torch.dtype) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Weights as a file holds them, each once, on the CPU and in `dtype`; and for every other name of a tied one the name that it is stored under."""
    first: dict[tuple[int, tuple[int, ...]], str] = {}
    tied: dict[str, str] = {}
    for name, tensor in weights.items():
        stored_as = first.setdefault((tensor.data_ptr(), tuple(tensor.shape)), name)
        if stored_as != name:
            tied[name] = stored_as
    return {name: weights[name].detach().to("cpu", dtype).contiguous() for name in first.values()}, tied


@dataclass(frozen=True)
class Sampled:
    """One completion. `tokens`, `logp` and `version` have one length.

    tokens: sampled ids, the stop token among them. logp: of each under the distribution that it was drawn from. version: weights that sampled it, by
    the engine's own account. reused: prompt tokens that were not computed anew. seconds: from the request to the last token.
    """

    tokens: list[int]
    logp: list[float]
    version: list[int]
    finish_reason: FinishReason
    reused: int
    seconds: float


class OutsideEngine(Protocol):
    """An engine that shares no memory with the trainer. One caller at a time; after an error it is closed.

    version: number of the weights that it has; -1 before the first.
    """

    version: int

    def generate(self, prompts: Sequence[Sequence[int]], params: SamplingParams, seeds: Sequence[int]) -> list[Sampled]:
        """One completion of each prompt, drawn with the seed beside it (`params.seed` is not read). Text is never involved."""
        ...

    def load(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Replace all weights, named as in a checkpoint but with the names of tied ones too, and number them. What is sampled from now on is sampled
        from them, whole."""
        ...

    def score(self, tokens: Sequence[int]) -> list[float]:
        """Log-probs [len(tokens) - 1] of every token but the first, at temperature 1."""
        ...

    def close(self) -> None:
        """End it, or let go of it."""
        ...
