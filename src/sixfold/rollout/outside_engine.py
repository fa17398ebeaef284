"""Contract of inference engines in another process.

They take and return token ids. Each set of weights that they receive has a version number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..types import FinishReason, SamplingParams


def stored(
    weights: Mapping[str, Tensor], dtype: torch.dtype
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Prepare weights for a file: each tensor once, on the CPU and in `dtype`.

    Args:
        weights: tensors by name. Tied tensors may have several names.
        dtype: dtype of the result.

    Returns:
        The tensors by name, and for every further name of a tied tensor the name it is stored
        under.
    """
    first: dict[tuple[int, tuple[int, ...]], str] = {}
    tied: dict[str, str] = {}
    for name, tensor in weights.items():
        stored_as = first.setdefault((tensor.data_ptr(), tuple(tensor.shape)), name)
        if stored_as != name:
            tied[name] = stored_as
    return {
        name: weights[name].detach().to("cpu", dtype).contiguous() for name in first.values()
    }, tied


@dataclass(frozen=True)
class Sampled:
    """One completion. `tokens`, `logp` and `version` have the same length.

    Attributes:
        tokens: sampled token ids, including the stop token.
        logp: log-prob of each token under the distribution that it was sampled from.
        version: version of the weights that sampled each token, as reported by the engine.
        finish_reason: why sampling ended.
        reused: prompt tokens that came from the prefix cache.
        seconds: time from the request to the last token.
    """

    tokens: list[int]
    logp: list[float]
    version: list[int]
    finish_reason: FinishReason
    reused: int
    seconds: float


class OutsideEngine(Protocol):
    """An engine that shares no memory with the trainer. After an error it is closed.

    Only one call may run at a time.

    Attributes:
        version: version of the engine's weights; -1 before the first `load`.
    """

    version: int

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, seeds: Sequence[int]
    ) -> list[Sampled]:
        """Sample one completion per prompt.

        Args:
            prompts: token ids of each prompt.
            params: sampling parameters. `params.seed` is ignored.
            seeds: one seed per prompt.
        """
        ...

    def load(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Replace all weights. Every completion that starts after this call is sampled from them.

        Args:
            weights: tensors named as in a checkpoint, and under every name of a tied tensor.
            version: version number of these weights.
        """
        ...

    def score(self, tokens: Sequence[int]) -> list[float]:
        """Log-probs [len(tokens) - 1] of all tokens but the first, at temperature 1."""
        ...

    def close(self) -> None:
        """End the engine, or disconnect from an engine that this process did not start."""
        ...
